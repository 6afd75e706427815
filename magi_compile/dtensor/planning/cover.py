"""Covers: masks that no list of exact slices over one sequence says, as planning sees them.

A cover is a list of rectangles, or slices where these are exact, that contain every visible pair. Tokens are placed,
and rows of keys travel, by a cover as by any mask: what a rank needs are the keys of the rectangles that its rows meet.
Beside each slice stands what it shows: a block of bits (`masks/bits.py`), and whose it is, where batch entries or heads
have masks of their own. Slices of different entries may overlap.

A plan cuts slices where chunks and buffers end. A block of bits that was cut becomes one of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.planning.comm_plan import Stage
from magi_compile.dtensor.planning.ranges import pick
from magi_compile.masks.bits import BLOCK, FIRST_BITS, WORDS, pack, unpack
from magi_compile.masks.geometry import Rects
from magi_compile.masks.normal_form import normal_form
from magi_compile.masks.slices import AttnSlices

MAX_BLOCKS = 256  # cut at a time: 4M pairs


class Entries(NamedTuple):
    """The batch entries and heads that have masks of their own; 1 where all have the same."""

    batch: int = 1
    heads: int = 1

    @property
    def number(self) -> int:
        """Entry `b * heads + h` is head h of batch entry b."""
        return self.batch * self.heads


ONE_ENTRY = Entries()


class Cover(AttnSlices):
    """A cover as a list of slices on the CPU, over the rows and keys of one entry, none of them empty.

    Attributes:
        block: int64 `[num_slices]`, the number of the block of bits that a slice shows, -1 for all of the slice.
        entry: int64 `[num_slices]`, the number of the entry whose slice it is.
        entries: which entries there are.
        blocks: int32 `[num_blocks, BLOCK, WORDS]`, the blocks of bits, on any device.
    """

    block: Tensor
    entry: Tensor
    entries: Entries
    blocks: Tensor

    @staticmethod
    def of(slices: AttnSlices, entries: Entries = ONE_ENTRY) -> AttnSlices:
        """A mask for planning.

        Args:
            slices: over the packed rows and keys of all entries, each with keys of its own; on any device.
            entries: which there are.

        Returns:
            The cover; the same slices on the CPU where these are all.
        """
        if slices.bits is None and entries.number == 1:
            return slices.to("cpu")
        number = entries.number
        seqlen_q, seqlen_k = slices.seqlen_q // number, slices.seqlen_k // number
        rects, block = _rects(slices)
        # Nothing holds a slice back from going on in the next entry.
        rects, owner = rects.cut_at(torch.arange(1, number, device="cpu") * seqlen_q)
        straight = rects.trimmed().straight()
        live = straight.has_area().nonzero().flatten()
        block = pick(block, pick(owner, live.remainder(max(len(owner), 1))))
        straight = straight.select(live)
        entry = straight.row_begin.div(max(seqlen_q, 1), rounding_mode="floor")
        q_ranges, k_ranges, types = straight.to_ranges()
        first_row, first_key = ((entry * x).int()[:, None] for x in (seqlen_q, seqlen_k))
        lists = (q_ranges - first_row, k_ranges - first_key, types)
        cover = Cover.unchecked(*lists, seqlen_q, seqlen_k)
        blocks = slices.bits
        if blocks is None:
            blocks = torch.zeros(0, BLOCK, WORDS, dtype=torch.int32, device="cpu")
        vars(cover).update(block=block, entry=entry, entries=entries, blocks=blocks)
        return cover

    def content(self) -> list[int]:
        """Numbers that other blocks and other entries do not share. Waits for the device of the blocks."""
        bits = self.blocks.contiguous().cpu()
        digest = hashlib.blake2b(ctypes.string_at(bits.data_ptr(), bits.nbytes), digest_size=7)
        hashed = int.from_bytes(digest.digest(), "little")
        return [*self.entries, hashed, len(bits), *self.block.tolist(), *self.entry.tolist()]


def _rects(slices: AttnSlices) -> tuple[Rects, Tensor]:
    """Trimmed rects of slices on the CPU, and the number of the block of each, -1 for none."""
    host = AttnSlices.unchecked(
        *(x.cpu() for x in (slices.q_ranges, slices.k_ranges, slices.mask_types)),
        *(slices.seqlen_q, slices.seqlen_k),
    ).compact()
    has_bits = host.mask_types >= FIRST_BITS
    ranges = (host.q_ranges, host.k_ranges, host.mask_types)
    rest = normal_form(Rects.from_ranges(*(x[~has_bits] for x in ranges)).trimmed())
    q_ranges, k_ranges, mask_types = (x[has_bits] for x in ranges)
    of_bits = Rects.from_ranges(q_ranges, k_ranges, torch.zeros_like(mask_types))
    none = torch.full_like(rest.row_begin, -1)
    return rest.beside(of_bits), torch.cat([none, mask_types.long() - FIRST_BITS])


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
