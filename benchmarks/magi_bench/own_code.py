"""Functions that Dynamo compiles apart from each other, though they are written once."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `function` for Dynamo, which keeps what it compiled, for all backends, with a function's code."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """torch.compile for static shapes, with code of its own for Dynamo to guard."""
    return torch.compile(with_own_code(function), dynamic=False, **options)
