"""Communication plan: which key rows each rank needs, in which stage, and from whom.

Exact and without redundancy: a rank receives a row if and only if one of its queries sees it, and receives it
once. The plan of all ranks is one table of pieces; every rank computes the same table and reads its part.

A stage is one attention call over some of the keys. With degree 0 there is one stage, over everything, behind one
cast. With degree d there are d + 1: the first over the keys a rank holds itself, and d more over its remote keys,
cut into d equal parts, whose casts run while the stage before is being computed.

    degree 0    | cast everything | attend everything                           |
    degree 2    | cast 1 | cast 2 |
                | attend local    | attend 1       | attend 2       | merged by lse
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.chunks import slice_bands
from magi_compile.dtensor.dispatch import Dispatch
from magi_compile.dtensor.ranges import (
    Ranges,
    expand,
    join,
    split_at_multiples,
    total_by_owner,
    unite,
)
from magi_compile.masks import bands
from magi_compile.masks.bands import Bands
from magi_compile.masks.slices import AttnSlices


@dataclass(frozen=True, eq=False)
class RankRows:
    """The mask, cut where neighbouring rows live on different ranks.

    Attributes:
        parts: bands in coordinates of the sequence; each has rows of one rank, and a key in every row.
        rank: int64 `[num_parts]`, the rank that holds the rows.
        offset: int64 `[num_parts]`, local row minus row of the sequence.
        needs: the keys each rank's rows see, cut into chunks; `owner` is the rank.
        chunk: int64 `[num_needs]`, the chunk of each of them.
        holder: int64 `[num_needs]`, the rank that holds it.
        slot_of_chunk: int64 `[num_chunks]`, as in `Dispatch`.
    """

    parts: Bands
    rank: Tensor
    offset: Tensor
    needs: Ranges
    chunk: Tensor
    holder: Tensor
    slot_of_chunk: Tensor

    @staticmethod
    def of(slices: AttnSlices, dispatch: Dispatch) -> RankRows:
        whole = bands.drop_empty(bands.trim(slice_bands(slices)))
        size, rank = dispatch.chunk_size, dispatch.rank_of_chunk()
        is_cut = (rank[1:] != rank[:-1]).nonzero().flatten() + 1
        parts, _ = bands.cut_at(whole, is_cut * size)
        chunk = parts.begin.div(size, rounding_mode="floor")
        slot = dispatch.slot_of_chunk()
        offset = (slot[chunk] - chunk) * size
        _, last_hi = parts.at(parts.end - 1)
        needs = unite(Ranges(rank[chunk], parts.lo, last_hi), dispatch.total_padded)
        needs, key_chunk = split_at_multiples(needs, size)
        return RankRows(parts, rank[chunk], offset, needs, key_chunk, rank[key_chunk], slot)


class Pieces(NamedTuple):
    """Key rows on their way, one entry for each run of rows from one chunk; int64 `[num_pieces]` each.

    Sorted by (stage, receiver, key).
    """

    stage: Tensor
    receiver: Tensor
    sender: Tensor  # may be the receiver itself
    lo: Tensor  # rows of the sequence
    hi: Tensor
    source_row: Tensor  # the row `lo` on the sender
    buffer_row: Tensor  # the row `lo` in the receiver's buffer of the stage, where rows lie in the order of keys

    @property
    def rows(self) -> Tensor:
        return self.hi - self.lo


class Transfer(NamedTuple):
    """One rank's share of one cast, as `Route` says it: int64 tables in the columns `peer, row, peer_row, count`.

    A reduce is the same transfer backwards.
    """

    sends: Tensor  # ordered by peer
    recvs: Tensor  # ordered by peer
    send_counts: list[int]  # rows for each rank
    recv_counts: list[int]
    peak_received: int  # rows of the largest buffer of any rank

    @property
    def num_received(self) -> int:
        """Rows of the buffer."""
        return sum(self.recv_counts)


class Stage(NamedTuple):
    """One attention call of one rank: its local rows against the keys of a buffer, or its own keys in place."""

    slices: AttnSlices
    transfer: Transfer | None  # None: the keys are the rank's own, in place


@dataclass(frozen=True, eq=False)
class CommPlan:
    """The communication of all ranks.

    Attributes:
        dispatch: who holds what.
        rows: the mask by rank.
        degree: 0 for one merged stage, otherwise the number of remote stages.
        stage: int64 `[num_needs]`, the stage of each of `rows.needs`.
    """

    dispatch: Dispatch
    rows: RankRows
    degree: int
    stage: Tensor

    @cached_property
    def num_stages(self) -> int:
        """The same on all ranks. Remote stages in which nothing moves at all do not exist."""
        return 1 + int(self.stage.max()) if len(self.stage) else 1

    def stages(self, rank: int) -> list[Stage]:
        """What `rank` does; tensors are on the CPU."""
        mine = self._pieces(self.rows.needs.owner == rank)
        theirs = self._pieces(self.rows.holder == rank)
        received = self._received.view(-1, self.num_stages)
        buffer_rows = received[rank].tolist()
        key_row = mine.buffer_row
        if self.degree > 0:  # the keys of the first stage are attended in place
            key_row = torch.where(mine.stage == 0, mine.source_row, mine.buffer_row)
            buffer_rows[0] = self.dispatch.seqlen_local
        slices = self._slices(rank, mine, key_row - mine.lo, buffer_rows)
        order = torch.argsort(mine.stage * self.dispatch.cp_size + mine.sender, stable=True)
        recvs = [mine.sender, mine.buffer_row, mine.source_row, mine.rows]
        sends = [theirs.receiver, theirs.source_row, theirs.buffer_row, theirs.rows]
        columns = (
            self._by_stage(theirs.stage, torch.stack(sends, 1)),
            self._by_stage(mine.stage[order], torch.stack(recvs, 1)[order]),
            self._counts(theirs, theirs.receiver),
            self._counts(mine, mine.sender),
            received.amax(0).tolist(),
        )
        transfers: list[Transfer | None] = [
            Transfer(*fields) for fields in zip(*columns, strict=True)
        ]
        if self.degree > 0:
            transfers[0] = None
        return [Stage(*stage) for stage in zip(slices, transfers, strict=True)]

    @cached_property
    def _buffer(self) -> Tensor:
        """The buffer of each of `rows.needs`: one of each receiver and stage."""
        return self.rows.needs.owner * self.num_stages + self.stage

    @cached_property
    def _received(self) -> Tensor:
        """Rows of each buffer."""
        buffers = self.rows.needs._replace(owner=self._buffer)
        return total_by_owner(buffers, self.dispatch.cp_size * self.num_stages)

    @cached_property
    def _rows_before(self) -> Tensor:
        """How many rows move before each of `rows.needs`, whoever receives them."""
        rows = self.rows.needs.hi - self.rows.needs.lo
        if self.degree > 0:
            rows = torch.where(self.stage > 0, rows, 0)
        return rows.cumsum(0) - rows

    @cached_property
    def _rows_before_buffer(self) -> Tensor:
        """The same for each buffer: what moves is in the order of receivers, and of stages for each of them."""
        received = self._received.clone()
        if self.degree > 0:
            received.view(-1, self.num_stages)[:, 0] = 0
        return received.cumsum(0) - received

    def _pieces(self, is_taken: Tensor) -> Pieces:
        """Some of `rows.needs`, in the order of stages."""
        index = is_taken.nonzero().flatten()
        stage, order = self.stage[index].sort(stable=True)
        index = index[order]
        needs, chunk = self.rows.needs.take(index), self.rows.chunk[index]
        size = self.dispatch.chunk_size
        source_row = needs.lo + (self.rows.slot_of_chunk[chunk] - chunk) * size
        buffer_row = self._rows_before[index] - self._rows_before_buffer[self._buffer[index]]
        holder = self.rows.holder[index]
        return Pieces(stage, needs.owner, holder, needs.lo, needs.hi, source_row, buffer_row)

    def _by_stage(self, stage: Tensor, runs: Tensor) -> tuple[Tensor, ...]:
        """The runs of each stage, where neighbours on both sides have become one."""
        peer, row, peer_row, count = runs.unbind(1)
        is_first = torch.ones(len(runs), dtype=torch.bool)
        is_first[1:] = (
            (stage[1:] != stage[:-1])
            | (peer[1:] != peer[:-1])
            | (row[1:] != (row + count)[:-1])
            | (peer_row[1:] != (peer_row + count)[:-1])
        )
        joined = runs[is_first]
        before = (count.cumsum(0) - count)[is_first]
        joined[:, 3] = torch.diff(before, append=count.sum()[None])
        sizes = torch.bincount(stage[is_first], minlength=self.num_stages)
        return joined.split(sizes.tolist())

    def _counts(self, pieces: Pieces, peer: Tensor) -> list[list[int]]:
        """Rows per stage and peer."""
        cp_size = self.dispatch.cp_size
        by_peer = Ranges(pieces.stage * cp_size + peer, pieces.lo, pieces.hi)
        return total_by_owner(by_peer, self.num_stages * cp_size).view(-1, cp_size).tolist()

    def _slices(
        self, rank: int, mine: Pieces, offset: Tensor, seqlens_k: list[int]
    ) -> list[AttnSlices]:
        """The rank's rows against the buffer of each stage, all stages in one pass."""
        total, num_stages = self.dispatch.total_padded, self.num_stages
        rows = (self.rows.rank == rank).nonzero().flatten().repeat(num_stages)
        stage = torch.arange(num_stages).repeat_interleave(len(rows) // num_stages)
        # Neighbouring pieces of a stage are neighbours in its buffer too.
        keys = join(Ranges(mine.stage, mine.lo, mine.hi))
        first = torch.searchsorted(mine.stage * total + mine.lo, keys.owner * total + keys.lo)
        clipped, part, key = clip_to(self.rows.parts.take(rows), stage, keys, total)
        order = torch.argsort(stage[part], stable=True)
        clipped, part, key = clipped.take(order), part[order], key[order]
        row_shift, key_shift = self.rows.offset[rows[part]], offset[first[key]]
        local = clipped._replace(
            begin=clipped.begin + row_shift,
            end=clipped.end + row_shift,
            lo=clipped.lo + key_shift,
            hi=clipped.hi + key_shift,
        )
        sizes = torch.bincount(stage[part], minlength=num_stages).tolist()
        q_ranges, k_ranges, mask_types = (x.split(sizes) for x in bands.to_ranges(local))
        tables = zip(q_ranges, k_ranges, mask_types, seqlens_k, strict=True)
        seqlen_q = self.dispatch.seqlen_local
        return [AttnSlices(q, k, types, seqlen_q, seqlen_k) for q, k, types, seqlen_k in tables]


def plan_communication(rows: RankRows, dispatch: Dispatch, degree: int) -> CommPlan:
    """The communication of all ranks in all stages.

    Args:
        rows: the mask by rank.
        dispatch: who holds what.
        degree: number of remote stages, 0 for one stage with everything.

    Raises:
        ValueError: if `degree` is negative.
    """
    if degree < 0:
        raise ValueError(f"`degree` must not be negative, got {degree}")
    stage = _stages(rows.needs, rows.holder != rows.needs.owner, dispatch.cp_size, degree)
    return CommPlan(dispatch, rows, degree, stage)


def _stages(pieces: Ranges, is_remote: Tensor, cp_size: int, degree: int) -> Tensor:
    """The stage of each piece: equal parts of every receiver's remote rows, in the order of keys."""
    if degree == 0:
        return torch.zeros_like(pieces.owner)
    rows = torch.where(is_remote, pieces.hi - pieces.lo, 0)
    total = torch.zeros(cp_size, dtype=torch.int64).index_add_(0, pieces.owner, rows)
    before = rows.cumsum(0) - rows - (total.cumsum(0) - total)[pieces.owner]
    part = (2 * before + rows) * degree // (2 * total[pieces.owner]).clamp(min=1)
    return torch.where(is_remote, 1 + part.clamp(max=degree - 1), 0)


def clip_to(parts: Bands, owner: Tensor, ranges: Ranges, span: int) -> tuple[Bands, Tensor, Tensor]:
    """Intersects every part with all key ranges of its owner.

    Args:
        parts: bands with a key in every row.
        owner: int64 `[num_parts]`.
        ranges: sorted by (owner, lo) and disjoint.
        span: an upper bound of all keys.

    Returns:
        The intersections that are not empty, and of each the index of its part and of its range.
    """
    stride = span + 1
    _, last_hi = parts.at(parts.end - 1)
    first = torch.searchsorted(
        ranges.owner * stride + ranges.hi, owner * stride + parts.lo, right=True
    )
    last = torch.searchsorted(ranges.owner * stride + ranges.lo, owner * stride + last_hi)
    part, step = expand((last - first).clamp(min=0))
    which = first[part] + step
    clipped = bands.clip_cols(parts.take(part), ranges.lo[which], ranges.hi[which])
    copies = len(clipped.begin) // max(len(part), 1)
    live = clipped.end > clipped.begin
    return clipped.take(live), part.repeat(copies)[live], which.repeat(copies)[live]


class StageLoads(NamedTuple):
    """What the choice of a degree depends on, of every rank: int64 `[cp_size]` each."""

    area: Tensor  # visible (row, key) pairs
    local_area: Tensor  # those whose keys are on the same rank
    recv_rows: Tensor  # remote key rows
    send_rows: Tensor

    @staticmethod
    def of(rows: RankRows, dispatch: Dispatch) -> StageLoads:
        cp_size, total = dispatch.cp_size, dispatch.total_padded
        is_remote = rows.holder != rows.needs.owner
        remote = rows.needs.take(is_remote)
        local = join(rows.needs.take(~is_remote))
        local_parts, part, _ = clip_to(rows.parts, rows.rank, local, total)
        return StageLoads(
            _area_by_owner(rows.parts, rows.rank, cp_size),
            _area_by_owner(local_parts, rows.rank[part], cp_size),
            total_by_owner(remote, cp_size),
            total_by_owner(remote._replace(owner=rows.holder[is_remote]), cp_size),
        )


def _area_by_owner(parts: Bands, owner: Tensor, num_owners: int) -> Tensor:
    rows = parts.end - parts.begin
    area = rows * (parts.hi - parts.lo) + (parts.dhi - parts.dlo) * (rows * (rows - 1) // 2)
    return torch.zeros(num_owners, dtype=torch.int64).index_add_(0, owner, area)
