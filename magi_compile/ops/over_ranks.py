"""Replacements of the public functions while attention runs over all ranks, for places that its function mode does not
reach: layers that run again in a backward, and inner graphs of Dynamo, as of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Replacements(NamedTuple):
    """The replacements of the functions of these names, with the same arguments."""

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


def carried_by(block_mask: Any) -> Callable[..., Any] | None:
    """The `flex_attention` of a BlockMask whose mask_mod carries a plan; None for other masks, and for none."""
    return getattr(getattr(block_mask, "mask_mod", None), "flex_attention", None)
