"""Group collectives over one all-to-all: gather rows, exchange, scatter rows. Works on every backend.

Rows that stay on their rank take no part in the exchange. On GPUs the exchange runs on a stream of its own. Its kernels
need SMs on all ranks at a time, and an attention kernel that has taken all SMs gives none back before it ends, so they
go first: the current stream goes on once that stream has reached them, and that stream has priority. Both are ready at
the same moment then, and if attention is there first on one rank, all ranks wait for it: so a short kernel leaves `SMS`
free.

NCCL registers the buffers of an exchange that a CUDA graph captures, so that ranks write into them. In expandable
segments it registers other memory than theirs, and a replay computes with rows that have not arrived, or hangs: that is
refused.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.transport import rows
from magi_compile.dtensor.transport.collectives import (
    PendingCast,
    PendingReduce,
    Route,
    derived,
    refuse_to_be_recorded,
)

SMS = 32  # fastest with 16 of 0, 16, 32 and 48 on four H200s, whose exchange is 25 thread blocks


class AllToAll:
    """The implementation that always works."""

    name = "all_to_all"

    def refusals(self, group: dist.ProcessGroup, device: torch.device) -> list[str]:
        return []

    def casts(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
    ) -> Iterator[PendingCast]:
        return (_Cast(tensors, route.derive(Order, group.rank()), group) for route in routes)

    def outbox(
        self, like: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> list[Tensor]:
        return [x.new_empty(route.num_received, *x.shape[1:]) for x in like]

    def start_reduce(
        self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> PendingReduce:
        return _Reduce(tensors, route.derive(Order, group.rank()), group)

    def release(self, group: dist.ProcessGroup) -> None:
        """Nothing: what waits are kernels of the backend, which only it can end."""


class LocalRows:
    """The local rows of the ranges of a route, int32: those that have another rank as their peer, in the order of
    ranks, and those that have `rank` itself. The host says which ranges are which; `counts` are the rows by peer."""

    def __init__(self, ranges: Tensor, host_ranges: Tensor, counts: list[int], rank: int):
        self.device, self.num_own = ranges.device, counts[rank]
        self.counts = [0 if peer == rank else count for peer, count in enumerate(counts)]
        self._ranges, self.host_ranges = ranges, host_ranges.tolist()
        peers = [peer for peer, *_ in self.host_ranges]
        self._own = slice(bisect_left(peers, rank), bisect_right(peers, rank))

    def host_ranges_of_others(self) -> list[list[int]]:
        return self.host_ranges[: self._own.start] + self.host_ranges[self._own.stop :]

    @derived
    def travelling(self) -> Tensor:
        ranges, own = self._ranges, self._own
        if self.num_own:
            ranges = torch.cat([ranges[: own.start], ranges[own.stop :]])
        return rows.rows_of(ranges[:, 1], ranges[:, 3], sum(self.counts))

    @derived
    def staying(self) -> Tensor:
        ranges = self._ranges[self._own]
        if not self.num_own:
            return ranges[:0, 1]
        return rows.rows_of(ranges[:, 1], ranges[:, 3], self.num_own)


class Order:
    """A route row by row. Tables on the device are made when a cast or a reduce asks for them first."""

    def __init__(self, route: Route, rank: int):
        self.sends = LocalRows(route.sends, route.host_sends, route.send_counts, rank)
        self.recvs = LocalRows(route.recvs, route.host_recvs, route.recv_counts, rank)
        self.num_received = route.num_received
        self._order = rows.order_of_sums(rank, route.hosts)
        self._sums: dict[int, rows.Sums] = {}

    @cached_property
    def arrives_in_place(self) -> bool:
        """Rows arrive in the order in which they lie in the buffer, and none stay."""
        begin = 0
        for _, row, _, count in self.recvs.host_ranges:
            if row != begin:
                return False
            begin += count
        return not self.recvs.num_own

    def sums(self, num_rows: int) -> rows.Sums:
        if num_rows not in self._sums:
            sends, recvs = self.sends, self.recvs
            refuse_to_be_recorded(sends)
            own = (sends.staying, recvs.staying, self._order)
            with _compat.outside_of_modes():
                sums = rows.Sums(sends.travelling, num_rows, sends.counts, *own)
            self._sums[num_rows] = sums
        return self._sums[num_rows]


class _Cast:
    sms = SMS

    def __init__(self, tensors: Sequence[Tensor], order: Order, group: dist.ProcessGroup):
        packed = rows.gather(tensors, order.sends.travelling)
        self._exchange = Exchange(packed, order.sends.counts, order.recvs.counts, group)
        self._parts = rows.split(self._exchange.arriving, [x[:0] for x in tensors])
        # Made on the stream of the call, while rows travel: whoever waits may be on another one.
        self._places = None if order.arrives_in_place else order.recvs.travelling
        if self._places is None:
            self.buffers = self._parts
        else:
            self.buffers = [x.new_empty(order.num_received, *x.shape[1:]) for x in tensors]
            rows.move(tensors, order.sends.staying, self.buffers, order.recvs.staying)

    def wait(self) -> list[Tensor]:
        self._exchange.wait()
        if self._places is not None:
            rows.move(self._parts, None, self.buffers, self._places)
        return self.buffers


class _Reduce:
    def __init__(self, tensors: Sequence[Tensor], order: Order, group: dist.ProcessGroup):
        self._tensors, self._order = tensors, order
        packed = rows.gather(tensors, order.recvs.travelling)
        self._exchange = Exchange(packed, order.recvs.counts, order.sends.counts, group)

    def write_sums(self, outs: Sequence[Tensor], prior: Sequence[Tensor] | None = None) -> None:
        sums = self._order.sums(len(outs[0]))  # made while rows travel
        arrived = rows.split(self._exchange.wait(), self._tensors)
        sums.write(outs, prior, self._tensors, arrived)


class _SideStream:
    """The stream of a group's exchanges on a GPU, and those of them that nobody has waited for."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.pending: WeakSet[Exchange] = WeakSet()  # without those that an error has dropped


