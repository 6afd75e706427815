"""Communication plan: which key rows each rank needs, in which stage, and from whom.

Exact and without redundancy: a rank receives a row if and only if one of its queries sees it, and receives it
once. The plan of all ranks is one table of ranges of rows; every rank computes the same table and reads its part.

A stage is one attention call over some of the keys. With degree 0 there is one stage, over everything, behind one
cast. With degree d there are d + 1: the first over the keys a rank holds itself, and d more over its remote keys,
cut into d equal parts, whose casts run while the stage before is being computed.

    degree 0    | cast everything | attend everything                           |
    degree 2    | cast 1 | cast 2 |
                | attend local    | attend 1       | attend 2       | merged by lse
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.planning.chunks import mean_area
from magi_compile.dtensor.planning.dispatch import Dispatch
from magi_compile.dtensor.planning.ranges import Ranges, expand, group, join, pick
from magi_compile.dtensor.planning.relays import MovingRows, Relays
from magi_compile.masks.geometry import Rects
from magi_compile.masks.slices import AttnSlices


@dataclass(frozen=True, eq=False)
class RankRows:
    """The rows that each rank needs."""

    dispatch: Dispatch  # who holds what
    rank_of_chunk: Tensor  # int64 `[num_chunks]`, as in `Placement`, like what follows
    shift_of_chunk: Tensor  # int64 `[num_chunks]`
    shift_of_key_chunk: Tensor  # int64 `[num_key_chunks]`
    needs: Ranges  # the keys each rank's rows see, cut into chunks of keys, in order; `owner` is the rank
    chunk: Tensor  # int64 `[num_needs]`, the chunk of each of them
    holder: Tensor  # int64 `[num_needs]`, the rank that holds it

    @staticmethod
    def of(dispatch: Dispatch) -> RankRows:
        rank, keys = dispatch.rank_of_chunk(), dispatch.keys
        needs, chunk = dispatch.table.needs_of_ranks(rank, keys)
        shift = dispatch.shift_of_chunk()
        holder, key_shift = rank, shift
        if keys is not dispatch:
            holder, key_shift = keys.rank_of_chunk(), keys.shift_of_chunk()
        return RankRows(dispatch, rank, shift, key_shift, needs, chunk, pick(holder, chunk))

    def rects_of(self, rank: int) -> tuple[Rects, Tensor, Tensor]:
        """The mask of the rows of `rank`: rects in coordinates of the sequence that have a key in every row, and
        local row minus row of each, and the number of the slice that it is a part of."""
        table = self.dispatch.table
        index = (pick(self.rank_of_chunk, table.needs.owner) == rank).nonzero().flatten()
        rects, chunk = table.rects.select(index), pick(table.needs.owner, index)
        whole = pick(table.whole, index)
        # Where a slice goes on in the next chunk, and that lies behind this one, the cut between them is undone.
        shift = pick(self.shift_of_chunk, chunk)
        is_apart = (chunk[1:] != chunk[:-1] + 1) | (shift[1:] != shift[:-1])
        first, last = group((whole[1:] != whole[:-1]) | is_apart, index.shape[0])
        joined = rects.select(first)._replace(row_end=pick(rects.row_end, last))
        return joined, pick(shift, first), pick(whole, first)


class Transfer(NamedTuple):
    """One rank's share of one cast, as `Route` says it: int64 tables in the columns `peer, row, peer_row, count`.

    A reduce is the same transfer backwards.
    """

    sends: Tensor  # ordered by peer
    recvs: Tensor  # ordered by peer
    send_counts: list[int]  # rows for each rank
    recv_counts: list[int]
    peak_received: int  # rows of the largest buffer of any rank
    # By way of relays; the second is from buffers to buffers
    legs: tuple[Transfer, Transfer] | None = None

    @property
    def num_received(self) -> int:
        """Rows of the buffer."""
        return sum(self.recv_counts)


class Stage(NamedTuple):
    """One attention call of one rank: its local rows against the keys of a buffer, or its own keys in place."""

    slices: AttnSlices
    transfer: Transfer | None  # None: the keys are the rank's own, in place
    # int64 `[num_slices]`, of which slice of the mask each is a part; while planning
    whole: Tensor | None = None
    # int32 `[num_slices]`, whose they are where heads have masks of their own
    entry: Tensor | None = None
    # Rows of each rank's buffer in front of those of each batch entry, where these have masks of their own; and of all
    rows_before: list[list[int]] | None = None

    def without_legs(self) -> Stage:
        """The stage whose rows come from where they are held."""
        if self.transfer is None or self.transfer.legs is None:
            return self
        return self._replace(transfer=self.transfer._replace(legs=None))


class Buffers(NamedTuple):
    """The buffers of all ranks for one degree: one for each stage."""

    begin: Tensor  # int64 `[cp_size, num_stages]`, rows that move into buffers before, those of earlier ranks included
    rows: Tensor  # int64 `[cp_size, num_stages]`, 0 in place
    # float64 `[cp_size * (degree - 1)]`, where parts of each rank's remote rows begin.
    edges: Tensor

    @property
    def num_stages(self) -> int:
        return self.rows.shape[1]


@dataclass(frozen=True, eq=False)
class CommPlan:
    """The communication of all ranks, for several degrees side by side, whose stages are numbered through."""

    rows: RankRows  # what each rank needs
    degrees: Sequence[int]  # each 0 for one merged stage, otherwise the number of remote stages
    rows_before: Tensor  # int64 `[num_needs]`, rows of `rows.needs` before each of them
    remote_before: Tensor  # int64 `[num_needs]`, the same of those that another rank holds
    remote_middle: Tensor  # float64 `[num_needs]`, the same up to the middle of each
    buffers: Sequence[
        Buffers
    ]  # of each degree, without remote stages in which nothing moves on any rank
    # int64 `[cp_size]`, that of each rank, where rows cross hosts by way of relays
    host: Tensor | None = None

    @property
    def num_stages(self) -> int:
        """The number of stages of all degrees together."""
        return sum(x.num_stages for x in self.buffers)

    def stages(self, rank: int, *, has_slices: bool = True) -> list[list[Stage]]:
        """The stages of `rank` for each degree; tensors are on the CPU. Without `has_slices` those are left out."""
        is_mine, is_theirs = self.rows.needs.owner == rank, self.rows.holder == rank
        indices = [x.nonzero().flatten() for x in (is_mine, is_theirs)]
        first, fields = indices[0].shape[0], self._moving_rows(torch.cat(indices))
        mine = MovingRows(*(x[:, :first].flatten() for x in fields))
        theirs = MovingRows(*(x[:, first:].flatten() for x in fields))
        slices = self._slices(rank, mine) if has_slices else self._no_slices(rank)
        transfers = self._transfers(mine, theirs)
        if self.host is not None:
            legs = self._legs(self.host, rank, mine, theirs)
            transfers = [x._replace(legs=of_x) for x, of_x in zip(transfers, legs, strict=True)]
        before = self._rows_before()

        def stage(i: int, *, is_in_place: bool) -> Stage:
            lists, whole = slices[i]
            if is_in_place:
                return Stage(lists, None, whole)
            return Stage(lists, transfers[i], whole, rows_before=before[i] if before else None)

        return [
            [
                stage(i, is_in_place=degree > 0 and i == first)
                for i in range(first, first + buffers.num_stages)
            ]
            for degree, first, buffers in self._first_stages()
        ]

    def _rows_before(self) -> list[list[list[int]]] | None:
        """`Stage.rows_before` of all stages; None for one sequence."""
        where, needs = self.rows.dispatch, self.rows.needs
        if where.batch == 1:
            return None
        index = torch.arange(needs.lo.shape[0], device="cpu")
        moving = MovingRows(*self._moving_rows(index))
        length = where.keys.total_padded // where.batch
        place = moving.stage * where.cp_size + moving.receiver
        place = place * (where.batch + 1) + moving.lo.div(length, rounding_mode="floor") + 1
        counts = needs.lo.new_zeros(self.num_stages, where.cp_size, where.batch + 1)
        counts.view(-1).index_add_(0, place.flatten(), moving.rows.flatten())
        return counts.cumsum(2).tolist()  # type: ignore[no-any-return]

    def _legs(
        self, host: Tensor, rank: int, mine: MovingRows, theirs: MovingRows
    ) -> Iterable[tuple[Transfer, Transfer]]:
        """One rank's share of both legs of each stage, where `mine` and `theirs` are what it receives and sends in
        all."""
        near_mine, near_theirs = (
            x.take(pick(host, x.receiver) == pick(host, x.sender)) for x in (mine, theirs)
        )
        relays, parts = self._relays, self._relays.parts
        first = self._transfers(
            near_mine.then(parts.take(parts.receiver == rank)),
            near_theirs.then(parts.take(parts.sender == rank)),
        )
        return zip(first, self._transfers(*relays.second_leg(rank)), strict=True)

    @cached_property
    def _relays(self) -> Relays:
        """The relays of all ranks in all stages."""
        assert self.host is not None
        index = far_needs(self.rows, self.host)
        far = MovingRows(*(x.flatten() for x in self._moving_rows(index)))
        return Relays.of(far, self.host, torch.cat([x.rows for x in self.buffers], 1).t())

    def _first_stages(self) -> Iterable[tuple[int, int, Buffers]]:
        """Each degree, the number of its first stage, and its buffers."""
        first = accumulate((x.num_stages for x in self.buffers), initial=0)
        return zip(self.degrees, first, self.buffers, strict=False)

    def _moving_rows(self, index: Tensor) -> Sequence[Tensor]:
        """The fields of `MovingRows` of some of `rows.needs`, `[num_degrees, num_needs]`."""
        rows = self.rows
        needs, holder = rows.needs.take(index), pick(rows.holder, index)
        is_remote, receiver = holder != needs.owner, needs.owner
        middle = pick(self.remote_middle, index)
        stages, buffer_rows = [], []
        for degree, first, buffers in self._first_stages():
            if degree == 0:
                stage, before = torch.zeros_like(index), pick(self.rows_before, index)
            else:
                edges_before = torch.searchsorted(buffers.edges, middle, right=True)
                stage = 1 + edges_before - receiver * (degree - 1)
                stage, before = torch.where(is_remote, stage, 0), pick(self.remote_before, index)
            stages.append(stage + first)
            buffer_rows.append(
                before - pick(buffers.begin.flatten(), receiver * buffers.num_stages + stage)
            )
        source_row = needs.lo + pick(rows.shift_of_key_chunk, pick(rows.chunk, index))
        fields = (torch.stack(stages), torch.stack(buffer_rows), *needs, holder, source_row)
        return torch.broadcast_tensors(*fields)

    def _transfers(self, mine: MovingRows, theirs: MovingRows) -> list[Transfer]:
        """One rank's share of each stage: it receives `mine` and sends `theirs`."""
        cp_size, num_stages = self.rows.dispatch.cp_size, self.num_stages
        # Both directions in one pass: what is received comes in stages of its own, behind the others.
        sends = (theirs.stage, theirs.receiver, theirs.source_row, theirs.buffer_row, theirs.rows)
        recvs = (mine.stage + num_stages, mine.sender, mine.buffer_row, mine.source_row, mine.rows)
        stage, *columns = (torch.cat(pair) for pair in zip(sends, recvs, strict=True))
        place = stage * cp_size + columns[0]
        order = place.argsort(stable=True)
        place, (peer, row, peer_row, count) = pick(place, order), (pick(x, order) for x in columns)
        counts = place.new_zeros(2 * num_stages * cp_size).index_add_(0, place, count)
        # Neighbours on both sides become one.
        end, peer_end = row + count, peer_row + count
        is_new = (place[1:] != place[:-1]) | (row[1:] != end[:-1])
        first, last = group(is_new | (peer_row[1:] != peer_end[:-1]), place.shape[0])
        row = pick(row, first)
        ranges = torch.stack(
            [pick(peer, first), row, pick(peer_row, first), pick(end, last) - row], 1
        )
        sizes = torch.bincount(pick(pick(stage, order), first), minlength=2 * num_stages).tolist()
        ranges_of, counts_of = (
            torch.split_with_sizes(ranges, sizes),
            counts.view(-1, cp_size).tolist(),
        )
        peaks = chain.from_iterable(x.rows.amax(0).tolist() for x in self.buffers)
        return [
            Transfer(
                ranges_of[i],
                ranges_of[num_stages + i],
                counts_of[i],
                counts_of[num_stages + i],
                peak,
            )
            for i, peak in enumerate(peaks)
        ]

    def _seqlens_k(self, rank: int) -> list[int]:
        """The keys of each stage."""
        seqlens_k = [n for buffers in self.buffers for n in buffers.rows[rank].tolist()]
        for degree, first_stage, _ in self._first_stages():
            if degree > 0:
                seqlens_k[first_stage] = self.rows.dispatch.keys.seqlen_local
        return seqlens_k

    def _no_slices(self, rank: int) -> list[tuple[AttnSlices, Tensor]]:
        ranges = torch.zeros(0, 2, dtype=torch.int32, device="cpu")
        lists, seqlen_q = (ranges, ranges, ranges[:, 0]), self.rows.dispatch.seqlen_local
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        return [(AttnSlices.unchecked(*lists, seqlen_q, n), none) for n in self._seqlens_k(rank)]

    def _slices(self, rank: int, mine: MovingRows) -> list[tuple[AttnSlices, Tensor]]:
        """The rank's rows against the keys of each stage, all stages in one pass."""
        where, num_stages = self.rows.dispatch, self.num_stages
        total, seqlen_q = where.keys.total_padded, where.seqlen_local
        key_row = mine.buffer_row
        for degree, first_stage, _ in self._first_stages():
            if degree > 0:
                is_in_place = mine.stage == first_stage
                key_row = torch.where(is_in_place, mine.source_row, key_row)
        # Neighbouring ranges of a stage are neighbours in its buffer too, but in place where chunks are in another
        # order.
        order = mine.stage.argsort(stable=True)
        stage, lo, hi, key_row = (pick(x, order) for x in (mine.stage, mine.lo, mine.hi, key_row))
        shift = key_row - lo
        is_apart = (lo[1:] != hi[:-1]) | (shift[1:] != shift[:-1])
        first, last = group((stage[1:] != stage[:-1]) | is_apart, stage.shape[0])
        keys, key_shift = (
            Ranges(pick(stage, first), pick(lo, first), pick(hi, last)),
            pick(shift, first),
        )
        rects, row_shift, whole = self.rows.rects_of(rank)
        # Every rect against the keys of every stage.
        num_rects = row_shift.shape[0]
        first_key, last_key = rects.at(rects.row_begin)[0], rects.at(rects.row_end - 1)[1]
        owner = torch.arange(num_stages, device="cpu").repeat_interleave(num_rects)
        sees = Ranges(owner, *(torch.cat([x] * num_stages) for x in (first_key, last_key)))
        rect, key = overlaps(sees, keys, total)
        rect = rect - pick(owner, rect) * num_rects
        of_keys = rects.select(rect).clipped_to_columns(pick(keys.lo, key), pick(keys.hi, key))
        straight = of_keys.straight()
        live = straight.has_area().nonzero().flatten()
        which = live.remainder(max(rect.shape[0], 1))  # one rect has become three
        order = pick(keys.owner, pick(key, which)).argsort(stable=True)
        live, which = pick(live, order), pick(which, order)
        rect, key = pick(rect, which), pick(key, which)
        q_ranges, k_ranges, mask_types = straight.select(live).to_ranges()
        local = (
            q_ranges + pick(row_shift, rect).int()[:, None],
            k_ranges + pick(key_shift, key).int()[:, None],
            mask_types,
            pick(whole, rect),
        )
        sizes = torch.bincount(pick(keys.owner, key), minlength=num_stages).tolist()
        tables = zip(
            *(torch.split_with_sizes(x, sizes) for x in local), self._seqlens_k(rank), strict=True
        )
        return [
            (AttnSlices.unchecked(q, k, types, seqlen_q, seqlen_k), whole)
            for q, k, types, whole, seqlen_k in tables
        ]


