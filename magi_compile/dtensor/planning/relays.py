"""Rows that cross hosts once for each host, and who hands them on there.

Links between hosts are slow, those inside of a host (or of a rack, if its links are as fast) are not. Where several
ranks of a host need a row of another host in one stage, it is sent to one of them, and that one hands it on:

    first leg     from the rank that holds a row    to every rank of its host that needs it,
                                                    and to one rank of each other host that needs it
    second leg    from that rank                    to the others of its host that need it

So every rank receives each row that it needs once, as without relays; only the sender of some is another. Rows that the
same ranks of a host need are dealt to these in equal parts, of `LEAST_PART` rows or more.
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
    """The rows that cross hosts, of all ranks.

    A segment are neighbouring rows that the same ranks of a host need.

    Attributes:
        far: the ranges that ranks need of other hosts.
        parts: of these, those that cross: one for each part of a segment, to the rank that hands it on.
        segment: int64 `[num_parts]`, that of each, ascending.
        need: int64 `[num_pairs]`, for all segments one after the other the ranges of `far` that contain it.
        first: int64 `[num_segments]`, where those of each begin.
        num_ranks: int64 `[num_segments]`, and how many they are.
    """

    far: MovingRows
    parts: MovingRows
    segment: Tensor
    need: Tensor
    first: Tensor
    num_ranks: Tensor

    @staticmethod
    def of(far: MovingRows, host: Tensor) -> Relays:
        """The relays for ranges `far` that receivers need of other hosts.

        Args:
            far: every range that a rank needs of another host; those of one receiver and stage are disjoint.
            host: int64 `[cp_size]`, that of each rank.

        Returns:
            The relays.
        """
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
        giver = pick(need, pick(first, segment) + giver)
        lo = (pick(points, place) - pick(line, pick(need, first)))[segment]
        length, num_parts = pick(length, segment), pick(num_parts, segment)
        edges = (
            length.mul(at).div(num_parts, rounding_mode="floor") for at in (number, number + 1)
        )
        parts = far.part(giver, *(lo + edge for edge in edges))
        return Relays(far, parts, segment, need, first, count)

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
        has = zeros.index_add(0, self.parts.receiver, self.parts.rows)
        received = zeros.index_add(0, self.far.receiver, self.far.rows) - has
        others = pick(self.num_ranks, self.segment) - 1
        return received, zeros.index_add(0, self.parts.receiver, self.parts.rows * others)
