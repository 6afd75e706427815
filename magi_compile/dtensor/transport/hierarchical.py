"""Group collectives over two all-to-alls: rows cross hosts once for each host, and are handed on there.

    cast      rows go to the ranks of the own host that need them, and to one rank of each other host | that hands on
    reduce    ranks of a host send their partial results to the one that handed rows on, which adds them up | home

Both exchanges are all-to-alls of the whole group in which most pairs have nothing to say, so no other communicators are
needed. On GPUs the second follows the first on the side stream, with a kernel in between that packs what it sends, and
nothing waits for the host. Sums have the order and the bits of those of `all_to_all` (`collectives.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.transport import rows
from magi_compile.dtensor.transport.all_to_all import SMS, AllToAll, Exchange, Order
from magi_compile.dtensor.transport.collectives import PendingCast, PendingReduce, Route


class Hierarchical(AllToAll):
    """The implementation for routes that have legs."""

    name = "hierarchical"

    def casts(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
    ) -> Iterator[PendingCast]:
        return (_RelayedCast(tensors, route.derive(_Legs, group.rank()), group) for route in routes)

    def start_reduce(
        self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> PendingReduce:
        return _RelayedReduce(tensors, route.derive(_Legs, group.rank()), group)


class _Legs:
    """Both legs of a route row by row, int32."""

    def __init__(self, route: Route, rank: int):
        assert route.legs is not None
        assert route.hosts is not None
        self.first, self.second = (leg.derive(Order, rank) for leg in route.legs)
        self.num_received = route.num_received
        arriving = self.first.recvs.travelling
        number = torch.arange(len(arriving), dtype=torch.int32, device=arriving.device)
        # Staged rows follow those of the buffer, and are not more than all that arrive.
        place = arriving.new_full((self.num_received + len(arriving),), -1)
        place[arriving.long()] = number
        # The place of each row of the second leg among those that the first one brings.
        self.relayed = place[self.second.sends.travelling.long()]
        is_staged = arriving >= self.num_received
        # Counted by the host, so that it does not wait. A range may have rows of both kinds.
        peer, row, _, count = route.legs[0].host_recvs.unbind(1)
        in_buffer = (row + count).clamp(max=self.num_received).sub(row).clamp(min=0)
        num_kept = int(in_buffer[peer != rank].sum())
        # Which of the rows that the first leg brings are not staged, and where these go in the buffer.
        self.kept = torch.argsort(is_staged.int(), stable=True)[:num_kept].int()
        self.kept_rows = arriving[self.kept.long()]
        host = [peer for peer, x in enumerate(route.hosts) if x == route.hosts[rank]]
        order = [[rows.OWN if peer == rank else peer for peer in host]]
        # Sent home: its own partial results, and those of its host that it hands on.
        own = (self.kept, self.kept_rows, order)
        self.sums = rows.Sums(self.relayed, len(arriving), self.second.sends.counts, *own)


class _RelayedCast:
    sms = SMS

    def __init__(self, tensors: Sequence[Tensor], legs: _Legs, group: dist.ProcessGroup):
        self._tensors, self._legs = tensors, legs
        first, second = legs.first, legs.second
        self._places = second.recvs.travelling  # made on the stream of the call
        packed = rows.gather(tensors, first.sends.travelling)
        first_leg = Exchange(packed, first.sends.counts, first.recvs.counts, group)
        counts = (second.sends.counts, second.recvs.counts)
        pack = partial(_pack_second_leg, legs, tensors)
        self._second = _Behind(first_leg, pack, packed, *counts, group)
        self.buffers = [x.new_empty(legs.num_received, *x.shape[1:]) for x in tensors]
        rows.move(tensors, first.sends.staying, self.buffers, first.recvs.staying)

    def wait(self) -> list[Tensor]:
        legs, (first, second) = self._legs, self._second.wait()
        rows.move(rows.split(first, self._tensors), legs.kept, self.buffers, legs.kept_rows)
        of_others = rows.split(second, self._tensors)
        rows.move(of_others, None, self.buffers, self._places)
        return self.buffers


class _RelayedReduce:
    def __init__(self, tensors: Sequence[Tensor], legs: _Legs, group: dist.ProcessGroup):
        self._tensors, self._legs = tensors, legs
        first, second = legs.first, legs.second
        packed = rows.gather(tensors, second.recvs.travelling)
        back = Exchange(packed, second.recvs.counts, second.sends.counts, group)
        counts = (first.recvs.counts, first.sends.counts)
        pack = partial(_pack_sums, legs, tensors)
        self._home = _Behind(back, pack, packed, *counts, group)

    def write_sums(self, outs: Sequence[Tensor], prior: Sequence[Tensor] | None = None) -> None:
        sums = self._legs.first.sums(len(outs[0]))  # made while rows travel
        arrived = rows.split(self._home.wait()[1], self._tensors)
        sums.write(outs, prior, self._tensors, arrived)


# Not methods, which would keep what they belong to until Python looks for cycles.


def _pack_second_leg(legs: _Legs, like: Sequence[Tensor], arrived: Tensor, packed: Tensor) -> None:
    sources, targets = (rows.split(x, like) for x in (arrived, packed))
    rows.move(sources, legs.relayed, targets, None)


def _pack_sums(legs: _Legs, tensors: Sequence[Tensor], arrived: Tensor, packed: Tensor) -> None:
    sources, outs = (rows.split(x, tensors) for x in (arrived, packed))
    legs.sums.write(outs, None, tensors, sources)


class _Behind:
    """An exchange of rows that are made of what another one, `first`, brings: `pack` writes what is sent, given that
    and the room for it. Rows are like those of `like`, `[num, width]`."""

    def __init__(
        self,
        first: Exchange,
        pack: Callable[[Tensor, Tensor], None],
        like: Tensor,
        send: list[int],
        recv: list[int],
        group: dist.ProcessGroup,
    ):
        self._first, self._pack = first, pack
        # By the current stream, whose memory they are.
        packed, arriving = (like.new_empty(sum(x), like.shape[1]) for x in (send, recv))
        self._rest = (packed, send, recv, group, arriving)
        self._second: Exchange | None = None
        if like.is_cuda:
            with _compat.on_stream(first.stream):
                self._second = self._start()

    def _start(self) -> Exchange:
        self._pack(self._first.arriving, self._rest[0])
        return Exchange(*self._rest)

    def wait(self) -> tuple[Tensor, Tensor]:
        """The rows that both have brought."""
        arrived = self._first.wait()
        if self._second is None:
            self._second = self._start()
        return arrived, self._second.wait()
