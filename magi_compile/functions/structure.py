"""A function of Python without the numbers in its tensors: its code, and what kinds of things it reaches.

A training step makes the mask_mod of the step before anew, over other documents. Two functions of one structure do the
same with their tensors, unless they ask for what is in these.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.functions.reached import UNNAMED, names_in

_NUMBERS = (bool, int, str, bytes, range, type(None), type(...))
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_CALLED = (types.FunctionType, types.BuiltinFunctionType, type)  # no instances, which may change
# Their functions follow from what they are called with, and from nothing else.
_LIBRARIES = frozenset(("torch", "math", "operator", "_operator"))
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
    """The structure of a function.

    Args:
        function: any object.

    Returns:
        Its structure; None where it reaches more than tensors, numbers, other functions and those of PyTorch.
    """
    reading = _Reading()
    try:
        return Structure(reading.kind(function), reading.tensors)
    except _UnknownError:
        return None


class _Reading:
    """The things that were reached so far."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.places: dict[int, int] = {}  # of tensors and functions, by `id`
        self.count = 0

    def kind(self, value: Any) -> Hashable:
        self.count += 1
        if self.count > _MOST:
            raise _UnknownError
        if isinstance(value, Tensor):
            return self._tensor(value)
        cls = type(value)
        if cls in _NUMBERS or isinstance(value, _OF_TORCH):
            return cls, value
        if cls in (float, complex):
            return cls, repr(value)  # 0.0 is not -0.0
        if cls is tuple or cls is list:
            return (cls, *[self.kind(x) for x in value])
        # A function of PyTorch's may hold others of the user's: `and_masks`.
        if cls is types.FunctionType and not (
            _is_of_a_library(value.__module__) and value.__closure__ is None
        ):
            return self._function(value)
        if cls is types.ModuleType and _is_of_a_library(value.__name__):
            return cls, value.__name__
        if isinstance(value, _CALLED) and _is_of_a_library(getattr(value, "__module__", None)):
            return cls, value
        raise _UnknownError

    def _tensor(self, x: Tensor) -> Hashable:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_nested:
            raise _UnknownError
        if id(x) not in self.places:
            self.places[id(x)] = len(self.places)
            self.tensors.append(x)
        place = self.places[id(x)]
        return type(x), place, x.dtype, x.shape, x.stride(), x.device, x.requires_grad

    def _function(self, function: types.FunctionType) -> Hashable:
        if id(function) in self.places:  # it calls itself
            return self.places[id(function)]
        self.places[id(function)] = len(self.places)
        code = function.__code__
        names = names_in(code)
        if vars(function) or not UNNAMED.isdisjoint(names):
            raise _UnknownError
        found: list[Hashable] = [code]
        for cell in function.__closure__ or ():
            try:
                found.append(self.kind(cell.cell_contents))
            except ValueError:  # nothing is in it yet
                raise _UnknownError from None
        found += [self.kind(x) for x in function.__defaults__ or ()]
        found += [(name, self.kind(x)) for name, x in (function.__kwdefaults__ or {}).items()]
        # The same names are those of attributes, of which there may be globals by chance.
        for name in sorted(names & function.__globals__.keys()):
            found.append((name, self.kind(function.__globals__[name])))
        # Of others, some may be modules that it imports itself.
        others = names - function.__globals__.keys()
        if any(name in sys.modules and not _is_of_a_library(name) for name in others):
            raise _UnknownError
        if vars(builtins) is not function.__builtins__:  # type: ignore[attr-defined]
            raise _UnknownError
        return tuple(found)


def _is_of_a_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
