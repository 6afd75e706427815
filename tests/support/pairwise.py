"""Test cases that are fewer than a product of their parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any], others_are_slow: bool = False) -> list[Any]:
    """Some of `itertools.product(*axes)`, in its order: every value of an axis meets every value of every other axis.

    What goes wrong where two values meet is found; what three values need together may be missed. The same in every
    run.

    Args:
        axes: the values of each parameter, two axes or more.
        others_are_slow: whether the other tuples of the product follow, as a `pytest.param` each that is `slow`.

    Returns:
        About as many tuples as the two longest axes have pairs; and the others.
    """
    values = [list(axis) for axis in axes]
    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    left = {pair for row in rows for pair in _pairs(row)}
    chosen = set()
    while left:
        best = max(rows, key=lambda row: len(left & _pairs(row)))
        left -= _pairs(best)
        chosen.add(best)
    others = [row for row in rows if row not in chosen] if others_are_slow else []
    found, slow = (
        [tuple(axis[i] for axis, i in zip(values, row, strict=True)) for row in part]
        for part in (sorted(chosen), others)
    )
    return [*found, *(pytest.param(*row, marks=pytest.mark.slow) for row in slow)]


def sparsely(rows: Sequence[tuple[Any, ...]], step: int, ids: Sequence[str]) -> list[Any]:
    """Test cases of which every `step`-th runs by default and the others are `slow`.

    Args:
        rows: the values of each case.
        step: how many cases there are for one that is not slow.
        ids: the name of each case.

    Returns:
        A `pytest.param` for each row.
    """
    return [
        pytest.param(*row, id=name, marks=pytest.mark.slow if i % step else ())
        for i, (row, name) in enumerate(zip(rows, ids, strict=True))
    ]


def _pairs(row: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), 2))