_side_streams: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _SideStream]] = (
    WeakKeyDictionary()
)


def _side_stream(group: dist.ProcessGroup, device: torch.device) -> _SideStream:
    made = _side_streams.setdefault(group, {})
    if device not in made:
        made[device] = _SideStream(device)
    return made[device]


def _refuse_expandable_segments(*buffers: Tensor) -> None:
    """Under capture; see the module's docstring."""
    if not torch.cuda.is_current_stream_capturing() or os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return
    if torch.cuda.get_allocator_backend() == "native" and _are_expandable(buffers):
        raise RuntimeError(
            "`collective` moves rows by NCCL and a CUDA graph captures it in expandable segments, where NCCL's "
            "registration of graph buffers exchanges the wrong memory; set NCCL_GRAPH_REGISTER=0 in the environment "
            "of every rank, or remove expandable_segments:True from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )


def _are_expandable(buffers: Sequence[Tensor]) -> bool:
    """True if the memory of one of them is in an expandable segment."""
    addresses = [x.data_ptr() for x in buffers]
    return any(
        segment["is_expandable"] and 0 <= address - segment["address"] < segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        for address in addresses
    )


class Exchange:
    """An all-to-all of rows `[num, width]` under way; keeps both buffers alive, and is kept until `wait` returns.
    `arriving` is the room for what comes, if there is one already."""

    def __init__(
        self,
        packed: Tensor,
        send: list[int],
        recv: list[int],
        group: dist.ProcessGroup,
        arriving: Tensor | None = None,
    ) -> None:
        self._sent = packed
        if arriving is None:
            arriving = packed.new_empty(sum(recv), packed.shape[1])
        self.arriving = arriving
        # As bytes, because backends differ in the dtypes they know.
        outgoing, incoming = (x.view(torch.uint8) for x in (packed, self.arriving))
        if not packed.is_cuda:
            self._work = dist.all_to_all_single(
                incoming, outgoing, recv, send, group, async_op=True
            )
            return
        _refuse_expandable_segments(packed, self.arriving)
        self._side = _side_stream(group, packed.device)
        current, stream = _compat.current_stream(packed.device), self._side.stream
        stream.wait_stream(current)
        reached = stream.record_event()
        with _compat.on_stream(stream):
            dist.all_to_all_single(incoming, outgoing, recv, send, group)
        self._done = stream.record_event()
        # Behind another exchange it cannot go first, and that one is not to be waited for.
        if not self._side.pending:
            current.wait_event(reached)
        self._side.pending.add(self)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that it is on, for tensors on a GPU."""
        return self._side.stream

    def wait(self) -> Tensor:
        if self.arriving.is_cuda:
            _compat.current_stream(self.arriving.device).wait_event(self._done)
            self._side.pending.discard(self)
        else:
            self._work.wait()
        return self.arriving
