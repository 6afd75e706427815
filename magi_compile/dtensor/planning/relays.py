"""Rows that cross hosts once for each host, and who hands them on there (`docs/kernels/across_ranks.md`).

    first leg     from the rank that holds a row    to every rank of its host that needs it,
                                                    and to one rank of each other host that needs it
    second leg    from that rank                    to the others of its host that need it

Rows that the same ranks of a host need are dealt to these in equal parts, of `LEAST_PART` rows or more. Where one would
receive more from other hosts than its host does in the mean, and more than any rank sends, others of the host receive
the rest for it. What a rank receives for others alone lies behind the rows of its buffer (**staged** rows). But for
these every rank receives the rows that it needs, once, as without relays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.planning.ranges import expand, pick

#: Fewer rows are not worth a range of their own.
LEAST_PART = 32


class MovingRows(NamedTuple):
    """Key rows on their way between ranks, one entry for each stage and range of rows; int64 `[num]`.

    Ranges between two ranks are in one order wherever they are listed.
    """

    stage: Tensor
    buffer_row: Tensor  # of the receiver, where the row `lo` goes
    receiver: Tensor
    lo: Tensor  # rows of the sequence
    hi: Tensor
    sender: Tensor  # may be the receiver itself
    source_row: Tensor  # where the sender has the row `lo`: at home, in a second leg in its buffer

    @property
    def rows(self) -> Tensor:
        return self.hi - self.lo

    def take(self, index: Tensor) -> MovingRows:
        """Those of an int64 index, or of a mask."""
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        return MovingRows(*(pick(x, index) for x in self))

    def part(self, index: Tensor, lo: Tensor, hi: Tensor) -> MovingRows:
        """The rows `[lo, hi)` of the ranges `index`."""
        found = self.take(index)
        step = lo - found.lo
        return found._replace(
            buffer_row=found.buffer_row + step, source_row=found.source_row + step, lo=lo, hi=hi
        )

    def then(self, other: MovingRows) -> MovingRows:
        """These, and the others behind them."""
        return MovingRows(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


class Relays(NamedTuple):
    """The rows that cross hosts, of all ranks. A segment are neighbouring rows that the same ranks of a host need."""

    far: MovingRows  # the ranges that ranks need of other hosts
    parts: MovingRows  # of these, those that cross: one for each part of a segment, to the rank that hands it on
    is_staged: Tensor  # bool `[num_parts]`, that rank does not need it itself
    segment: Tensor  # int64 `[num_parts]`, that of each, ascending
    need: Tensor  # int64 `[num_pairs]`, for all segments one after the other the ranges of `far` that contain it
    first: Tensor  # int64 `[num_segments]`, where those of each begin
    num_ranks: Tensor  # int64 `[num_segments]`, and how many they are

    @staticmethod
    def of(far: MovingRows, host: Tensor, room: Tensor) -> Relays:
        """The relays for every range that a rank needs of another host, by stages and receivers; those of one receiver
        and stage are disjoint. `host`, int64 `[cp_size]`, is that of each rank; `room`, int64 `[num_stages, cp_size]`,
        rows of each rank's buffer, behind which staged rows lie."""
        num_hosts = int(host.max()) + 1
        span = int(far.hi.max()) + 1 if len(far.hi) else 1
        # Every host and stage has a line of its own.
        line = (far.stage * num_hosts + pick(host, far.receiver)) * span
        points = torch.cat([line + far.lo, line + far.hi]).unique()
        begin, end = (torch.searchsorted(points, line + x) for x in (far.lo, far.hi))
        need, step = expand(end - begin)
        place = pick(begin, need) + step
        order = place.argsort(stable=True)
        need, place = pick(need, order), pick(place, order)
        place, count = torch.unique_consecutive(place, return_counts=True)
        first = count.cumsum(0) - count
        length = pick(points, place + 1) - pick(points, place)
        num_parts = length.div(LEAST_PART, rounding_mode="floor").clamp(min=1).minimum(count)
        # In turn, so that segments of one part are dealt evenly too.
        turn = num_parts.cumsum(0) - num_parts
        segment, number = expand(num_parts)
        giver = (pick(turn, segment) + number).remainder(pick(count, segment))
        giver = pick(far.receiver, pick(need, pick(first, segment) + giver))
        begin = points[place] - pick(line, pick(need, first))
        lo, hi = (
            pick(begin, segment)
            + (pick(length, segment) * at).div(pick(num_parts, segment), rounding_mode="floor")
            for at in (number, number + 1)
        )
        parts = far.part(pick(need, pick(first, segment)), lo, hi)
        giver = _relieved(parts._replace(receiver=giver), host)
        # As the giver needs it, if it does; otherwise as whoever does, and staged.
        cp_size = host.shape[0]
        of_segment = torch.arange(len(count), device="cpu").repeat_interleave(count)
        pairs = of_segment * cp_size + pick(far.receiver, need)
        wanted = segment * cp_size + giver
        at = torch.searchsorted(pairs, wanted).clamp(max=max(len(pairs) - 1, 0))
        is_staged = pick(pairs, at) != wanted
        at = torch.where(is_staged, pick(first, segment), at)
        parts = far.part(pick(need, at), lo, hi)
        line = parts.stage * cp_size + giver
        behind = pick(room.flatten(), line) + _before(line, parts.rows * is_staged)
        buffer_row = torch.where(is_staged, behind, parts.buffer_row)
        parts = parts._replace(receiver=giver, buffer_row=buffer_row)
        return Relays(far, parts, is_staged, segment, need, first, count)

    def second_leg(self, rank: int) -> tuple[MovingRows, MovingRows]:
        """The rows that others hand on to `rank`, and those that it hands on itself."""
        is_mine = pick(self.far.receiver, self.need) == rank
        # The parts of a segment, for those that `rank` needs; the ranks of a segment, for the parts that `rank` has.
        num_parts = torch.bincount(self.segment, minlength=len(self.num_ranks))
        first_part = num_parts.cumsum(0) - num_parts
        segment = torch.arange(len(self.num_ranks), device="cpu").repeat_interleave(self.num_ranks)
        pair = is_mine.nonzero().flatten()
        of_pair, step = expand(pick(num_parts, pick(segment, pair)))
        pair = pick(pair, of_pair)
        to_me = self._handed_on(pick(first_part, pick(segment, pair)) + step, pair)
        part = (self.parts.receiver == rank).nonzero().flatten()
        of_part, step = expand(pick(self.num_ranks, pick(self.segment, part)))
        part = pick(part, of_part)
        from_me = self._handed_on(part, pick(self.first, pick(self.segment, part)) + step)
        return to_me, from_me

    def _handed_on(self, part: Tensor, pair: Tensor) -> MovingRows:
        """Each of `part` on its way to the receiver of each of `pair`, if that is another."""
        has = self.parts.take(part)
        moving = self.far.part(pick(self.need, pair), has.lo, has.hi)
        moving = moving._replace(sender=has.receiver, source_row=has.buffer_row)
        return moving.take(moving.sender != moving.receiver)

    def handed_on(self, cp_size: int) -> tuple[Tensor, Tensor]:
        """The rows that each rank receives and sends in the second leg, int64 `[cp_size]` each."""
        zeros = torch.zeros(cp_size, dtype=torch.int64, device="cpu")
        parts, is_kept = self.parts, ~self.is_staged
        received = zeros.index_add(0, self.far.receiver, self.far.rows)
        received.index_add_(0, parts.receiver, parts.rows * is_kept, alpha=-1)
        others = pick(self.num_ranks, self.segment) - is_kept.long()
        return received, zeros.index_add(0, parts.receiver, parts.rows * others)