def far_needs(rows: RankRows, host: Tensor) -> Tensor:
    """The numbers of the needs that a rank of another host holds, where `host` is that of each rank."""
    return (pick(host, rows.needs.owner) != pick(host, rows.holder)).nonzero().flatten()


def plan_communication(
    rows: RankRows, degrees: Sequence[int], host: Tensor | None = None
) -> CommPlan:
    """The communication of all ranks in all stages of each of `degrees`: numbers of remote stages, or 0 for one stage
    with everything; they lie side by side. `host`, int64 `[cp_size]`, that of each rank, gives transfers both legs as
    well."""
    if min(degrees) < 0:
        raise ValueError(f"`degrees` must not be negative, got {list(degrees)}")
    cp_size, receiver = rows.dispatch.cp_size, rows.needs.owner
    count = rows.needs.hi - rows.needs.lo
    remote = torch.where(rows.holder != receiver, count, 0)
    all_end, remote_end = count.cumsum(0), remote.cumsum(0)
    remote_before = remote_end - remote
    middle = remote_before + remote.double() / 2

    last_of_rank = torch.searchsorted(receiver, torch.arange(cp_size + 1, device="cpu"))

    def up_to(end: Tensor) -> Tensor:
        """The counts up to each rank, and up to the last, `[cp_size + 1]`."""
        padded = torch.cat([end.new_zeros(1), end])
        return pick(padded, last_of_rank)

    def buffers_of(degree: int) -> Buffers:
        ends = up_to(remote_end if degree else all_end)
        begin, end = ends[:-1, None], ends[1:, None]
        if degree == 0:
            return Buffers(begin, end - begin, middle[:0])
        # Equal parts of every receiver's remote rows, in the order of keys; the middle of a range decides.
        edges = (
            begin
            + (end - begin) * torch.arange(1, degree, dtype=torch.float64, device="cpu") / degree
        )
        starts = torch.cat([remote_before, ends[-1:]])[torch.searchsorted(middle, edges)]
        starts = torch.cat([begin, starts, end], 1)
        parts = starts.diff(dim=1)
        num_parts = max((i for i, most in enumerate(parts.amax(0).tolist(), 1) if most), default=0)
        in_place = begin.new_zeros(cp_size, 1)
        return Buffers(
            torch.cat([in_place, starts[:, :num_parts]], 1),
            torch.cat([in_place, parts[:, :num_parts]], 1),
            edges.flatten(),
        )

    return CommPlan(
        rows,
        degrees,
        all_end - count,
        remote_before,
        middle,
        [buffers_of(degree) for degree in degrees],
        host,
    )


