"""The part of a cover that one rank computes: slices of each stage, and what they show.

Where chunks are of whole blocks of bits, as those that a plan chooses, every block stays as it is, and a rank takes
those that it needs. Elsewhere, for other chunks and for tokens that somebody else has permuted, its rows and keys are
cut into blocks of their own, put together bit by bit from the positions of the rows and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.on_device import to_device
from magi_compile.dtensor.planning.chunks import Placement
from magi_compile.dtensor.planning.comm_plan import CommPlan, Stage
from magi_compile.dtensor.planning.cover import Cover
from magi_compile.dtensor.planning.dispatch import Dispatch
from magi_compile.dtensor.planning.ranges import expand, pick
from magi_compile.masks.bits import BLOCK, FIRST_BITS, pack
from magi_compile.masks.slices import AttnSlices

MAX_BLOCKS = 64  # put together at a time: 1M pairs

_HIDDEN, _SHOWN = -2, -1  # in place of the number of a block of bits


class LocalCover(NamedTuple):
    """The stages of one rank for each degree, and the blocks of bits of all of them, if there are some."""

    stages: list[list[Stage]]
    bits: Tensor | None


def cover_of_rank(cover: Cover, given: Cover, communication: CommPlan, rank: int) -> LocalCover:
    """The stages of a rank, whose slices show what `cover` says: `given`, or where batch entries have masks of their
    own, these one behind the other."""
    where = communication.rows.dispatch
    if not len(cover.blocks):
        stages = communication.stages(rank)
        return LocalCover([[_of_entries(cover, x) for x in plan] for plan in stages], None)
    if where.chunk_size % BLOCK == 0 and where.keys.chunk_size % BLOCK == 0:
        return _taken(cover, communication.stages(rank))
    stages = communication.stages(rank, has_slices=False)
    return _put_together(given, stages, where, rank)


def positions_of_keys(where: Placement, rank: int, recvs: Tensor | None) -> Tensor:
    """The positions in the sequence of a stage's keys, int64: those that a rank holds, or those that it receives by the
    table `recvs` of a `Transfer`."""
    if recvs is None:
        return where.positions(rank)
    peer, row, peer_row, count = recvs.long().unbind(1)
    index, step = expand(count)
    held = pick(peer * where.seqlen_local + peer_row, index) + step
    found = torch.zeros(len(index), dtype=torch.int64, device="cpu")
    found[pick(row, index) + step] = pick(where.positions(), held)
    return found


def _of_entries(cover: Cover, stage: Stage) -> Stage:
    assert stage.whole is not None
    return stage._replace(entry=pick(cover.entry, stage.whole).int(), whole=None)


def _taken(cover: Cover, plans: list[list[Stage]]) -> LocalCover:
    """Slices that no cut goes through, and the blocks of bits that they show."""
    wholes = [stage.whole for plan in plans for stage in plan if stage.whole is not None]
    block = pick(cover.block, torch.cat(wholes))
    needed = block[block >= 0].unique()
    number = torch.zeros(len(cover.blocks), dtype=torch.int64, device="cpu")
    number[needed] = torch.arange(len(needed), device="cpu")

    def of_blocks(stage: Stage) -> Stage:
        assert stage.whole is not None
        block, slices = pick(cover.block, stage.whole), stage.slices
        types = torch.where(
            block >= 0, (FIRST_BITS + number[block.clamp(min=0)]).int(), slices.mask_types
        )
        lists = (slices.q_ranges, slices.k_ranges, types)
        made = AttnSlices.unchecked(*lists, slices.seqlen_q, slices.seqlen_k)
        return _of_entries(cover, stage._replace(slices=made))

    bits = cover.blocks.index_select(0, needed.to(cover.blocks.device))
    return LocalCover([[of_blocks(stage) for stage in plan] for plan in plans], bits)


def _put_together(cover: Cover, plans: list[list[Stage]], where: Dispatch, rank: int) -> LocalCover:
    """Blocks of a rank's rows and of the keys of each stage, apart for the batch entries that `where` has."""
    on_device = _Blocks(cover)
    batch, heads = where.batch, cover.entries.number // where.batch
    stride_q, stride_k = (x.total_padded // batch for x in (where, where.keys))
    at_rows = where.positions(rank).view(batch, -1)
    bits: list[Tensor] = []
    made: list[list[Stage]] = []
    for plan in plans:
        made.append([])
        for stage in plan:
            recvs = None if stage.transfer is None else stage.transfer.recvs
            at_keys = positions_of_keys(where.keys, rank, recvs)
            whose = at_keys.div(stride_k, rounding_mode="floor")
            first, lists = 0, []
            for b, rows in enumerate(at_rows):
                keys = at_keys[whose == b]
                places = (
                    rows - b * stride_q,
                    keys - b * stride_k,
                    range(b * heads, (b + 1) * heads),
                )
                q_ranges, k_ranges, *rest = on_device.slices(*places, bits)
                lists.append((q_ranges + b * len(rows), k_ranges + first, *rest))
                first += len(keys)
            *ranges, entry = map(torch.cat, zip(*lists, strict=True))
            slices = AttnSlices.unchecked(*ranges, at_rows.numel(), len(at_keys))  # type: ignore[call-arg, arg-type]
            made[-1].append(stage._replace(slices=slices, entry=entry, whole=None))
    none = cover.blocks[:0]
    return LocalCover(made, torch.cat([none, *bits]))


class _Blocks:
    """The blocks of a cover, by their places."""

    def __init__(self, cover: Cover):
        self.blocks, self.device = cover.blocks, cover.blocks.device
        self.seqlen_q, self.seqlen_k = cover.seqlen_q, cover.seqlen_k
        # With one more of rows and of keys, for padding.
        shape = (
            cover.entries.number,
            *(-(-x // BLOCK) + 1 for x in (self.seqlen_q, self.seqlen_k)),
        )
        code = torch.full(shape, _HIDDEN, dtype=torch.int64, device="cpu")
        has_bits = cover.block >= 0
        entry, block = cover.entry[has_bits], cover.block[has_bits]
        rows, keys = (
            x[has_bits, 0].long().div(BLOCK, rounding_mode="floor")
            for x in (cover.q_ranges, cover.k_ranges)
        )
        code[entry, rows, keys] = block
        # What is visible as a whole are rectangles of whole blocks, but for the ends of the sequences.
        ranges = torch.cat([cover.q_ranges, cover.k_ranges], 1)[~has_bits]
        for entry_of, (top, bottom, left, right) in zip(
            cover.entry[~has_bits].tolist(), ranges.tolist(), strict=True
        ):
            last_row, last_key = -(-bottom // BLOCK), -(-right // BLOCK)
            code[entry_of, top // BLOCK : last_row, left // BLOCK : last_key] = _SHOWN
        self.code = to_device(code, self.device)

    def slices(
        self, at_rows: Tensor, at_keys: Tensor, entries: range, bits: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """The slices of these entries, of rows and keys at these positions: the lists of `AttnSlices`, and the number
        of the entry of each, from 0 on. Their blocks of bits are appended to `bits`."""
        num_q, num_k = (-(-len(x) // BLOCK) for x in (at_rows, at_keys))
        pad_rows, pad_keys = (
            self._padded(x, n, total)
            for x, n, total in ((at_rows, num_q, self.seqlen_q), (at_keys, num_k, self.seqlen_k))
        )
        first = sum(map(len, bits))
        parts: list[Tensor] = []
        for number, shown in self._shown(pad_rows, pad_keys, entries):
            count = shown.sum((1, 2))
            entry, rest = number // (num_q * num_k), number % (num_q * num_k)
            row, key = rest // num_k * BLOCK, rest % num_k * BLOCK
            rows, keys = (
                (len(at_rows) - row).clamp(max=BLOCK),
                (len(at_keys) - key).clamp(max=BLOCK),
            )
            has_bits = (count > 0) & (count < rows * keys)
            types = torch.where(has_bits, FIRST_BITS + first + has_bits.cumsum(0) - 1, 0)
            table = torch.stack([row, row + rows, key, key + keys, types, entry], 1)
            parts.append(table[count > 0].cpu())
            bits.append(pack(shown[has_bits]))
            first += len(bits[-1])
        table = torch.cat([torch.zeros(0, 6, dtype=torch.int64, device="cpu"), *parts]).int()
        return tuple(x.contiguous() for x in (table[:, :2], table[:, 2:4], *table[:, 4:].unbind(1)))

    def _padded(self, positions: Tensor, num_blocks: int, total: int) -> Tensor:
        """`[num_blocks, BLOCK]`; what is no row or key is the first of a block that shows nothing."""
        nothing = -(-total // BLOCK) * BLOCK
        padded = torch.full((num_blocks * BLOCK,), nothing, dtype=torch.int64, device="cpu")
        padded[: len(positions)] = torch.where(positions < total, positions, nothing)
        return to_device(padded.view(num_blocks, BLOCK), self.device)

    def _shown(self, rows: Tensor, keys: Tensor, entries: range) -> Iterator[tuple[Tensor, Tensor]]:
        """The numbers of some blocks, in the order of entry, rows and keys, and their pairs, bool
        `[n, BLOCK, BLOCK]`."""
        num = len(entries) * len(rows) * len(keys)
        for number in torch.arange(num, device=self.device).split(MAX_BLOCKS):
            entry, rest = number // (len(rows) * len(keys)), number % (len(rows) * len(keys))
            row, key = rows[rest // len(keys)][:, :, None], keys[rest % len(keys)][:, None, :]
            code = self.code[entries.start + entry[:, None, None], row // BLOCK, key // BLOCK]
            column = key % BLOCK
            words = self.blocks[code.clamp(min=0), row % BLOCK, column // 32]
            shown = torch.where(code >= 0, (words >> (column % 32)) & 1, (code == _SHOWN).int())
            yield number, shown.bool()
