"""Bands: the algebra below AttnSlices. Clipping, the overlap sweep and the normal form.

A band is a group of rows `[begin, end)`; its row r sees the columns

    lo + dlo * (r - begin) <= c < hi + dhi * (r - begin)        with dlo, dhi in {0, 1}

that is, both edges either stand still or move by one column per row. The four slice types are the four
choices of (dlo, dhi), and clipping a band by rows or columns gives bands again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bands(NamedTuple):
    """Bands as six int64 tensors `[num_bands]`."""

    begin: Tensor
    end: Tensor
    lo: Tensor
    hi: Tensor
    dlo: Tensor
    dhi: Tensor

    def take(self, index: Tensor) -> Bands:
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        return Bands(*(field.index_select(0, index) for field in self))

    def at(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """The columns `[lo, hi)` that `row` sees."""
        step = row - self.begin
        return self.lo + self.dlo * step, self.hi + self.dhi * step


def from_ranges(q_ranges: Tensor, k_ranges: Tensor, mask_types: Tensor) -> Bands:
    (begin, end), (lo, hi) = q_ranges.long().unbind(-1), k_ranges.long().unbind(-1)
    dlo, dhi = mask_types.long() >> 1, mask_types.long() & 1
    # An empty column range hides the whole slice, whatever its type.
    end = torch.where(lo < hi, end, begin)
    return Bands(begin, end, lo, hi - dhi * (end - 1 - begin), dlo, dhi)


def to_ranges(bands: Bands) -> tuple[Tensor, Tensor, Tensor]:
    """int32 `q_ranges [N, 2]`, `k_ranges [N, 2]`, `mask_types [N]`. Bands without rows become empty slices
    at the origin; a band of one row has no direction and becomes FULL."""
    rows = bands.end - bands.begin
    live = rows > 0
    moves = rows > 1
    hi = bands.hi + torch.where(moves, bands.dhi * (rows - 1), 0)
    fields = [bands.begin, bands.end, bands.lo, hi, bands.dhi + 2 * bands.dlo]
    fields[4] = torch.where(moves, fields[4], 0)
    begin, end, lo, hi, types = (torch.where(live, x, 0).to(torch.int32) for x in fields)
    return torch.stack([begin, end], -1), torch.stack([lo, hi], -1), types


def trim(bands: Bands) -> Bands:
    """Cuts off rows that see nothing: every row of the result sees a column; hopeless bands have no rows."""
    width, slope = bands.hi - bands.lo, bands.dhi - bands.dlo
    rows = bands.end - bands.begin
    skip = torch.where(slope > 0, (1 - width).clamp(min=0), 0)
    keep = torch.where(slope < 0, torch.minimum(rows, width), rows)
    keep = torch.where((slope == 0) & (width <= 0), 0, keep)
    begin = bands.begin + skip
    end = torch.maximum(bands.begin + keep, begin)
    return bands._replace(
        begin=begin, end=end, lo=bands.lo + bands.dlo * skip, hi=bands.hi + bands.dhi * skip
    )


def drop_empty(bands: Bands) -> Bands:
    return bands.take(bands.end > bands.begin)


def clip_rows(bands: Bands, begin: Tensor | int, end: Tensor | int) -> Bands:
    """Keeps the rows in `[begin, end)`. One band stays one band."""
    new_begin = bands.begin.clamp(min=begin)
    new_end = torch.maximum(bands.end.clamp(max=end), new_begin)
    lo, hi = bands.at(new_begin)
    return trim(bands._replace(begin=new_begin, end=new_end, lo=lo, hi=hi))


def clip_cols(bands: Bands, begin: Tensor | int, end: Tensor | int) -> Bands:
    """Keeps the columns in `[begin, end)`. One band becomes three, some of them without rows: an edge stands
    still on the rows where the clip is what binds it, and moves on the others."""
    # The left edge moves from row `left` on, the right edge moves before row `right`.
    left = torch.where(bands.dlo > 0, bands.begin + (begin - bands.lo), bands.begin)
    right = torch.where(bands.dhi > 0, bands.begin + (end - bands.hi) + 1, bands.end)
    first, second = torch.minimum(left, right), torch.maximum(left, right)
    cuts = torch.stack([bands.begin, first, second, bands.end])
    cuts = torch.minimum(torch.maximum(cuts, bands.begin), bands.end)
    part_begin = cuts[:-1]  # [3, num_bands]
    lo, hi = bands.at(part_begin)
    moves_left = (bands.dlo > 0) & (part_begin >= left)
    moves_right = (bands.dhi > 0) & (part_begin < right)
    fields = (
        part_begin,
        cuts[1:],
        torch.where(moves_left, lo, lo.clamp(min=begin)),
        torch.where(moves_right, hi, hi.clamp(max=end)),
        moves_left.long(),
        moves_right.long(),
    )
    return trim(Bands(*(x.flatten() for x in fields)))


def cut_at(bands: Bands, rows: Tensor) -> tuple[Bands, Tensor]:
    """Cuts every band at all of the sorted `rows` that lie inside it; also says which band a piece is of."""
    first = torch.searchsorted(rows, bands.begin, right=True)
    pieces = 1 + torch.searchsorted(rows, bands.end) - first
    owner = torch.repeat_interleave(pieces)
    skipped = first - (pieces.cumsum(0) - pieces)
    cut = torch.arange(len(owner)) + skipped.index_select(0, owner)
    far = rows.new_full((1,), 1 << 62)
    fences = torch.cat([-far, rows, far])  # a piece lies between two of them
    whole = bands.take(owner)
    begin = torch.maximum(whole.begin, fences.index_select(0, cut))
    end = torch.minimum(whole.end, fences.index_select(0, cut + 1))
    lo, hi = whole.at(begin)
    return whole._replace(begin=begin, end=end, lo=lo, hi=hi), owner


class Strips(NamedTuple):
    """Bands cut so that any two of them share all of their rows or none, sorted by (row, column), and what
    lies between each band and the next one of the same rows."""

    bands: Bands
    is_followed: Tensor  # bool [num_bands - 1]: the next band has the same rows
    first_gap: Tensor  # columns up to the next band, in the first and in the last row
    last_gap: Tensor
    owner: Tensor  # which of the given bands each one is a piece of


def strips(bands: Bands, extra_cuts: Tensor | None = None) -> Strips:
    """The sweep over rows that finds overlaps and neighbours, in O(n log n) for n bands after the cuts.

    All bands must have rows, and each of their rows a column (`trim`). Two bands overlap exactly if some gap
    is negative: edges are straight, so a gap is smallest in the first or the last row.
    """
    edges = [bands.begin, bands.end] + ([] if extra_cuts is None else [extra_cuts])
    pieces, owner = cut_at(bands, torch.unique(torch.cat(edges)))
    order = torch.argsort(pieces.lo, stable=True)
    order = order[torch.argsort(pieces.begin[order], stable=True)]
    pieces, owner = pieces.take(order), owner[order]
    last_lo, last_hi = pieces.at(pieces.end - 1)
    return Strips(
        pieces,
        pieces.begin[1:] == pieces.begin[:-1],
        pieces.lo[1:] - pieces.hi[:-1],
        last_lo[1:] - last_hi[:-1],
        owner,
    )


def find_overlap(bands: Bands) -> tuple[int, int] | None:
    """The numbers of two bands that overlap, or None where all areas are disjoint."""
    trimmed = trim(bands)
    live = (trimmed.end > trimmed.begin).nonzero().flatten()
    swept = strips(trimmed.take(live))
    bad = swept.is_followed & (torch.minimum(swept.first_gap, swept.last_gap) < 0)
    if not bool(bad.any()):
        return None
    index = int(bad.nonzero()[0])
    first, second = sorted(live[swept.owner[index : index + 2]].tolist())
    return first, second


def normal_form(bands: Bands) -> Bands:
    """The same area as one canonical list of bands, sorted by (row, column).

    Canonical, because it depends on nothing but what each row sees: its maximal column intervals. An interval
    continues in the next row where both of its edges stand still or move by one; maximal intervals are never
    adjacent, so at most one interval continues another. The chains found this way are cut, from the top
    down, as late as possible, which gives the fewest bands per chain.
    """
    bands = drop_empty(trim(bands))
    if not len(bands.begin):
        return bands
    swept = strips(bands)
    # Where the gap between two bands closes in one row only, that row becomes a strip of its own.
    closes_first = swept.is_followed & (swept.first_gap == 0) & (swept.last_gap > 0)
    closes_last = swept.is_followed & (swept.first_gap > 0) & (swept.last_gap == 0)
    pieces = swept.bands
    cuts = torch.cat([pieces.begin[:-1][closes_first] + 1, pieces.end[:-1][closes_last] - 1])
    swept = strips(bands, cuts)
    return _stack_rows(_join_columns(swept))


def _join_columns(swept: Strips) -> Bands:
    """Joins the bands of one strip that touch each other."""
    touches = swept.is_followed & (swept.first_gap == 0) & (swept.last_gap == 0)
    no = torch.zeros(1, dtype=torch.bool)
    is_first, is_last = ~torch.cat([no, touches]), ~torch.cat([touches, no])
    left, right = swept.bands.take(is_first), swept.bands.take(is_last)
    return left._replace(hi=right.hi, dhi=right.dhi)


def _stack_rows(pieces: Bands) -> Bands:
    """Joins pieces that continue each other over rows. `pieces` are sorted by (row, column)."""
    done: list[list[int]] = []
    # Bands that may go on, by (next row, left edge in their last row): [begin, end, lo, hi, dlo, dhi], the
    # edges in the first row; dlo is -1 while the band has one row.
    open_bands: dict[tuple[int, int], list[int]] = {}
    for begin, end, lo, hi, dlo, dhi in zip(*(field.tolist() for field in pieces), strict=True):
        rows = end - begin
        for step_lo in (0, 1):
            band = open_bands.pop((begin, lo - step_lo), None)
            if band is not None:
                break
        if band is not None:
            steps = band[1] - 1 - band[0]
            step_hi = hi - (band[3] + max(band[5], 0) * steps)
            direction = (step_lo, step_hi)
            if step_hi in (0, 1) and (band[4] < 0 or direction == (band[4], band[5])):
                band[1], band[4], band[5] = begin + 1, step_lo, step_hi
                if rows == 1 or direction == (dlo, dhi):
                    band[1] = end
                    open_bands[end, lo + (dlo * (rows - 1) if rows > 1 else 0)] = band
                    continue
                # The first row joins the band above, the others start a band of their own.
                begin, lo, hi, rows = begin + 1, lo + dlo, hi + dhi, rows - 1
        if rows == 1:
            dlo = dhi = -1
        band = [begin, end, lo, hi, dlo, dhi]
        done.append(band)
        open_bands[end, lo + max(dlo, 0) * (rows - 1)] = band
    done.sort(key=lambda band: (band[0], band[2]))
    fields = torch.tensor(done, dtype=torch.int64).reshape(-1, 6)
    fields[:, 4:].clamp_(min=0)
    return Bands(*fields.unbind(1))
