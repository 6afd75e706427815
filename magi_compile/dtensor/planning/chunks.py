"""The cost and the keys of the chunks of a sequence, and the loads of ranks under a placement."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.cover import Cover
from magi_compile.dtensor.planning.ranges import (
    Ranges,
    pick,
    split_at_multiples,
    total_by_owner,
    unite,
)
from magi_compile.masks.arguments import check_count
from magi_compile.masks.geometry import Rects
from magi_compile.masks.slices import AttnSlices

Assignment = list[list[int]]  # the chunks of each rank


def tensor_of(assignment: Assignment) -> Tensor:
    """int64 `[cp_size, chunks_per_rank]`, where `torch.tensor` takes ten times as long over nested lists."""
    flat = array("q", chain.from_iterable(assignment))
    return torch.frombuffer(flat, dtype=torch.int64).view(len(assignment), -1)


@dataclass(frozen=True, eq=False)
class Placement:
    """The placement of a sequence: rank r holds the chunks `chunks[r]`, int64 `[cp_size, chunks_per_rank]` on the CPU,
    in ascending order but where somebody else has permuted them."""

    total: int  # rows; what follows up to `total_padded` sees and is seen by nothing
    chunk_size: int  # rows that stay together
    chunks: Tensor

    @property
    def cp_size(self) -> int:
        return self.chunks.shape[0]

    @property
    def seqlen_local(self) -> int:
        """Rows of one rank, padding included."""
        return self.chunk_size * self.chunks.shape[1]

    @property
    def total_padded(self) -> int:
        return self.chunk_size * self.chunks.numel()

    def rank_of_chunk(self) -> Tensor:
        """int64 `[num_chunks]`."""
        return self._of_chunk(torch.arange(self.cp_size, device="cpu")[:, None])

    def shift_of_chunk(self) -> Tensor:
        """Local row minus row of the sequence, int64 `[num_chunks]`."""
        slot = self._of_chunk(torch.arange(self.chunks.shape[1], device="cpu"))
        return (slot - torch.arange(len(slot), device="cpu")) * self.chunk_size

    def _of_chunk(self, values: Tensor) -> Tensor:
        """For each chunk the value at its place in `chunks`."""
        flat = self.chunks.flatten()
        return torch.empty_like(flat).scatter_(0, flat, values.expand_as(self.chunks).flatten())

    def positions(self, rank: int | None = None) -> Tensor:
        """The position in the sequence of every row of `rank`, or of all ranks one after another, int64."""
        if rank is not None:
            check_count("rank", rank, 0)
            if rank >= self.cp_size:
                raise ValueError(f"`rank` must be in [0, cp_size = {self.cp_size}), got {rank}")
        chunks = self.chunks.flatten() if rank is None else self.chunks[rank]
        return (
            chunks[:, None] * self.chunk_size + torch.arange(self.chunk_size, device="cpu")
        ).flatten()

    def repeated(self, number: int) -> Placement:
        """The placement of `number` such sequences one behind the other, padding included; a rank holds the chunks of
        all of them, in their order."""
        first = torch.arange(number, device="cpu")[:, None] * self.chunks.numel()
        chunks = (self.chunks[:, None] + first).flatten(1)
        return Placement(number * self.total_padded, self.chunk_size, chunks)

    def parted(self, number: int) -> Placement:
        """The placement over `number` times as many ranks: in place of each rank so many, which hold equal parts of its
        rows, one behind the other. `number` divides the rows of a rank."""
        size = math.gcd(self.chunk_size, self.seqlen_local // number)
        step = torch.arange(self.chunk_size // size, device="cpu")
        chunks = (self.chunks[..., None] * len(step) + step).view(self.cp_size * number, -1)
        return Placement(self.total, size, chunks)

    def inverse_positions(self) -> Tensor:
        """The new places of the rows of the padded sequence: the inverse permutation of `positions()`, int64."""
        return torch.argsort(self.positions())


class Keys(NamedTuple):
    """Keys that are a sequence of their own (cross attention)."""

    placement: Placement  # who holds them; where `is_free` only how they are cut
    is_free: bool  # whether it is still to be decided who holds them


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The cost of each chunk of rows, and the keys that it needs."""

    chunk_size: int
    area: Tensor  # int64 `[num_chunks]`, visible (row, key) pairs; the mean of entries with masks of their own
    needs: Ranges  # the keys that rows of a chunk see, `owner` is the chunk; it may have several, which may overlap
    rects: Rects  # the mask, cut between chunks; every row of a rect sees a key; `needs` has one range of each
    whole: Tensor  # int64 `[num_rects]`, the slice that a rect was cut from; those of one follow each other
    keys: Keys | None = None  # where these are not the rows themselves
    num_entries: int = 1  # that have masks of their own

    @property
    def num_chunks(self) -> int:
        return len(self.area)

    @property
    def total(self) -> int:
        return self.chunk_size * self.num_chunks

    def needs_of_ranks(self, rank: Tensor, keys: Placement) -> tuple[Ranges, Tensor]:
        """The keys that each rank's rows see, where `rank` is that of each chunk: cut into chunks of `keys`, in order,
        and the chunk of each."""
        needs = self.needs._replace(owner=pick(rank, self.needs.owner))
        return split_at_multiples(unite(needs, keys.total_padded), keys.chunk_size)

    @staticmethod
    def of(
        slices: AttnSlices, chunk_size: int, num_chunks: int, keys: Keys | None = None
    ) -> ChunkTable:
        cuts = torch.arange(1, num_chunks, device="cpu") * chunk_size
        rects, whole = slices.rects().live().cut_at(cuts)
        chunk = rects.row_begin.div(chunk_size, rounding_mode="floor")
        # Rows that follow one another see overlapping or neighbouring keys: together one interval.
        needs = Ranges(chunk, rects.at(rects.row_begin)[0], rects.at(rects.row_end - 1)[1])
        area = torch.zeros(num_chunks, dtype=torch.int64, device="cpu").index_add_(
            0, chunk, rects.area()
        )
        number = slices.entries.number if isinstance(slices, Cover) else 1
        return ChunkTable(chunk_size, mean_area(area, number), needs, rects, whole, keys, number)

    def part(self, chunks: Tensor) -> ChunkTable:
        """The table of some chunks, int64 and ascending, as if they were a sequence of their own: without the keys of
        the others. For self-attention."""
        assert self.keys is None
        size = self.chunk_size
        is_kept = torch.zeros(self.num_chunks + 1, dtype=torch.int64, device="cpu")
        is_kept[chunks] = 1
        before = (is_kept.cumsum(0) - is_kept) * size

        def place(row: Tensor) -> Tensor:
            """The rows of these chunks before `row`."""
            chunk = row.div(size, rounding_mode="floor")
            return pick(before, chunk) + pick(is_kept, chunk) * (row - chunk * size)

        needs = Ranges(self.needs.owner, place(self.needs.lo), place(self.needs.hi))
        index = ((pick(is_kept, needs.owner) > 0) & (needs.lo < needs.hi)).nonzero().flatten()
        needs = needs.take(index)
        needs = needs._replace(owner=pick(before, needs.owner).div(size, rounding_mode="floor"))
        rects, whole = self.rects.select(index), pick(self.whole, index)
        area = pick(self.area, chunks)
        return ChunkTable(size, area, needs, rects, whole, num_entries=self.num_entries)

    @staticmethod
    def together(tables: Sequence[ChunkTable], weights: Sequence[int]) -> ChunkTable:
        """The sum of several tables, one for each mask, each `weights` times.

        What they need is of one sequence of keys: the rows themselves, or else that of the first mask.
        """
        if len(tables) == 1:
            return tables[0]
        area = sum(weight * table.area for weight, table in zip(weights, tables, strict=True))
        assert isinstance(area, Tensor)
        keys = None if any(table.keys is None for table in tables) else tables[0].keys
        tables = [table for table in tables if table.keys is keys]
        needs = (torch.cat(x) for x in zip(*(table.needs for table in tables), strict=True))
        rects = (torch.cat(x) for x in zip(*(table.rects for table in tables), strict=True))
        firsts = accumulate((len(table.whole) for table in tables[:-1]), initial=0)
        whole = torch.cat(
            [table.whole + first for first, table in zip(firsts, tables, strict=True)]
        )
        size = tables[0].chunk_size
        return ChunkTable(size, area, Ranges(*needs), Rects(*rects), whole, keys)


