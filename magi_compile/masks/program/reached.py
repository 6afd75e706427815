"""What a BlockMask says and what its mask_mod can read: whether it is all what it was, found out in a few microseconds.

    def mask_mod(b, h, q, kv): return (document[q] == document[kv]) & (q - kv < config.WINDOW)

A mask_mod is read by calling it once. What it read then may be another thing later: a variable bound to another tensor, an attribute, an
item of a list. `reach` follows it without calling it: closures, globals, defaults, attributes and items, also those of the functions and
objects that these hold, by the names that occur in their code. Each place is compared by identity later, numbers and strings by value.

Where something cannot be followed, nothing is known of the rest: an object that computes its attributes, an iterator, a NumPy array, code
that looks up by names that it makes, or too many places. Code of PyTorch, of NumPy and of Python's own library is taken to stay as it is.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.masks.program.operators import is_numpy_scalar

MAX_PLACES = 1024

_ABSENT: Any = object()
_NUMBERS = (int, float, bool, complex, str, bytes)
_ATOMS = (
    *(*_NUMBERS, type(None), type(...), type(NotImplemented), range, slice),
    *(Tensor, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_OF_CODE = (
    *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.MethodWrapperType, types.GetSetDescriptorType, types.ClassMethodDescriptorType),
    *(types.MemberDescriptorType, types.CodeType, *_compat.types_of_ops()),
)
_FIELD = type(NamedTuple("_Pair", [("x", int)]).x)
_DESCRIPTORS = (staticmethod, classmethod)
# Names by which code finds what no name of its own says.
_OPAQUE_NAMES = frozenset(
    ("globals", "locals", "eval", "exec", "__import__", "import_module", "environ", "open", "next")
)
_NAMES_OF_ALL = frozenset(
    ("getattr", "hasattr", "vars", "__dict__", "attrgetter", "asdict", "astuple", "fields")
)
_LIBRARIES = frozenset(
    ("torch", "numpy", "triton", "einops", "transformers", "magi_compile", "builtins")
    + tuple(sys.stdlib_module_names)
) - {"__main__"}
# Special methods that no code names where it calls them; not those that make or print an object.
_NOT_CALLED = frozenset(
    ("__init__", "__new__", "__repr__", "__str__", "__init_subclass__", "__class_getitem__")
    + ("__del__", "__reduce__", "__reduce_ex__", "__format__", "__sizeof__", "__dir__")
)


class Reached:
    """Places that a mask_mod can read, and what was there."""

    __slots__ = ("cells", "containers", "functions", "getters", "items", "sets")

    def __init__(self) -> None:
        self.items: list[tuple[Callable[..., Any], Any, Any]] = []  # of mappings, by their `get`
        self.cells: list[tuple[types.CellType, Any]] = []
        self.functions: list[tuple[types.FunctionType, Any, Any, Any]] = []
        self.containers: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self.sets: list[tuple[Any, frozenset]] = []
        self.getters: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return sum(len(getattr(self, name)) for name in self.__slots__)

    def is_same(self) -> bool:
        """Whether all of it is what it was."""
        for get, name, value in self.items:
            if (now := get(name, _ABSENT)) is not value and not _are_equal(now, value):
                return False
        for cell, value in self.cells:
            if (now := _content(cell)) is not value and not _are_equal(now, value):
                return False
        for function, code, defaults, others in self.functions:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not others
            ):
                return False
        for container, keys, values in self.containers:
            if len(container) != len(values):
                return False
            now_keys, now_values = _parts(container)
            if not (all(map(is_, now_keys, keys)) and all(map(_is_value, now_values, values))):
                return False
        return all([x == y for x, y in self.sets]) and all(
            [
                (now := getattr(x, name, _ABSENT)) is value or _are_equal(now, value)
                for x, name, value in self.getters
            ]
        )


def reach(holder: Any, names: Iterable[str]) -> Reached | None:
    """Follows attributes of an object.

    Args:
        holder: the object.
        names: of the attributes that count.

    Returns:
        These attributes, and all places that functions among them can read; None where something cannot be followed.
    """
    walk = _Walk()
    try:
        for name in names:
            walk.visit(walk.item(vars(holder), name))
        walk.follow_names()
    except _CannotFollow:
        return None
    return walk.reached


class _CannotFollow(Exception):
    """Something has places that nobody knows."""


class _Walk:
    def __init__(self) -> None:
        self.reached = Reached()
        self.seen: dict[int, Any] = {}
        self.names: dict[str, None] = {}
        self.owners: list[Any] = []  # whose attributes code may name

    # Places

    def item(self, mapping: Mapping[str, Any], name: Any) -> Any:
        value = mapping.get(name, _ABSENT)
        get = functools.partial(dict.get, mapping) if type(mapping) not in _PLAIN else mapping.get
        self.reached.items.append((get, name, value))
        return value

    def container(self, value: Any) -> None:
        keys, values = _parts(value)
        keys, values = tuple(keys), tuple(values)
        if len(self.reached) + len(values) > MAX_PLACES:
            raise _CannotFollow
        if not isinstance(value, tuple):  # which stays as it is
            self.reached.containers.append((value, keys, values))
        for x in values:
            self.visit(x)

    # What holds places

    def visit(self, value: Any) -> None:
        """Follows a value."""
        if value is _ABSENT or isinstance(value, _ATOMS):
            return
        if id(value) in self.seen or is_numpy_scalar(value):
            return
        self.seen[id(value)] = value
        if len(self.seen) + len(self.reached) > MAX_PLACES:
            raise _CannotFollow
        if isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__)
            self.object(value.__self__, is_self=True)
        elif isinstance(value, functools.partial):
            self.visit(value.func)
            self.visit(value.args)
            self.visit(value.keywords)
        elif isinstance(value, property):
            self.visit(value.fget)
        elif isinstance(value, functools.cached_property):
            self.visit(value.func)
        elif isinstance(value, _DESCRIPTORS):
            self.visit(value.__func__)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.visit(value.__wrapped__)
        elif isinstance(value, types.ModuleType):
            self.module(value)
        elif isinstance(value, type):
            self.of_class(value)
        elif isinstance(value, types.BuiltinMethodType) and not isinstance(
            value.__self__, (types.ModuleType, type, type(None))
        ):
            self.visit(value.__self__)
        elif isinstance(value, (*_OF_CODE, _FIELD)):
            return
        elif isinstance(value, (list, tuple, dict)):
            self.container(value)
            if not _is_library(type(value).__module__):
                self.object(value)
        elif isinstance(value, (set, frozenset)):
            self.reached.sets.append((value, frozenset(value)))
            for x in value:
                self.visit(x)
        else:
            self.object(value)

    def function(self, value: types.FunctionType) -> None:
        code = value.__code__
        others = value.__kwdefaults__
        self.reached.functions.append((value, code, value.__defaults__, others))
        for cell in value.__closure__ or ():
            content = _content(cell)
            self.reached.cells.append((cell, content))
            self.visit(content)
        for x in value.__defaults__ or ():
            self.visit(x)
        if others:
            self.visit(others)
        if _is_library(value.__module__):
            return
        names = _names_of(code)
        if names & _OPAQUE_NAMES:
            raise _CannotFollow
        for name in names:
            if name in value.__globals__:
                self.visit(self.item(value.__globals__, name))
            elif name in sys.modules:  # imported in the function
                self.visit(sys.modules[name])
        self.names.update(dict.fromkeys(names))
        self.owners.append(value)

    def module(self, value: types.ModuleType) -> None:
        if _is_library(value.__name__):
            return
        self.owners.append(value)

    def of_class(self, value: type) -> None:
        if _is_library(value.__module__):
            return
        self.owners.append(value)
        for name in ("__init__", "__new__"):  # of what the code may make
            if isinstance(made := vars(value).get(name), types.FunctionType):
                self.visit(made)

    def object(self, value: Any, *, is_self: bool = False) -> None:
        """An object of any other class; `is_self` says whether it is that of a method, which a module does not call."""
        if isinstance(value, (types.ModuleType, type)):
            self.visit(value)
            return
        self.seen[id(value)] = value
        kind, is_module = type(value), isinstance(value, torch.nn.Module)
        if kind.__getattribute__ not in (object.__getattribute__, *_OF_CONTAINERS):
            raise _CannotFollow
        if hasattr(kind, "__getattr__") and not is_module:
            raise _CannotFollow
        of_users = [x for x in kind.__mro__ if not _is_library(x.__module__)]
        is_container = isinstance(value, (list, tuple, dict))
        if not hasattr(value, "__dict__") and not is_container and not _has_slots(kind):
            raise _CannotFollow  # what it holds is not in Python
        self.owners.append(value)
        if is_module and not of_users:
            for name in _OF_MODULES:
                self.visit(vars(value)[name])
        for cls in of_users:
            for name, method in vars(cls).items():
                is_special = name.startswith("__") and name.endswith("__")
                is_called = is_special and name not in _NOT_CALLED
                is_called |= is_module and name == "forward" and not is_self
                if is_called and isinstance(method, types.FunctionType):
                    self.visit(method)

    # Attributes

    def follow_names(self) -> None:
        """Looks up all names on all that may have them, until nothing new is found."""
        done: dict[int, int] = {}
        is_moving = True
        while is_moving:
            is_moving = False
            for owner in list(self.owners):
                known = done.get(id(owner), 0)
                names = list(self.names)
                if len(names) * len(self.owners) > MAX_PLACES * 16:
                    raise _CannotFollow
                if known < len(names):
                    done[id(owner)] = len(names)
                    is_moving = True
                    for name in names[known:]:
                        self.attribute(owner, name)

    def attribute(self, owner: Any, name: str) -> None:
        if len(self.reached) > MAX_PLACES:
            raise _CannotFollow
        own = getattr(owner, "__dict__", None)
        if name in _NAMES_OF_ALL:
            if isinstance(owner, types.ModuleType):
                raise _CannotFollow
            if own is not None and not isinstance(owner, (type, types.FunctionType)):
                self.visit(own)
            return
        if isinstance(owner, (types.ModuleType, types.FunctionType)):
            if name in own:
                self.visit(self.item(own, name))
            return
        classes = (owner if isinstance(owner, type) else type(owner)).__mro__
        if not isinstance(owner, type) and own is not None:
            if name in own:
                self.visit(self.item(own, name))
                return
            if isinstance(owner, torch.nn.Module):
                for place in _OF_MODULES:
                    if name in own[place]:
                        self.visit(self.item(own[place], name))
                        return
        users = [x for x in classes if not _is_library(x.__module__)]
        found = next((x for x in users if name in vars(x)), None)
        if found is None:
            return
        for cls in users[: users.index(found)]:
            self.item(vars(cls), name)
        value = self.item(vars(found), name)
        if isinstance(value, types.MemberDescriptorType):
            now = getattr(owner, name, _ABSENT)
            self.reached.getters.append((owner, name, now))
            self.visit(now)
            return
        if own is not None and not isinstance(owner, type):
            self.item(own, name)  # where one of the object itself would be
        self.visit(value)


_OF_CONTAINERS = (list.__getattribute__, tuple.__getattribute__, dict.__getattribute__)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_PLAIN = (dict, types.MappingProxyType)


def _names_of(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in code, and in the functions that it makes."""
    names = set(code.co_names)
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            names |= _names_of(x)
    return names


def _is_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def _has_slots(kind: type) -> bool:
    return all("__slots__" in vars(x) for x in kind.__mro__ if x is not object)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _ABSENT


def _parts(container: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The keys and the values of a dict, or no keys and the items of a sequence."""
    if isinstance(container, dict):
        return dict.keys(container), dict.values(container)  # type: ignore[return-value]
    return (), container


def _is_value(x: Any, y: Any) -> bool:
    return x is y or _are_equal(x, y)


def _are_equal(x: Any, y: Any) -> bool:
    """Whether two objects are equal numbers or strings; -0.0 is not 0.0, and nan is nan."""
    return type(x) is type(y) and isinstance(x, _NUMBERS) and repr(x) == repr(y)
