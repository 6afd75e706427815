"""Lists of rects as tiles are made of them: sorted, rects that continue each other joined,
staircases cut by columns."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile.masks.geometry import NO_DIAG, Rects

MOST_STEPS = 32  # of stairs that a row meets as many rects of


def by_column(rects: Rects) -> Rects:
    """Trimmed rects that do not overlap, sorted by column and row; those without area come last.

    A rect that continues another one in the rows below it then follows that one directly.
    """
    key = rects.col_begin * (1 << 31) + rects.row_begin
    return rects.select(torch.where(rects.has_area(), key, 1 << 62).argsort(stable=True))


def joined(rects: Rects) -> Rects:
    """Joins neighbours of a list of trimmed rects where the second continues the first in the rows below.
    The area stays the same.

    A sliding window is two or three slices, because a diagonal of a slice begins and ends in its corners. The joined
    rect takes the place of its first piece; the others become empty.
    """
    goes_on = torch.zeros_like(rects.row_begin, dtype=torch.bool)
    above, below = rects.select(slice(0, -1)), rects.select(slice(1, None))
    union = _down_to(above, below)
    goes_on[:-1] = (
        (above.row_end == below.row_begin)
        & union.clipped(above.row_begin, above.row_end).equals(above)
        & union.clipped(below.row_begin, below.row_end).equals(below)
        & above.has_area()
    )
    is_first = torch.ones_like(goes_on)
    is_first[1:] = ~goes_on[:-1]
    fields = zip(
        _down_to(rects, rects.select(_last_of_chain(goes_on))),
        (0, 0, 0, 0, -NO_DIAG, NO_DIAG),
        strict=True,
    )
    return Rects(*(torch.where(is_first, field, of_nothing) for field, of_nothing in fields))


def down_the_steps(rects: Rects, most_steps: int | None = None) -> Rects:
    """Cuts staircases in a list of trimmed rects, sorted by `by_column`, by columns instead of rows. The area and the
    number of rects stay the same.

    The steps of a staircase are rects without diagonals. Each begins where the one before it ends, sees the columns of
    that one, and more to the right. Afterwards each rect has the columns that its step adds, and reaches down to the
    last row of the staircase. A column then meets one rect, and a row as many as there are steps above it, at most
    `most_steps` where it is given; before, it was the other way round. A tile across a step walks the columns that
    both steps share once.
    """
    index = torch.arange(rects.row_begin.numel(), device=rects.row_begin.device)
    is_full = (rects.diag_lo == -NO_DIAG) & (rects.diag_hi == NO_DIAG)
    goes_on = torch.zeros_like(is_full)
    above, below = rects.select(slice(0, -1)), rects.select(slice(1, None))
    goes_on[:-1] = (
        (is_full[:-1] & is_full[1:])
        & above.has_area()
        & (above.row_end == below.row_begin)
        & (above.col_begin == below.col_begin)
        & (above.col_end < below.col_end)
    )
    if most_steps is not None:
        goes_on &= index % most_steps != most_steps - 1
    col_begin = rects.col_begin.clone()
    col_begin[1:] = torch.where(goes_on[:-1], above.col_end, below.col_begin)
    return rects._replace(row_end=rects.row_end[_last_of_chain(goes_on)], col_begin=col_begin)


def least_from_here(values: Tensor) -> Tensor:
    """For each place the least of the values from there on."""
    return values.flip(0).cummin(0).values.flip(0)


def _down_to(first: Rects, last: Rects) -> Rects:
    """The union of each first rect, the last one, and those between, where each continues the one above."""
    return first._replace(row_end=last.row_end, col_end=last.col_end, diag_lo=last.diag_lo)


def _last_of_chain(goes_on: Tensor) -> Tensor:
    """For each index the next one that does not go on."""
    count = goes_on.numel()
    index = torch.arange(count, device=goes_on.device)
    return least_from_here(torch.where(goes_on, count, index))