def mean_area(area: Tensor, num_entries: int) -> Tensor:
    """The area of one entry, where `area` is that of all; rounded up."""
    if num_entries == 1:
        return area
    return (area + num_entries - 1).div(num_entries, rounding_mode="floor")


class RankLoads(NamedTuple):
    """The loads of ranks under a placement, int64 `[cp_size]` each."""

    area: Tensor  # visible (row, key) pairs of its rows
    recv_rows: Tensor  # remote key rows it needs
    send_rows: Tensor  # key rows it sends, once for every rank that needs them

    @property
    def imbalance(self) -> float:
        """The largest area over the mean, 1.0 at best."""
        mean = self.area.double().mean().item()
        return self.area.max().item() / mean if mean else 1.0

    def seconds(self, cost: CostModel) -> float:
        """max over ranks of max(compute, communication) of a forward pass."""
        compute = self.area.double() * cost.seconds_per_area
        rows = torch.maximum(self.recv_rows, self.send_rows)
        communication = rows.double() * cost.seconds_per_row
        return torch.maximum(compute, communication).max().item()


def rank_loads(
    table: ChunkTable, assignment: Assignment | Tensor, keys: Placement | None = None
) -> RankLoads:
    """Exact load and traffic of every rank; `keys` says who holds these, None that it is who holds the rows."""
    chunks = torch.as_tensor(assignment, device="cpu")
    cp_size = chunks.shape[0]
    rows = Placement(table.total, table.chunk_size, chunks)
    keys = keys or rows
    rank = rows.rank_of_chunk()
    pieces, chunk = table.needs_of_ranks(rank, keys)
    source = pick(keys.rank_of_chunk(), chunk)
    index = (source != pieces.owner).nonzero().flatten()
    remote, source = pieces.take(index), pick(source, index)
    return RankLoads(
        torch.zeros(cp_size, dtype=torch.int64, device="cpu").index_add_(0, rank, table.area),
        total_by_owner(remote, cp_size),
        total_by_owner(remote._replace(owner=source), cp_size),
    )
