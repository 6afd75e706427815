"""Covers: masks that no list of exact slices over one sequence says, as planning sees them.

A cover is a list of rectangles, or slices where these are exact, that contain every visible pair. Tokens are placed,
and rows of keys travel, by a cover as by any mask: what a rank needs are the keys of the rectangles that its rows meet.
Beside each slice stands what it shows: a block of bits (`masks/bits.py`), and whose it is, where batch entries or heads
have masks of their own. Slices of different entries may overlap.

A plan cuts slices where chunks and buffers end (`local_cover.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.planning.ranges import group, pick
from magi_compile.masks.bits import BLOCK, FIRST_BITS, WORDS
from magi_compile.masks.geometry import Rects
from magi_compile.masks.slices import AttnSlices

HASHED_BLOCKS = 4096  # read at a time: 8 MiB


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
    """A cover as a list of slices on the CPU, over the rows and keys of one entry, none of them empty."""

    block: Tensor  # int64 `[num_slices]`, the number of the block of bits that a slice shows, -1 for all of the slice
    entry: Tensor  # int64 `[num_slices]`, the number of the entry whose slice it is
    entries: Entries  # which there are
    blocks: Tensor  # int32 `[num_blocks, BLOCK, WORDS]`, the blocks of bits, on any device

    @staticmethod
    def of(slices: AttnSlices, entries: Entries = ONE_ENTRY) -> AttnSlices:
        """The cover of slices over the packed rows and keys of all entries, each with keys of its own, on any device;
        the same slices on the CPU where these say all."""
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

    def packed(self, stride_q: int, stride_k: int) -> AttnSlices:
        """All batch entries in one sequence, the rows of entry `b` from `b * stride_q` on and its keys from
        `b * stride_k` on: a cover whose entries are heads, or slices where these say all."""
        heads = self.entries.heads
        batch = self.entry.div(heads, rounding_mode="floor")
        first_row, first_key = ((batch * x).int()[:, None] for x in (stride_q, stride_k))
        lists = (self.q_ranges + first_row, self.k_ranges + first_key, self.mask_types)
        totals = (self.entries.batch * stride_q, self.entries.batch * stride_k)
        if heads == 1 and not len(self.blocks):
            return AttnSlices.unchecked(*lists, *totals)
        cover, entry = Cover.unchecked(*lists, *totals), self.entry.remainder(heads)
        vars(cover).update(
            block=self.block, entry=entry, entries=Entries(1, heads), blocks=self.blocks
        )
        return cover

    @cached_property
    def content(self) -> bytes:
        """A hash of what is shown beside the slices: the entries, and the blocks of bits. Made once, by a pass over all
        of them that waits for their device."""
        hasher = hashlib.blake2b(array("q", [*self.entries, len(self.blocks)]), digest_size=16)
        for part in (self.block, self.entry, *self.blocks.split(HASHED_BLOCKS)):
            hasher.update(bytes_of(part))
        return hasher.digest()


def bytes_of(x: Tensor) -> bytes:
    """The entries of a tensor in order, from wherever it is."""
    x = x.contiguous().cpu()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _rects(slices: AttnSlices) -> tuple[Rects, Tensor]:
    """Trimmed rects of slices on the CPU, and the number of the block of each, -1 for none. Beside blocks of bits they
    are of whole blocks, neighbours along the keys in one."""
    q_ranges, k_ranges, mask_types = (x.cpu() for x in slices.lists)
    totals = slices.seqlen_q, slices.seqlen_k
    host = AttnSlices.unchecked(q_ranges, k_ranges, mask_types, *totals).compact()
    q_ranges, k_ranges, mask_types = host.lists
    if slices.bits is None:
        rects = Rects.from_ranges(q_ranges, k_ranges, mask_types).trimmed()
        return rects, torch.full_like(rects.row_begin, -1)
    has_bits = mask_types >= FIRST_BITS
    is_new = (q_ranges[1:] != q_ranges[:-1]).any(1) | (k_ranges[1:, 0] != k_ranges[:-1, 1])
    first, last = group(is_new | has_bits[1:] | has_bits[:-1], len(mask_types))
    columns = (q_ranges[first, 0], q_ranges[first, 1], k_ranges[first, 0], k_ranges[last, 1])
    block = torch.where(has_bits, mask_types.long() - FIRST_BITS, -1)
    return Rects.rectangles(*(x.long() for x in columns)), pick(block, first)
