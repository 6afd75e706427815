"""What the public functions become while attention runs over all ranks, where its function mode is not: in layers that run again in
a backward, and in what Dynamo makes a graph of its own, as checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Replacements(NamedTuple):
    """Of the functions of these names, with their arguments."""

    flex_attention: Callable[..., Any]
    flex_flash_attention: Callable[..., Any]


_current: list[Replacements] = []


@contextmanager
def replaced(replacements: Replacements) -> Iterator[None]:
    """For all threads."""
    _current.append(replacements)
    try:
        yield
    finally:
        _current.pop()


def replacements() -> Replacements | None:
    """Those of the innermost block; None outside."""
    return _current[-1] if _current else None
