"""Ops whose calls are prepared once, and then repeated by the launcher of `csrc/host` without Python.

magi::ffa_fwd             Python, until a kernel that prepares its calls runs and the launcher is there; then that
magi::ffa_fwd_in_python   what the launcher has not seen yet: Python computes it, and hands it over
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from magi_compile import _compat
from magi_compile.ops.define import define


class Repeatable(NamedTuple):
    """The launcher's description of an op."""

    # A letter for each argument: T tensor, O optional tensor, L list of tensors, M optional list of tensors, l list of
    # numbers, s str, n number, bool, dtype or device.
    arguments: str
    results: str  # L for a list of tensors, T for each tensor of a tuple
    dispatch_key: str  # whose calls it takes over


_LETTERS = {
    "Tensor": "T",
    "Optional[Tensor]": "O",
    "List[Tensor]": "L",
    "Optional[List[Tensor]]": "M",
    "List[int]": "l",
    "str": "s",
    **dict.fromkeys(("int", "float", "bool", "Device"), "n"),
}

REPEATABLE: dict[str, Repeatable] = {}


def define_repeatable(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    dispatch_key: str = "CUDA",
) -> None:
    """Adds the op `schema` to `library`, which must outlive it, and the one that the launcher asks.

    An op that may be called without any tensor has "BackendSelect" as its `dispatch_key`.
    """
    name, _, rest = schema.partition("(")
    define(library, schema, implementation, fake)
    define(library, f"{name}_in_python({rest}", partial(_adopting, implementation), fake)
    arguments, results = (
        "".join(_LETTERS[x] for x in types)
        for types in _compat.types_in_schema(f"{library.ns}::{schema}")
    )
    REPEATABLE[name] = Repeatable(arguments, results, dispatch_key)


def _adopting(implementation: Callable[..., Any], *arguments: Any) -> Any:
    launcher = _native().launcher()
    return launcher.adopting(implementation, arguments) if launcher else implementation(*arguments)


def hand_over_to_launcher() -> None:
    """Once a process, when a kernel that prepares its calls runs and the launcher has been built."""
    launcher = _native().launcher()
    if launcher is not None:
        with _handing_over:
            _register(launcher)


_handing_over = threading.Lock()


@cache
def _register(launcher: Any) -> None:
    for name, how in REPEATABLE.items():
        launcher.register(name, *how)


def _native() -> Any:
    return importlib.import_module("magi_compile.kernels.sm90.runtime.native")
