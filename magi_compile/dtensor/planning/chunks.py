"""What chunks of a sequence cost and need, and what a placement of them asks of each rank."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.ranges import (
    Ranges,
    pick,
    split_at_multiples,
    total_by_owner,
    unite,
)
from magi_compile.masks import bands
from magi_compile.masks.slices import AttnSlices

Assignment = list[list[int]]  # the chunks of each rank


def tensor_of(assignment: Assignment) -> Tensor:
    """int64 `[cp_size, chunks_per_rank]`, where `torch.tensor` takes ten times as long over nested lists."""
    flat = array("q", chain.from_iterable(assignment))
    return torch.frombuffer(flat, dtype=torch.int64).view(len(assignment), -1)


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """What each chunk of rows costs and needs.

    Attributes:
        chunk_size: rows of a chunk.
        area: int64 `[num_chunks]`, visible (row, key) pairs.
        needs: the keys that the rows of a chunk see, `owner` is the chunk; a chunk may have several ranges,
            which may overlap.
        parts: the mask itself, as bands that lie in one chunk and see a key in every row; `needs` has one range of each.
        band: int64 `[num_parts]`, which band a part was cut from; those of one band follow each other.
    """

    chunk_size: int
    area: Tensor
    needs: Ranges
    parts: bands.Bands
    band: Tensor

    @property
    def num_chunks(self) -> int:
        return len(self.area)

    @property
    def total(self) -> int:
        return self.chunk_size * self.num_chunks

    @staticmethod
    def of(slices: AttnSlices, chunk_size: int, num_chunks: int) -> ChunkTable:
        whole = bands.drop_empty(bands.trim(slice_bands(slices)))
        cuts = torch.arange(1, num_chunks) * chunk_size
        parts, band = bands.cut_at(whole, cuts)
        # A band that sees a key in every row sees one interval: its edges move by at most one per row.
        rows = parts.end - parts.begin
        chunk = parts.begin.div(chunk_size, rounding_mode="floor")
        area = rows * (parts.hi - parts.lo) + (parts.dhi - parts.dlo) * (rows * (rows - 1) // 2)
        needs = Ranges(chunk, parts.lo, parts.hi + parts.dhi * (rows - 1))
        total = torch.zeros(num_chunks, dtype=torch.int64).index_add_(0, chunk, area)
        return ChunkTable(chunk_size, total, needs, parts, band)

    @staticmethod
    def together(tables: Sequence[ChunkTable], weights: Sequence[int]) -> ChunkTable:
        """What chunks cost and need where several masks are attended to by turns, each `weights` times."""
        if len(tables) == 1:
            return tables[0]
        area = sum(weight * table.area for weight, table in zip(weights, tables, strict=True))
        assert isinstance(area, Tensor)
        needs = (torch.cat(x) for x in zip(*(table.needs for table in tables), strict=True))
        parts = (torch.cat(x) for x in zip(*(table.parts for table in tables), strict=True))
        firsts = accumulate((len(table.band) for table in tables[:-1]), initial=0)
        band = torch.cat([table.band + first for first, table in zip(firsts, tables, strict=True)])
        return ChunkTable(tables[0].chunk_size, area, Ranges(*needs), bands.Bands(*parts), band)


class RankLoads(NamedTuple):
    """What a placement asks of each rank, int64 `[cp_size]` each."""

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


def rank_loads(table: ChunkTable, assignment: Assignment | Tensor) -> RankLoads:
    """Exact load and traffic of every rank."""
    chunks = torch.as_tensor(assignment)
    cp_size = chunks.shape[0]
    rank = torch.empty(table.num_chunks, dtype=torch.int64)
    rank[chunks.flatten()] = torch.arange(cp_size).repeat_interleave(chunks.shape[1])
    needs = table.needs
    needs = unite(needs._replace(owner=pick(rank, needs.owner)), table.total)
    pieces, chunk = split_at_multiples(needs, table.chunk_size)
    source = pick(rank, chunk)
    index = (source != pieces.owner).nonzero().flatten()
    remote, source = pieces.take(index), pick(source, index)
    return RankLoads(
        torch.zeros(cp_size, dtype=torch.int64).index_add_(0, rank, table.area),
        total_by_owner(remote, cp_size),
        total_by_owner(remote._replace(owner=source), cp_size),
    )


def slice_bands(slices: AttnSlices) -> bands.Bands:
    """The slices as bands on the CPU."""
    host = (x.cpu() for x in (slices.q_ranges, slices.k_ranges, slices.mask_types))
    return bands.from_ranges(*host)