def overlaps(one: Ranges, other: Ranges, span: int) -> tuple[Tensor, Tensor]:
    """All pairs of ranges of one owner that overlap, as indices of `one`, ascending, and of `other`, int64 both.

    `one` comes in any order, `other` sorted by (owner, lo) and disjoint; none is empty. No `hi` is beyond `span`.
    """
    stride = span + 1
    begin, end = one.owner * stride + one.lo, one.owner * stride + one.hi
    first = torch.searchsorted(other.owner * stride + other.hi, begin, right=True)
    last = torch.searchsorted(other.owner * stride + other.lo, end)
    index, step = expand(last - first)
    return index, pick(first, index) + step


class Hop(NamedTuple):
    """An exchange between ranks."""

    near: int  # the most rows that a rank sends to others of its host, or receives from them
    far: int = 0  # the same of other hosts
    crossing: int = 0  # all rows that cross hosts


@dataclass(frozen=True, eq=False)
class StageLoads:
    """The loads of every rank that decide the degree: int64 `[cp_size]` each."""

    area: Tensor  # visible (row, key) pairs
    local_area: Tensor  # those whose keys are on the same rank
    recv_rows: Tensor  # remote key rows
    send_rows: Tensor  # the same, of those who hold them
    query_rows: int  # of each rank
    # The exchanges of a cast of all remote rows, where several hosts are known
    hops: tuple[Hop, ...] | None = None
    relayed: StageLoads | None = None  # the same loads where rows cross hosts by way of relays

    @cached_property
    def areas(self) -> list[tuple[int, int]]:
        """`area` and `local_area` of each rank."""
        return list(zip(self.area.tolist(), self.local_area.tolist(), strict=True))

    @cached_property
    def received(self) -> list[int]:
        """`recv_rows` of each rank."""
        return self.recv_rows.tolist()  # type: ignore[no-any-return]

    @cached_property
    def exchanges(self) -> tuple[Hop, ...]:
        """The exchanges of a cast of all remote rows; one between ranks of one host, if no other is known."""
        if self.hops is None:
            return (Hop(max(*self.received, *self.send_rows.tolist())),)
        return self.hops

    @staticmethod
    def of(rows: RankRows, host: Tensor | None = None) -> StageLoads:
        """The loads where ranks need `rows`, on hosts `host`, int64 `[cp_size]`, or all on one."""
        where, needs = rows.dispatch, rows.needs
        table, zeros = where.table, torch.zeros(where.cp_size, dtype=torch.int64, device="cpu")
        is_remote = rows.holder != needs.owner
        moved = torch.where(is_remote, needs.hi - needs.lo, 0)
        sees = table.needs._replace(owner=pick(rows.rank_of_chunk, table.needs.owner))
        local = join(needs.take(~is_remote))
        rect, key = overlaps(sees, local, where.keys.total_padded)
        of_keys = table.rects.select(rect).clipped_to_columns(
            pick(local.lo, key), pick(local.hi, key)
        )
        local_area = zeros.index_add(0, pick(sees.owner, rect), of_keys.area())
        loads = StageLoads(
            table.area[where.chunks].sum(1),
            mean_area(local_area, table.num_entries),
            zeros.index_add(0, needs.owner, moved),
            zeros.index_add(0, rows.holder, moved),
            where.seqlen_local,
        )
        if host is None:
            return loads
        flat, relayed = _hops(rows, host, moved)
        return replace(loads, hops=flat, relayed=replace(loads, hops=relayed))


def _hops(rows: RankRows, host: Tensor, moved: Tensor) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    """The exchanges of a cast of all remote rows at once, of which each need has `moved`: without relays, and with."""
    needs, cp_size = rows.needs, rows.dispatch.cp_size
    index = far_needs(rows, host)
    far = torch.zeros_like(moved).index_add_(0, index, pick(moved, index))
    zero = torch.zeros_like(index)
    owner, lo, hi = needs.take(index)
    all_far = MovingRows(zero, zero, owner, lo, hi, pick(rows.holder, index), zero)
    relays = Relays.of(all_far, host, torch.zeros_like(host)[None])
    parts = relays.parts

    def most(receiver: Tensor, sender: Tensor, count: Tensor) -> int:
        zeros = count.new_zeros(cp_size)
        return max(int(zeros.index_add(0, x, count).max()) for x in (receiver, sender))

    near = most(needs.owner, rows.holder, moved - far)
    flat = Hop(near, most(needs.owner, rows.holder, far), int(far.sum()))
    crossing = most(parts.receiver, parts.sender, parts.rows)
    first = Hop(near, crossing, int(parts.rows.sum()))
    return (flat,), (first, Hop(max(int(x.max()) for x in relays.handed_on(cp_size))))
