"""A function of Python without the numbers in its tensors: its code, and what kinds of things it reaches.

A training step makes the mask_mod of the step before anew, over other documents. Two functions of one structure do the
same with their tensors, unless they ask for what is in these.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Hashable, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.functions.reached import UNNAMED, names_in

_NUMBERS = (bool, int, str, bytes, type(None), type(...))
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
# Their calls follow from what they are given, and from nothing else.
_TYPES = (
    *_OF_TORCH[:-1],
    *(torch.Tensor, torch.nn.Parameter, torch.finfo, torch.iinfo),
)
_MODULES = ("math", "operator", "_operator")
# By these a function asks for more than it names, or changes it.
_UNKNOWN = UNNAMED | {"open", "input", "id", "hash", "dir", "setattr", "delattr"}
# As they are known: what others add to them may change.
_BUILTINS, _METHODS = dict(vars(builtins)), dict(vars(Tensor))
_MOST = 64  # things that a function reaches: others are not worth to be looked at


class Structure(NamedTuple):
    """The structure of a function.

    Attributes:
        key: equal for functions of one structure.
        tensors: those that it reaches, each once, in the order of the structure.
    """

    key: Hashable
    tensors: list[Tensor]


class _UnknownError(Exception):
    """Something that may be more than it shows."""


def structure_of(function: Any) -> Structure | None:
    """The structure of a function; None where it reaches more than tensors, numbers, other functions and those of
    PyTorch."""
    reading = _Reading()
    try:
        kind = reading.kind(function)
        return Structure((kind, *reading.attributes()), reading.tensors)
    except _UnknownError:
        return None


@cache
def _functions_of_tensors() -> frozenset[Any]:
    """The functions of PyTorch's that show what they are called with, and ask for nothing else; and one that has the
    name of a builtin."""
    return frozenset((*torch.overrides.get_testing_overrides(), torch.range))


class _Reading:
    """The things that were reached so far."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.modules: list[types.ModuleType] = []
        self.names: set[str] = set()  # in the code of all functions
        self.places: dict[int, int] = {}  # of tensors, lists and functions, by `id`
        self.count = 0

    def kind(self, value: Any) -> Hashable:
        self.count += 1
        if self.count > _MOST:
            raise _UnknownError
        if isinstance(value, Tensor):
            return self._tensor(value)
        cls = type(value)
        if cls in _NUMBERS:
            return cls, value
        if cls in (float, complex, range) or isinstance(value, _OF_TORCH):
            return cls, repr(value)  # 0.0 is not -0.0
        if cls is tuple:
            return (cls, *[self.kind(x) for x in value])
        if cls is list:
            return self._place(value) or (cls, *[self.kind(x) for x in value])
        is_function = cls in (types.FunctionType, types.BuiltinFunctionType)
        if is_function and value in _functions_of_tensors():
            return cls, value
        if cls is types.FunctionType:
            return self._place(value) or self._function(value)
        if cls is types.ModuleType and _is_of_a_library(value.__name__):
            if value not in self.modules:
                self.modules.append(value)
            return cls, value.__name__
        if any(value is x for x in _TYPES) or (is_function and value.__module__ in _MODULES):
            return cls, value
        raise _UnknownError

    def attributes(self) -> list[Hashable]:
        """The kinds of what the functions may ask modules for. Of tensors they ask for nothing that PyTorch does not
        know."""
        found: list[Hashable] = []
        for module in self.modules:  # which become more
            for name in _among(self.names, vars(module)):
                found.append((name, self.kind(vars(module)[name])))
        is_open = not _are_same(self.names, vars(Tensor), _METHODS)
        if is_open or any(vars(x) and _among(self.names, vars(x)) for x in self.tensors):
            raise _UnknownError
        return found

    def _place(self, value: Any) -> int | None:
        """The place at which it was reached before; None where it was not."""
        place = self.places.get(id(value))
        if place is None:
            self.places[id(value)] = len(self.places) + 1
        return place

    def _tensor(self, x: Tensor) -> Hashable:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_nested:
            raise _UnknownError
        place = self._place(x)
        if place is None:
            self.tensors.append(x)
        return type(x), place, x.dtype, x.shape, x.stride(), x.device, x.requires_grad

    def _function(self, function: types.FunctionType) -> Hashable:
        code = function.__code__
        names = names_in(code)
        is_open = not _UNKNOWN.isdisjoint(names) or any(x.startswith("__") for x in names)
        if vars(function) or is_open or _does_more(code):
            raise _UnknownError
        self.names |= names
        found: list[Hashable] = [code]
        for cell in function.__closure__ or ():
            try:
                found.append(self.kind(cell.cell_contents))
            except ValueError:  # nothing is in it yet
                raise _UnknownError from None
        found += [self.kind(x) for x in function.__defaults__ or ()]
        found += [(name, self.kind(x)) for name, x in (function.__kwdefaults__ or {}).items()]
        # The same names are those of attributes, of which there may be globals by chance.
        for name in _among(names, function.__globals__):
            found.append((name, self.kind(function.__globals__[name])))
        now = function.__builtins__  # type: ignore[attr-defined]
        others = names - function.__globals__.keys()
        if now is not vars(builtins) or not _are_same(others, now, _BUILTINS):
            raise _UnknownError
        return tuple(found)


@lru_cache(maxsize=1024)
def _does_more(code: types.CodeType) -> bool:
    """True if code imports something, or changes variables that it does not make."""
    return _imports_or_writes(code) or bool(_written(code))


def _imports_or_writes(code: types.CodeType) -> bool:
    names = {x.opname for x in dis.get_instructions(code)}
    is_any = not names.isdisjoint(("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"))
    return is_any or any(map(_imports_or_writes, _codes_in(code)))


def _written(code: types.CodeType) -> set[str]:
    """The variables of functions around it that it writes to."""
    written = {x.argval for x in dis.get_instructions(code) if x.opname in _WRITES}
    return written.union(*map(_written, _codes_in(code))).intersection(code.co_freevars)


_WRITES = ("STORE_DEREF", "DELETE_DEREF")


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    return [x for x in code.co_consts if isinstance(x, types.CodeType)]


def _among(names: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    return sorted([name for name in names if name in known])


def _are_same(names: Iterable[str], now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    return all([now.get(name) is then.get(name) for name in names])


def _is_of_a_library(module: str) -> bool:
    return module.partition(".")[0] in ("torch", *_MODULES)
