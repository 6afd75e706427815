"""Rects: slices in the form that kernels mask with, closed under transposition and clipping."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.slices import AttnSlices, MaskType

MOST_STEPS = 32  # of stairs that a row meets as many rects of
NO_DIAG = 1 << 30  # a diagonal that cuts nothing; its sum with any row still fits in int32


class Rects(NamedTuple):
    """Rectangles with up to two corners cut off, as six int64 tensors `[num_rects]`.

    Row r in `[row_begin, row_end)` sees the columns
    `max(col_begin, r + diag_lo) <= c < min(col_end, r + diag_hi)`.
    """

    row_begin: Tensor
    row_end: Tensor
    col_begin: Tensor
    col_end: Tensor
    diag_lo: Tensor
    diag_hi: Tensor

    @classmethod
    def from_slices(cls, slices: AttnSlices) -> Rects:
        """The rects of `slices`, rows being queries; at least one, to gather from."""
        q_begin, q_end = _columns(slices.q_ranges)
        k_begin, k_end = _columns(slices.k_ranges)
        mask_types = slices.mask_types.long()
        if mask_types.numel() == 0:
            q_begin = q_end = k_begin = k_end = mask_types = mask_types.new_zeros(1)
        moves_right_edge = (mask_types & MaskType.CAUSAL) != 0
        moves_left_edge = (mask_types & MaskType.INV_CAUSAL) != 0
        return cls(
            row_begin=q_begin,
            row_end=q_end,
            col_begin=k_begin,
            col_end=k_end,
            diag_lo=torch.where(moves_left_edge, k_begin - q_begin, -NO_DIAG),
            diag_hi=torch.where(moves_right_edge, k_end - q_end + 1, NO_DIAG),
        )

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
        cuts_left = row_end - 1 + self.diag_lo > col_begin
        cuts_right = row_begin + self.diag_hi < col_end
        return Rects(
            row_begin=torch.where(live, row_begin, 0),
            row_end=torch.where(live, row_end, 0),
            col_begin=torch.where(live, col_begin, 0),
            col_end=torch.where(live, col_end, 0),
            diag_lo=torch.where(live & cuts_left, self.diag_lo, -NO_DIAG),
            diag_hi=torch.where(live & cuts_right, self.diag_hi, NO_DIAG),
        )

    def by_column(self) -> Rects:
        """Trimmed rects that do not overlap, by column and row, those without area behind the others.

        What goes on from one rect to another below it is then a chain of neighbours.
        """
        is_empty = self.row_begin == self.row_end
        key = self.col_begin * (1 << 31) + self.row_begin
        return self.select(torch.where(is_empty, 1 << 62, key).argsort(stable=True))

    def joined(self) -> Rects:
        """The same area, where trimmed rects in a row, each of which goes on below the one before, are one rect.

        A sliding window is two or three slices, since a diagonal of a slice begins and ends in its corners. The joined rect is
        where its first part was, the others are empty.
        """
        num_rects = self.row_begin.numel()
        goes_on = torch.zeros(num_rects, dtype=torch.bool, device=self.row_begin.device)
        above, below = self.select(slice(0, -1)), self.select(slice(1, None))
        union = above.down_to(below)
        goes_on[:-1] = (
            (above.row_end == below.row_begin)
            & union.clipped(above.row_begin, above.row_end).equals(above)
            & union.clipped(below.row_begin, below.row_end).equals(below)
            & (above.row_begin < above.row_end)
        )
        is_first = torch.ones_like(goes_on)
        is_first[1:] = ~goes_on[:-1]
        fields = zip(
            self.down_to(self.select(_last_of_chain(goes_on))),
            (0, 0, 0, 0, -NO_DIAG, NO_DIAG),
            strict=True,
        )
        return Rects(*(torch.where(is_first, field, of_nothing) for field, of_nothing in fields))

    def down_the_steps(self, most_steps: int | None = None) -> Rects:
        """The same area, where trimmed rects in a row that lead down in steps are as many others, each of new columns alone and down
        to the last row: tiles of rows across a step then see what both have in common as one.

        Steps are rects without diagonals; each begins below the one before, sees its columns, and more to the right. A column then
        meets one rect of them, and a row as many as there are steps above it, or `most_steps`; before it was the other way round.
        """
        index = torch.arange(self.row_begin.numel(), device=self.row_begin.device)
        is_full = (self.diag_lo == -NO_DIAG) & (self.diag_hi == NO_DIAG)
        goes_on = torch.zeros_like(is_full)
        above, below = self.select(slice(0, -1)), self.select(slice(1, None))
        goes_on[:-1] = (
            (is_full[:-1] & is_full[1:])
            & (above.row_begin < above.row_end)
            & (above.row_end == below.row_begin)
            & (above.col_begin == below.col_begin)
            & (above.col_end < below.col_end)
        )
        if most_steps is not None:
            goes_on &= index % most_steps != most_steps - 1
        col_begin = self.col_begin.clone()
        col_begin[1:] = torch.where(goes_on[:-1], above.col_end, below.col_begin)
        return self._replace(row_end=self.row_end[_last_of_chain(goes_on)], col_begin=col_begin)

    def common_begin(self) -> Tensor:
        """The columns `[common_begin(), common_end())` are seen by all rows of trimmed rects, if there are some."""
        return torch.maximum(self.col_begin, self.row_end - 1 + self.diag_lo)

    def common_end(self) -> Tensor:
        """See `common_begin`."""
        return torch.minimum(self.col_end, self.row_begin + self.diag_hi)

    def down_to(self, last: Rects) -> Rects:
        """Each of these and all rects below it down to that of `last`, where these go on as the last one does."""
        return Rects(
            row_begin=self.row_begin,
            row_end=last.row_end,
            col_begin=self.col_begin,
            col_end=last.col_end,
            diag_lo=last.diag_lo,
            diag_hi=self.diag_hi,
        )

    def equals(self, other: Rects) -> Tensor:
        """Whether all fields of each are those of the other, bool `[num_rects]`."""
        return torch.stack([x == y for x, y in zip(self, other, strict=True)]).all(0)

    def clipped(self, row_begin: Tensor, row_end: Tensor) -> Rects:
        """The part of each rect that lies in the rows `[row_begin, row_end)`, trimmed."""
        return self._replace(
            row_begin=torch.maximum(self.row_begin, row_begin),
            row_end=torch.minimum(self.row_end, row_end),
        ).trimmed()

    def beside(self, others: Rects) -> Rects:
        """These rects, and the others behind them."""
        return Rects(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    def select(self, index: Tensor | slice) -> Rects:
        """The rects at `index`."""
        return Rects(*(field[index] for field in self))


def least_from_here(values: Tensor) -> Tensor:
    """For each place the least of the values from there on."""
    return values.flip(0).cummin(0).values.flip(0)


def _last_of_chain(goes_on: Tensor) -> Tensor:
    """For each index the next one that does not go on."""
    count = goes_on.numel()
    index = torch.arange(count, device=goes_on.device)
    return least_from_here(torch.where(goes_on, count, index))


def _columns(ranges: Tensor) -> tuple[Tensor, Tensor]:
    begin, end = ranges.long().unbind(-1)
    return begin, end
