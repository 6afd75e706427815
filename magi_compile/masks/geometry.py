"""Rects: the one algebra of regions of a mask, which slices, plans, kernels and ranks cut and count with.

A rect is a rectangle of the score matrix between two diagonals. Row r of it sees the columns

    max(col_begin, r + diag_lo) <= c < min(col_end, r + diag_hi)

Rects are closed under intersection and transposition. A slice is a rect whose edges are straight: in all of its rows
the rectangle bounds an edge, or in all of them the diagonal does. `straight` cuts any rect into at most three of these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NO_DIAG = 1 << 30  # a diagonal that cuts nothing; its sum with any row still fits in int32

# Bits of a slice's type, see `MaskType`.
_MOVES_RIGHT_EDGE, _MOVES_LEFT_EDGE = 1, 2


class Rects(NamedTuple):
    """Rectangles with up to two corners cut off, as six int64 tensors `[num_rects]`.

    Row r in `[row_begin, row_end)` sees the columns
    `max(col_begin, r + diag_lo) <= c < min(col_end, r + diag_hi)`.
    A diagonal that cuts nothing is `-NO_DIAG` or `NO_DIAG`.
    """

    row_begin: Tensor
    row_end: Tensor
    col_begin: Tensor
    col_end: Tensor
    diag_lo: Tensor
    diag_hi: Tensor

    @classmethod
    def from_ranges(cls, q_ranges: Tensor, k_ranges: Tensor, mask_types: Tensor) -> Rects:
        """The rects of slices, rows being queries, not trimmed: of integers `q_ranges` and `k_ranges [num_slices, 2]`,
        half-open, and `mask_types [num_slices]`, values of `MaskType`."""
        (q_begin, q_end), (k_begin, k_end) = q_ranges.unbind(-1), k_ranges.unbind(-1)
        return cls.from_bounds(q_begin, q_end, k_begin, k_end, mask_types)

    @classmethod
    def from_bounds(
        cls, q_begin: Tensor, q_end: Tensor, k_begin: Tensor, k_end: Tensor, mask_types: Tensor
    ) -> Rects:
        """`from_ranges` of the begins and the ends of ranges, integers `[num_slices]`."""
        q_begin, q_end, k_begin, k_end, types = (
            x.long() for x in (q_begin, q_end, k_begin, k_end, mask_types)
        )
        moves_left_edge = (types & _MOVES_LEFT_EDGE) != 0
        moves_right_edge = (types & _MOVES_RIGHT_EDGE) != 0
        return cls(
            row_begin=q_begin,
            row_end=q_end,
            col_begin=k_begin,
            col_end=k_end,
            diag_lo=torch.where(moves_left_edge, k_begin - q_begin, -NO_DIAG),
            diag_hi=torch.where(moves_right_edge, k_end - q_end + 1, NO_DIAG),
        )

    @classmethod
    def rectangles(
        cls, row_begin: Tensor, row_end: Tensor, col_begin: Tensor, col_end: Tensor
    ) -> Rects:
        """Rects without diagonals, of int64 tensors `[num_rects]`."""
        none = torch.full_like(row_begin, NO_DIAG)
        return cls(row_begin, row_end, col_begin, col_end, -none, none)

    def to_ranges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Straight rects as slices: int32 `q_ranges [N, 2]`, `k_ranges [N, 2]`, `mask_types [N]`.

        A rect of one row has no diagonal and becomes FULL; one without rows becomes an empty slice at the origin.
        """
        moves_left_edge, moves_right_edge = self.diag_lo != -NO_DIAG, self.diag_hi != NO_DIAG
        types = moves_left_edge * _MOVES_LEFT_EDGE + moves_right_edge * _MOVES_RIGHT_EDGE
        return (
            torch.stack([self.row_begin, self.row_end], -1).to(torch.int32),
            torch.stack([self.col_begin, self.col_end], -1).to(torch.int32),
            types.to(torch.int32),
        )

    def cpu(self) -> Rects:
        """The same rects on the CPU. Waits for the device."""
        return self if self.row_begin.device.type == "cpu" else Rects(*[x.cpu() for x in self])

    # What rects hold

    def has_area(self) -> Tensor:
        """True for each trimmed rect that shows anything, bool `[num_rects]`."""
        return self.row_begin < self.row_end

    def live(self) -> Rects:
        """Those of trimmed rects that show anything. Waits for the device."""
        has_area = self.has_area()
        return self if bool(has_area.all()) else self.select(has_area)

    def select(self, index: Tensor | slice) -> Rects:
        """The rects at `index`, int64 or bool of any shape, or a slice."""
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            index = index.nonzero().flatten()
        if isinstance(index, Tensor) and index.dim() == 1:  # takes half the time
            return Rects(*[field.index_select(0, index) for field in self])
        return Rects(*(field[index] for field in self))

    def beside(self, others: Rects) -> Rects:
        """These rects, and the others behind them."""
        return Rects(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    def equals(self, other: Rects) -> Tensor:
        """True for each rect with all fields equal to those of the other, bool `[num_rects]`."""
        return torch.stack([x == y for x, y in zip(self, other, strict=True)]).all(0)

    def at(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """The columns `[lo, hi)` that `row` of each rect sees."""
        lo = torch.maximum(self.col_begin, row + self.diag_lo)
        return lo, torch.minimum(self.col_end, row + self.diag_hi)

    def by_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """All rows of trimmed rects, one rect after another: int64 `[num_rows]` of rows, and of the columns `[lo, hi)`
        that each sees. Waits for the device."""
        num_rows = self.row_end - self.row_begin
        owner = torch.repeat_interleave(num_rows)
        first = self.row_begin - (num_rows.cumsum(0) - num_rows)
        row = torch.arange(len(owner), device=owner.device) + first.index_select(0, owner)
        return row, *self.select(owner).at(row)

    def common_begin(self) -> Tensor:
        """The columns `[common_begin(), common_end())` are seen by all rows of a rect, if there are some."""
        return self.at(self.row_end - 1)[0]

    def common_end(self) -> Tensor:
        """See `common_begin`."""
        return self.at(self.row_begin)[1]

    def area(self) -> Tensor:
        """The number of (row, column) pairs that each rect shows, int64 `[num_rects]`; each of its rows must see a
        column."""
        # Both corners are triangles, without their tops where rows end before them.
        left, right = self.diag_lo - self.col_begin - 1, self.col_end - self.diag_hi
        bases = torch.stack([self.row_end + left, right - self.row_begin])
        tops = torch.stack([self.row_begin + left, right - self.row_end])
        corners = (_sum_to(bases) - _sum_to(tops)).sum(0)
        return (self.row_end - self.row_begin) * (self.col_end - self.col_begin) - corners

    # What is made of them

    def transposed(self) -> Rects:
        """The same area with rows and columns exchanged: c < r + d is r >= c - d + 1."""
        return Rects(
            row_begin=self.col_begin,
            row_end=self.col_end,
            col_begin=self.row_begin,
            col_end=self.row_end,
            diag_lo=torch.where(self.diag_hi == NO_DIAG, -NO_DIAG, 1 - self.diag_hi),
            diag_hi=torch.where(self.diag_lo == -NO_DIAG, NO_DIAG, 1 - self.diag_lo),
        )

    def trimmed(self) -> Rects:
        """The same area, in its one tight form.

        Every row sees a column, every column is seen, and a diagonal that cuts nothing is gone.
        A rect without area gets empty ranges at 0.
        """
        row_begin = torch.maximum(self.row_begin, self.col_begin - self.diag_hi + 1)
        row_end = torch.minimum(self.row_end, self.col_end - self.diag_lo)
        col_begin = torch.maximum(self.col_begin, row_begin + self.diag_lo)
        col_end = torch.minimum(self.col_end, row_end - 1 + self.diag_hi)
        live = (
            (row_begin < row_end) & (self.col_begin < self.col_end) & (self.diag_lo < self.diag_hi)
        )
        cuts_left = live & (row_end - 1 + self.diag_lo > col_begin)
        cuts_right = live & (row_begin + self.diag_hi < col_end)
        ranges = torch.stack([row_begin, row_end, col_begin, col_end])
        row_begin, row_end, col_begin, col_end = torch.where(live, ranges, 0).unbind()
        return Rects(
            row_begin=row_begin,
            row_end=row_end,
            col_begin=col_begin,
            col_end=col_end,
            diag_lo=torch.where(cuts_left, self.diag_lo, -NO_DIAG),
            diag_hi=torch.where(cuts_right, self.diag_hi, NO_DIAG),
        )

    def intersected(self, other: Rects) -> Rects:
        """The intersection of each rect with the other one, trimmed."""
        return Rects(
            row_begin=torch.maximum(self.row_begin, other.row_begin),
            row_end=torch.minimum(self.row_end, other.row_end),
            col_begin=torch.maximum(self.col_begin, other.col_begin),
            col_end=torch.minimum(self.col_end, other.col_end),
            diag_lo=torch.maximum(self.diag_lo, other.diag_lo),
            diag_hi=torch.minimum(self.diag_hi, other.diag_hi),
        ).trimmed()

    def clipped(self, row_begin: Tensor | int, row_end: Tensor | int) -> Rects:
        """The part of each rect in the rows `[row_begin, row_end)`, trimmed."""
        return self._replace(
            row_begin=self.row_begin.clamp(min=row_begin),
            row_end=self.row_end.clamp(max=row_end),
        ).trimmed()

    def clipped_to_columns(self, col_begin: Tensor | int, col_end: Tensor | int) -> Rects:
        """The part of each rect in the columns `[col_begin, col_end)`, trimmed."""
        return self._replace(
            col_begin=self.col_begin.clamp(min=col_begin),
            col_end=self.col_end.clamp(max=col_end),
        ).trimmed()

    def moved(self, rows: Tensor, columns: Tensor) -> Rects:
        """Each rect so many `rows` and `columns` further, int64 `[num_rects]`; those without area as well."""
        steps = columns - rows
        return Rects(
            row_begin=self.row_begin + rows,
            row_end=self.row_end + rows,
            col_begin=self.col_begin + columns,
            col_end=self.col_end + columns,
            diag_lo=torch.where(self.diag_lo == -NO_DIAG, -NO_DIAG, self.diag_lo + steps),
            diag_hi=torch.where(self.diag_hi == NO_DIAG, NO_DIAG, self.diag_hi + steps),
        )

    def straight(self) -> Rects:
        """The same area of trimmed rects in three times as many straight ones, some without area.

        The first of all are the top ends of the rects, in their order, then come the middles, then the bottom ends.
        """
        # The left edge stands still above row `left` and moves from there on, the right edge moves above row `right`.
        left = torch.where(
            self.diag_lo == -NO_DIAG, self.row_begin, self.col_begin - self.diag_lo
        ).clamp(self.row_begin, self.row_end)
        right = torch.where(
            self.diag_hi == NO_DIAG, self.row_end, self.col_end - self.diag_hi + 1
        ).clamp(self.row_begin, self.row_end)
        cuts = [self.row_begin, torch.minimum(left, right), torch.maximum(left, right)]
        thrice = Rects(*(torch.cat([field] * 3) for field in self))
        return thrice.clipped(torch.cat(cuts), torch.cat([*cuts[1:], self.row_end]))

    def cut_at(self, rows: Tensor) -> tuple[Rects, Tensor]:
        """Each rect cut at all of the sorted `rows`, int64, that lie inside it; its other bounds stay those of the
        whole.

        Returns the pieces, those of one rect after another, and int64 `[num_pieces]`: which rect each is of.
        """
        first = torch.searchsorted(rows, self.row_begin, right=True)
        num_pieces = 1 + torch.searchsorted(rows, self.row_end) - first
        owner = torch.repeat_interleave(num_pieces)
        skipped = first - (num_pieces.cumsum(0) - num_pieces)
        cut = torch.arange(len(owner), device="cpu") + skipped.index_select(0, owner)
        far = rows.new_full((1,), 1 << 62)
        fences = torch.cat([-far, rows, far])  # a piece lies between two of them
        whole = self.select(owner)
        begin = torch.maximum(whole.row_begin, fences.index_select(0, cut))
        end = torch.minimum(whole.row_end, fences.index_select(0, cut + 1))
        return whole._replace(row_begin=begin, row_end=end), owner


def _sum_to(count: Tensor) -> Tensor:
    """1 + 2 + ... + count; 0 where there are none."""
    count = count.clamp(min=0)
    return count * (count + 1) // 2
