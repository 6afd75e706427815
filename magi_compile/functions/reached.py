"""All that a function of Python can reach: what its tensors are called, and whether any of it has been bound anew.

A function reaches its closure, the globals that its code names, its defaults, and of objects the attributes that its
code names; from there on items of tuples, lists and dicts, and other functions. Tensors themselves are watched by their
versions, see `_kept.py`.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

_MAX_CHECKS = 1000
_MISSING = object()
_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    frozenset,
    Enum,
    type(None),
    type(...),
)
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton"}
# By these a function reads what its code does not name.
UNNAMED = frozenset(
    ("getattr", "vars", "globals", "locals", "eval", "exec", "__dict__", "environ", "getenv")
)
# By these it finds out that something is not there yet.
_ABSENCE = frozenset(("hasattr", "AttributeError"))
# Special methods that code of the function does not call.
_NOT_CALLED = frozenset(
    (
        *("__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__"),
        *("__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
        *("__copy__", "__deepcopy__", "__setattr__", "__delattr__", "__del__"),
    )
)
_FOLLOWED = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)


class Reached:
    """The objects that `function` reaches now.

    Args:
        function: any object, called `name`.
        name: of the function.
        attributes: those of objects that its caller reads.

    Attributes:
        names: what the function calls the tensors that it reaches, by `id`.
    """

    def __init__(self, function: Any, name: str, attributes: Iterable[str] = ()):
        self._read = set(attributes)
        known = -1
        # Code that is reached late may name attributes of what was reached before.
        while known != len(self._read):
            known = len(self._read)
            self.names: dict[int, str] = {}
            self._checks: list[Callable[[], bool]] = []
            self._named: dict[Any, _Named] = {}
            self._is_open = False
            self._seen: dict[int, Any] = {}
            self._visit(name, function)
        self._seen.clear()
        self._checks += [x.are_same for x in self._named.values()]

    def is_unchanged(self) -> bool:
        """True if all of it is the same objects as then; False where that cannot be known."""
        if self._is_open or len(self._checks) > _MAX_CHECKS:
            return False
        try:
            for check in self._checks:  # not all(): a generator costs as much as the checks
                if not check():
                    return False
        except (AttributeError, KeyError, IndexError, TypeError):  # it is gone
            return False
        return True

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.names.setdefault(id(value), name)
            return
        if isinstance(value, (*_VALUES, *_OF_TORCH)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._checks) > _MAX_CHECKS:
            return
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._visit("self", value.__self__)
            self._visit(name, value.__func__)
        elif isinstance(value, (staticmethod, classmethod)):
            self._visit(name, value.__func__)
        elif isinstance(value, (property, functools.cached_property)):
            self._visit(name, value.fget if isinstance(value, property) else value.func)
        elif isinstance(value, functools.partial):
            self._visit(name, value.func)
            self._visit(f"{name}.args", value.args)
            self._check_dict(value.keywords)
            self._visit_all(value.keywords)
        elif isinstance(value, (tuple, list)):
            if isinstance(value, list):
                self._check_list(value)
            for i, item in enumerate(list(value)):
                self._visit(f"{name}[{i}]", item)
        elif isinstance(value, dict):
            self._check_dict(value)
            self._visit_all(value)
        elif isinstance(value, types.BuiltinFunctionType):
            if not isinstance(value.__self__, (types.ModuleType, type)):
                self._visit(name, value.__self__)
        elif not isinstance(value, type) and "__wrapped__" in getattr(value, "__dict__", {}):
            self._visit(name, value.__wrapped__)
        else:
            self._visit_object(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        code, alive = function.__code__, weakref.ref(function)
        names = names_in(code)
        self._read |= names
        defaults, kwdefaults = function.__defaults__, function.__kwdefaults__
        cells = function.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        then = [_reference(x) for x in contents]

        def is_same() -> bool:
            f = alive()
            if f is None or f.__code__ is not code or f.__defaults__ is not defaults:
                return False
            if f.__kwdefaults__ is not kwdefaults:
                return False
            cells = zip(f.__closure__ or (), then, strict=True)
            return all(_content(cell) is reference() for cell, reference in cells)

        self._checks.append(is_same)
        if kwdefaults:
            self._check_dict(kwdefaults)
        for name in sorted(self._read & set(vars(function))):
            own = functools.partial(_held, alive, "")
            self._check_named((function, ""), own, name, vars(function)[name])
            self._visit(name, vars(function)[name])
        for key, value in zip(code.co_freevars, contents, strict=True):
            self._visit(key, value)
        if not _is_of_a_library(function.__module__):
            self._is_open |= not UNNAMED.isdisjoint(names)
            now = functools.partial(_globals, alive)
            for key in dict.fromkeys((*code.co_names, *sorted(names))):
                value = function.__globals__.get(key, _MISSING)
                if value is not _MISSING:
                    self._visit(key, value)
                elif key in sys.modules:  # imported inside
                    self._visit(key, sys.modules[key])
                if value is not _MISSING or key in code.co_names:  # which may hide a builtin later
                    self._check_named((function, "globals"), now, key, value)
        self._visit_all(_named_defaults(function))

    def _visit_all(self, items: dict[Any, Any]) -> None:
        for key, item in list(items.items()):
            self._visit(str(key), item)

    def _visit_object(self, value: Any) -> None:
        """An instance, a class or a module: of its attributes those that code names."""
        kind = type(value)
        is_class, is_package = isinstance(value, type), isinstance(value, types.ModuleType)
        home = value.__name__ if is_package else (value if is_class else kind).__module__
        if _is_of_a_library(home) and not _has_attributes_of_users(value):
            # The rest of PyTorch and of the standard library is fixed, or changes unseen: a set, an array.
            is_fixed = is_class or is_package or callable(value) or home.startswith("torch")
            is_fixed &= not isinstance(value, operator.attrgetter)
            self._is_open |= not (
                is_fixed or (home == "numpy" and not hasattr(value, "__setitem__"))
            )
            return
        classes = value.__mro__ if is_class else kind.__mro__
        has_slots = any("__slots__" in vars(cls) for cls in classes)
        of_users = [cls for cls in kind.__mro__ if not _is_of_a_library(cls.__module__)]
        has_own_look_up = any("__getattribute__" in vars(cls) for cls in of_users) or (
            any("__getattr__" in vars(cls) for cls in kind.__mro__)
            and not isinstance(value, torch.nn.Module)
        )
        if not (has_slots or hasattr(value, "__dict__")) or has_own_look_up:
            self._is_open = True
        if is_class:
            classes = (*classes, *of_users)  # of its metaclass
        elif not is_package:
            self._visit_special_methods(of_users)
        for name in sorted(self._read):
            self._visit_attribute(value, name, () if is_package else classes)
        if callable(value) and not is_class:
            self._visit("__call__", kind.__call__)

    def _visit_special_methods(self, classes: list[type]) -> None:
        """Those that operators call: no code names them."""
        for cls in classes:
            for name, method in list(vars(cls).items()):
                is_special = name.startswith("__") and name.endswith("__")
                is_called = is_special and name not in _NOT_CALLED
                if is_called and isinstance(method, types.FunctionType):
                    self._visit(name, method)

    def _visit_attribute(self, owner: Any, name: str, classes: tuple[type, ...]) -> None:
        alive = _reference(owner)
        own = getattr(owner, "__dict__", {})
        places = [
            x for x in ("_parameters", "_buffers", "_modules") if isinstance(owner, torch.nn.Module)
        ]
        for place in ("", *places):
            held = own[place] if place else own
            if name in held:
                held_now = functools.partial(_held, alive, place)
                self._check_named((owner, place), held_now, name, held[name])
                self._visit(name, held[name])
                return
        has_own = not isinstance(owner, type) and hasattr(owner, "__dict__")
        homes = [cls for cls in classes if cls is not object and name in vars(cls)]
        if has_own and (homes or not _ABSENCE.isdisjoint(self._read)):
            self._checks.append(lambda: name not in vars(alive()))
        if not homes:
            return
        for cls in classes[: classes.index(homes[0])]:  # which may hide it later
            if not _is_of_a_library(cls.__module__):
                self._check_named((cls, ""), functools.partial(vars, cls), name, _MISSING)
        for cls in homes:  # `super()` takes that of a later one
            found = vars(cls)[name]
            if isinstance(found, types.MemberDescriptorType):  # a slot
                value = getattr(owner, name, _MISSING)
                self._check(lambda: getattr(alive(), name, _MISSING), value)
                self._visit(name, value)
                return
            self._is_open |= hasattr(type(found), "__get__") and not isinstance(found, _FOLLOWED)
            self._check_named((cls, ""), functools.partial(vars, cls), name, found)
            self._visit(name, found)

    def _check(self, now: Callable[[], Any], then: Any) -> None:
        """The same object as then; numbers are compared by identity too, at worst in vain."""
        reference = _reference(then)
        self._checks.append(lambda: now() is reference())

    def _check_named(
        self, owner: tuple[Any, str], now: Callable[[], Any], name: str, then: Any
    ) -> None:
        """The same of an item of a dict, which `now` gives; those of one dict are looked at together."""
        key = (id(owner[0]), owner[1])
        if key not in self._named:
            self._named[key] = _Named(now)
        self._named[key].items[name] = _reference(then)

    def _check_list(self, items: list[Any]) -> None:
        then = [_reference(x) for x in items]
        self._checks.append(
            lambda: (
                len(items) == len(then)
                and all([x is y() for x, y in zip(items, then, strict=True)])
            )
        )

    def _check_dict(self, items: dict[Any, Any]) -> None:
        keys, then = list(items), [_reference(x) for x in items.values()]
        self._checks.append(
            lambda: (
                list(items) == keys
                and all([x is y() for x, y in zip(items.values(), then, strict=True)])
            )
        )


class _Named:
    """Items of a dict, by name."""

    def __init__(self, now: Callable[[], Any]):
        self.now = now
        self.items: dict[str, Callable[[], Any]] = {}

    def are_same(self) -> bool:
        now = self.now()
        found = [now.get(name, _MISSING) is reference() for name, reference in self.items.items()]
        return all(found)


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference where there is one: what is kept must not keep its owner alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _globals(alive: Callable[[], Any]) -> dict[str, Any]:
    return alive().__globals__  # type: ignore[no-any-return]


def _held(alive: Callable[[], Any], place: str) -> Any:
    return vars(alive())[place] if place else vars(alive())


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return _MISSING


def _named_defaults(function: types.FunctionType) -> dict[str, Any]:
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    named = zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    return {**dict(named), **(function.__kwdefaults__ or {})}


@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes, and strings, which may be names for `getattr`."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return frozenset(names)


def _is_of_a_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _has_attributes_of_users(value: Any) -> bool:
    kinds = (torch.nn.Module, types.SimpleNamespace)
    return isinstance(value, kinds) or type(value).__name__ == "BlockMask"