def _before(line: Tensor, rows: Tensor) -> Tensor:
    """The sum of `rows` of earlier entries in the same line; int64 `[num]`, like both."""
    order = line.argsort(stable=True)
    in_order, ordered = pick(line, order), pick(rows, order)
    before = ordered.cumsum(0) - ordered
    first = _first_of_line(in_order)
    found = torch.empty_like(rows)
    found[order] = before - pick(before, first)
    return found


def _first_of_line(line: Tensor) -> Tensor:
    """The number of the first entry of each one's line, where those of a line are neighbours; int64 `[num]`."""
    is_new = torch.ones_like(line, dtype=torch.bool)
    is_new[1:] = line[1:] != line[:-1]
    return pick(is_new.nonzero().flatten(), is_new.cumsum(0) - 1)


def _relieved(parts: MovingRows, host: Tensor) -> Tensor:
    """The receivers of parts that cross hosts, int64 `[num_parts]`: those of `parts`, but for what they would receive
    beyond their share, which goes to others of their host."""
    cp_size, num_hosts = host.shape[0], int(host.max()) + 1
    rows, receiver, stage = parts.rows, parts.receiver, parts.stage
    num_stages = int(stage.max()) + 1 if len(stage) else 0
    zeros = rows.new_zeros(num_stages, cp_size)
    flat = zeros.flatten()
    sent = flat.index_add(0, stage * cp_size + parts.sender, rows).view(num_stages, cp_size)
    received = flat.index_add(0, stage * cp_size + receiver, rows).view(num_stages, cp_size)
    of_host = rows.new_zeros(num_stages, num_hosts).index_add_(1, host, received)
    mean = -(-of_host // torch.bincount(host, minlength=num_hosts))
    share = torch.maximum(mean, sent.amax(1, keepdim=True))[:, host].flatten()
    line = stage * cp_size + receiver
    before = _before(line, rows)
    is_beyond = (before + rows > pick(share, line)) & (before > 0)
    kept = flat.index_add(0, line, rows * ~is_beyond)
    # The room that is left, host by host, filled from the front.
    by_host = host.argsort(stable=True)
    left = (share - kept).clamp(min=0).view(num_stages, cp_size)[:, by_host].flatten()
    end = left.cumsum(0)
    stages = torch.arange(num_stages, device="cpu")[:, None]
    line_of_rank = (stages * num_hosts + host[by_host]).flatten()
    first = _first_of_line(line_of_rank)
    begin_of_line = rows.new_zeros(num_stages * num_hosts)
    begin_of_line[line_of_rank] = pick(end - left, first)
    beyond = is_beyond.nonzero().flatten()
    line = pick(stage * num_hosts + pick(host, receiver), beyond)
    place = pick(begin_of_line, line) + _before(line, pick(rows, beyond))
    taker = torch.searchsorted(end, place, right=True).remainder(cp_size)
    return receiver.index_copy(0, beyond, pick(by_host, taker))
