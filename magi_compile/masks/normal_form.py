"""Overlaps and the normal form of straight rects, by one sweep over strips of common rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.geometry import NO_DIAG, Rects


class Strips(NamedTuple):
    """Rects cut so that any two of them share all of their rows or none, sorted by (row, column), and what
    lies between each rect and the next one of the same rows.

    Attributes:
        rects: the pieces.
        is_followed: bool `[num_rects - 1]`: the next rect has the same rows.
        first_gap: columns up to the next rect in the first row.
        last_gap: columns up to the next rect in the last row.
        owner: of which of the given rects each is a piece.
    """

    rects: Rects
    is_followed: Tensor
    first_gap: Tensor
    last_gap: Tensor
    owner: Tensor


def strips(rects: Rects, extra_cuts: Tensor | None = None) -> Strips:
    """The sweep over rows that finds overlaps and neighbours, in O(n log n) for n rects after the cuts.

    Two rects overlap exactly if some gap is negative: edges are straight, so a gap is smallest in the first or the
    last row. The rects are trimmed and straight, all with area. `extra_cuts` are rows, int64, to cut at besides their
    borders.
    """
    borders = [rects.row_begin, rects.row_end] + ([] if extra_cuts is None else [extra_cuts])
    pieces, owner = rects.cut_at(torch.unique(torch.cat(borders)))
    lo, hi = pieces.at(pieces.row_begin)
    order = torch.argsort(lo, stable=True)
    order = order[torch.argsort(pieces.row_begin[order], stable=True)]
    pieces, owner, lo, hi = pieces.select(order), owner[order], lo[order], hi[order]
    last_lo, last_hi = pieces.at(pieces.row_end - 1)
    return Strips(
        pieces,
        pieces.row_begin[1:] == pieces.row_begin[:-1],
        lo[1:] - hi[:-1],
        last_lo[1:] - last_hi[:-1],
        owner,
    )


def find_overlap(rects: Rects) -> tuple[int, int] | None:
    """The numbers of two trimmed, straight rects that overlap, or None where all areas are disjoint."""
    live = rects.has_area().nonzero().flatten()
    swept = strips(rects.select(live))
    bad = swept.is_followed & (torch.minimum(swept.first_gap, swept.last_gap) < 0)
    if not bool(bad.any()):
        return None
    index = int(bad.nonzero()[0])
    first, second = sorted(live[swept.owner[index : index + 2]].tolist())
    return first, second


def normal_form(rects: Rects) -> Rects:
    """The same area as one canonical list of trimmed, straight rects, all with area, sorted by (row, column).

    Canonical, because it depends on nothing but what each row sees: its maximal column intervals. An interval
    continues in the next row where both of its edges stand still or move by one; maximal intervals are never adjacent,
    so at most one interval continues another. The chains found this way are cut, from the top down, as late as
    possible, which gives the fewest rects per chain. The given rects, trimmed and straight, some maybe without area,
    do not overlap.
    """
    is_in_order = (rects.row_end[:-1] <= rects.row_begin[1:]).all() & rects.has_area().all()
    if len(rects.row_begin) and bool(is_in_order):  # as most that are made row by row
        return _stack_rows(rects)
    rects = rects.live()
    if not len(rects.row_begin):
        return rects
    rects = rects.select(rects.row_begin.argsort(stable=True))
    if bool((rects.row_end[:-1] <= rects.row_begin[1:]).all()):  # no two of them share a row
        return _stack_rows(rects)
    swept = strips(rects)
    # Where the gap between two rects closes in one row only, that row becomes a strip of its own.
    closes_first = swept.is_followed & (swept.first_gap == 0) & (swept.last_gap > 0)
    closes_last = swept.is_followed & (swept.first_gap > 0) & (swept.last_gap == 0)
    pieces = swept.rects
    cuts = torch.cat(
        [pieces.row_begin[:-1][closes_first] + 1, pieces.row_end[:-1][closes_last] - 1]
    )
    return _stack_rows(_join_columns(strips(rects, cuts)))


def _join_columns(swept: Strips) -> Rects:
    """Joins the rects of one strip that touch each other."""
    touches = swept.is_followed & (swept.first_gap == 0) & (swept.last_gap == 0)
    no = torch.zeros(1, dtype=torch.bool, device="cpu")
    is_first, is_last = ~torch.cat([no, touches]), ~torch.cat([touches, no])
    left, right = swept.rects.select(is_first), swept.rects.select(is_last)
    return left._replace(col_end=right.col_end, diag_hi=right.diag_hi).trimmed()


def _stack_rows(pieces: Rects) -> Rects:
    """Joins pieces that continue each other over rows. `pieces` are straight, trimmed, and sorted by (row, column)."""
    # Rows as [begin, end, lo, hi, dlo, dhi]: the edges in the first row, and whether they move by one in each.
    table = (
        pieces.row_begin,
        pieces.row_end,
        pieces.col_begin,
        pieces.common_end(),
        (pieces.diag_lo != -NO_DIAG).long(),
        (pieces.diag_hi != NO_DIAG).long(),
    )
    done: list[list[int]] = []
    # Rects that may go on, by (next row, left edge in their last row); dlo is -1 while a rect has one row.
    open_rects: dict[tuple[int, int], list[int]] = {}
    for begin, end, lo, hi, dlo, dhi in zip(*(field.tolist() for field in table), strict=True):
        rows = end - begin
        for step_lo in (0, 1):
            rect = open_rects.pop((begin, lo - step_lo), None)
            if rect is not None:
                break
        if rect is not None:
            steps = rect[1] - 1 - rect[0]
            step_hi = hi - (rect[3] + max(rect[5], 0) * steps)
            direction = (step_lo, step_hi)
            if step_hi in (0, 1) and (rect[4] < 0 or direction == (rect[4], rect[5])):
                rect[1], rect[4], rect[5] = begin + 1, step_lo, step_hi
                if rows == 1 or direction == (dlo, dhi):
                    rect[1] = end
                    open_rects[end, lo + (dlo * (rows - 1) if rows > 1 else 0)] = rect
                    continue
                # The first row joins the rect above, the others start a rect of their own.
                begin, lo, hi, rows = begin + 1, lo + dlo, hi + dhi, rows - 1
        if rows == 1:
            dlo = dhi = -1
        rect = [begin, end, lo, hi, dlo, dhi]
        done.append(rect)
        open_rects[end, lo + max(dlo, 0) * (rows - 1)] = rect
    done.sort(key=lambda rect: (rect[0], rect[2]))
    fields = torch.tensor(done, dtype=torch.int64, device="cpu").reshape(-1, 6).t().contiguous()
    row_begin, row_end, lo, hi, dlo, dhi = fields.unbind()
    return Rects(
        row_begin,
        row_end,
        lo,
        torch.where(dhi > 0, hi + row_end - 1 - row_begin, hi),
        torch.where(dlo > 0, lo - row_begin, -NO_DIAG),
        torch.where(dhi > 0, hi - row_begin, NO_DIAG),
    )
