"""The rects of a mask in the order in which tiles meet them, with fewer to walk: those that go on below one another are one."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile.masks.geometry import NO_DIAG, Rects

MOST_STEPS = 32  # of stairs that a row meets as many rects of


def by_column(rects: Rects) -> Rects:
    """Trimmed rects that do not overlap, by column and row, those without area behind the others.

    What goes on from one rect to another below it is then a chain of neighbours.
    """
    key = rects.col_begin * (1 << 31) + rects.row_begin
    return rects.select(torch.where(rects.has_area(), key, 1 << 62).argsort(stable=True))


def joined(rects: Rects) -> Rects:
    """The same area, where trimmed rects in a row, each of which goes on below the one before, are one rect.

    A sliding window is two or three slices, since a diagonal of a slice begins and ends in its corners. The joined rect is
    where its first part was, the others are empty.
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
    """The same area, where trimmed rects in a row that lead down in steps are as many others, each of new columns alone and down
    to the last row: tiles of rows across a step then see what both have in common as one.

    Steps are rects without diagonals; each begins below the one before, sees its columns, and more to the right. A column then
    meets one rect of them, and a row as many as there are steps above it, or `most_steps`; before it was the other way round.
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
    """Each of the first and all rects below it down to the last, where these go on as the last one does."""
    return first._replace(row_end=last.row_end, col_end=last.col_end, diag_lo=last.diag_lo)


def _last_of_chain(goes_on: Tensor) -> Tensor:
    """For each index the next one that does not go on."""
    count = goes_on.numel()
    index = torch.arange(count, device=goes_on.device)
    return least_from_here(torch.where(goes_on, count, index))
