"""Pieces of a cover: what the slices show that a plan has cut, for one rank.

A block of bits that was cut becomes one of its own, whose bits begin where the piece does. Equal pieces, as those of a
forward and of a backward, share a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.planning.comm_plan import Stage
from magi_compile.dtensor.planning.cover import Cover
from magi_compile.dtensor.planning.ranges import pick
from magi_compile.masks.bits import BLOCK, FIRST_BITS, pack, unpack
from magi_compile.masks.slices import AttnSlices

MAX_BLOCKS = 256  # cut at a time: 4M pairs


class LocalBlocks(NamedTuple):
    """Stages whose slices show what a cover says, and the blocks of bits of all of them."""

    stages: list[list[Stage]]
    bits: Tensor


def with_blocks(cover: Cover, plans: Sequence[Sequence[Stage]]) -> LocalBlocks:
    """The stages of one rank for several degrees, whose slices are pieces of those of `cover`: with the types of
    bit blocks, and with their entries."""
    stages = [stage for plan in plans for stage in plan]
    pieces = [stage.pieces for stage in stages if stage.pieces is not None]
    assert len(pieces) == len(stages)
    whole, row, key = (torch.cat(x) for x in zip(*pieces, strict=True))
    q_ranges = torch.cat([stage.slices.q_ranges for stage in stages]).long()
    k_ranges = torch.cat([stage.slices.k_ranges for stage in stages]).long()
    sizes = torch.stack([q_ranges.diff(dim=1), k_ranges.diff(dim=1)], 1).flatten(1)
    # Where in a block a piece begins.
    begins = torch.stack([row - cover.q_ranges[whole, 0], key - cover.k_ranges[whole, 0]], 1)
    ends = torch.stack([cover.q_ranges[whole].diff(dim=1), cover.k_ranges[whole].diff(dim=1)], 1)
    is_whole = ((begins == 0) & (sizes == ends.flatten(1))).all(1, keepdim=True)
    # A block as a whole is one of any size.
    places = torch.cat([begins, torch.where(is_whole, BLOCK, sizes)], 1)
    block = pick(cover.block, whole)
    has_bits = block >= 0
    table = torch.cat([block[:, None], places], 1)[has_bits]
    found, number = table.unique(dim=0, return_inverse=True)
    types = torch.cat([stage.slices.mask_types for stage in stages])
    types[has_bits] = (number + FIRST_BITS).int()
    bits = _cut(cover.blocks, found)
    counts = [len(stage.slices) for stage in stages]
    entries = pick(cover.entry, whole).int().split(counts)
    made = iter(
        stage._replace(slices=_with_types(stage.slices, of_stage), entry=entry, pieces=None)
        for stage, of_stage, entry in zip(stages, types.split(counts), entries, strict=True)
    )
    return LocalBlocks([[next(made) for _ in plan] for plan in plans], bits)


def _with_types(slices: AttnSlices, mask_types: Tensor) -> AttnSlices:
    lists = (slices.q_ranges, slices.k_ranges, mask_types)
    return AttnSlices.unchecked(*lists, slices.seqlen_q, slices.seqlen_k)


def _cut(blocks: Tensor, table: Tensor) -> Tensor:
    """Blocks of bits, one for each row of `table`, int64 `[num, 5]`: of the block `table[i, 0]` what begins in row
    `table[i, 1]` and column `table[i, 2]`, with `table[i, 3]` rows and `table[i, 4]` columns; on the device of
    `blocks`."""
    table = table.to(blocks.device)
    made = blocks.index_select(0, table[:, 0])
    is_cut = (table[:, 1:] != table.new_tensor([0, 0, BLOCK, BLOCK])).any(1).nonzero().flatten()
    step = torch.arange(BLOCK, device=blocks.device)
    for some in is_cut.split(MAX_BLOCKS):
        _, row, column, rows, columns = table[some].unbind(1)
        which = torch.arange(len(some), device=blocks.device)[:, None, None]
        at_row = (row[:, None] + step).clamp(max=BLOCK - 1)[:, :, None]
        at_column = (column[:, None] + step).clamp(max=BLOCK - 1)[:, None, :]
        shown = unpack(made[some])[which, at_row, at_column]
        shown &= (step < rows[:, None])[:, :, None] & (step < columns[:, None])[:, None, :]
        made[some] = pack(shown)
    return made
