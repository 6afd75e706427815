"""Runs of bit blocks: of such a block a tile walks what lies in its rows, and a row sees what its bits say.

A run with `bits` begins at the first column of its block; `bits - 1` is the row of the block (of 128 times its number,
and on) that is the first row of the run. In the walk by key tile rows and columns of a block are exchanged, its bits
are not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.bits import BLOCK, FIRST_BITS
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan.rects import Rects


class BitRects(NamedTuple):
    """The rectangles of slices with bits, empty ones for other slices, and the numbers of their blocks."""

    rects: Rects
    number: Tensor

    def transposed(self) -> BitRects:
        return BitRects(self.rects.transposed(), self.number)

    def bits_of(self, which: Tensor, runs: Rects) -> Tensor:
        """`bits` of runs, each a part of the rect `which`."""
        return 1 + self.number[which] * BLOCK + runs.row_begin - self.rects.row_begin[which]


def split_bits(slices: AttnSlices) -> tuple[AttnSlices, BitRects | None]:
    """Slices without those that have bits, in their places, and these."""
    if slices.bits is None or not len(slices):
        return slices, None
    has_bits = slices.mask_types >= FIRST_BITS
    totals = slices.seqlen_q, slices.seqlen_k

    def only(is_kept: Tensor, mask_types: Tensor) -> AttnSlices:
        rows, keys = (
            torch.where(is_kept[:, None], x, 0) for x in (slices.q_ranges, slices.k_ranges)
        )
        return AttnSlices.unchecked(rows, keys, mask_types, *totals)

    others = only(~has_bits, torch.where(has_bits, 0, slices.mask_types))
    of_bits = only(has_bits, torch.zeros_like(slices.mask_types))
    number = torch.where(has_bits, slices.mask_types.long() - FIRST_BITS, 0)
    return others, BitRects(of_bits.untrimmed_rects().trimmed(), number)


def room_for_bits(num_slices: int, tile_rows: int) -> int:
    """Room for the runs of bit blocks: a block meets as many tiles as its rows fill, and one more, on average."""
    return num_slices * (1 + -(-BLOCK // tile_rows))
