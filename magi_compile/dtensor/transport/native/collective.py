"""The native implementation of group collectives, see `collectives.py`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.transport import rows
from magi_compile.dtensor.transport.all_to_all import Order
from magi_compile.dtensor.transport.collectives import Route
from magi_compile.dtensor.transport.native.peers import refusals
from magi_compile.dtensor.transport.native.pulls import SMS, Pulls, Targets
from magi_compile.dtensor.transport.native.window import Slot, Window, round_up

PART_ALIGNMENT = 256  # of what lies in a slot, in bytes


class NativeCollective:
    """Rows are read from their owner's memory, by "copy_engine" or "sms", or by the faster one for each route. For GPUs
    of one host that reach each other's memory.

    Home rows are as many on every rank. Buffers of all casts of one call are allocated together.
    """

    name = "native"

    def __init__(self, engine: str | None = None):
        self._engine = engine
        self._windows: WeakKeyDictionary[dist.ProcessGroup, dict[str, Window]] = WeakKeyDictionary()

    def refusals(self, group: dist.ProcessGroup, device: torch.device) -> list[str]:
        return refusals(group, device, self)

    def casts(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
    ) -> Iterator[_WindowCast]:
        if not routes:
            return
        first, widths = tensors[0], rows.widths(tensors)
        window = self._window("casts", group, first.device)
        current = _compat.current_stream(first.device)
        slot = _publish(window, tensors, widths, current)
        orders = [route.derive(_CastOrder, group.rank(), group.size()) for route in routes]
        received = [route.num_received for route in routes]
        packed = first.new_empty(sum(received), sum(widths))
        row_bytes = packed.shape[1] * packed.element_size()
        # What a plan's first use makes is made before ranks meet: it may fail, and takes the GPU a while.
        engines = []
        for order in orders:
            engines.append(order.pulls.engine(row_bytes, self._engine, window.stream))
            if order.sends.num_own:
                _ = order.sends.staying, order.recvs.staying
        met = window.meet(slot, current)
        parts = torch.split_with_sizes(packed, received)
        for order, engine, part in zip(orders, engines, parts, strict=True):
            _pull(order.pulls, slot, [(0, part)], engine, window.stream, met)
            done = window.end()
            buffers = rows.split(part, tensors, widths)
            if order.sends.num_own:
                rows.move(tensors, order.sends.staying, buffers, order.recvs.staying)
            yield _WindowCast(buffers, window, done)

    def outbox(
        self, like: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> list[Tensor]:
        room = route.derive(_ReduceOrder, group.rank(), group.size()).room(like)
        window = self._window("reduces", group, like[0].device)
        current = _compat.current_stream(like[0].device)
        return room.in_slot(window.next_slot(room.num_bytes, current))

    def start_reduce(
        self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> _WindowReduce:
        order = route.derive(_ReduceOrder, group.rank(), group.size())
        room = order.room(tensors)
        window = self._window("reduces", group, tensors[0].device)
        current = _compat.current_stream(tensors[0].device)
        slot = window.next_slot(room.num_bytes, current)
        for x, part in zip(tensors, room.in_slot(slot), strict=True):
            if x is not part:
                part.copy_(x)
        num_rows = order.pulls.num_rows
        arrived = [
            x.new_empty(num_rows, width) for x, width in zip(tensors, room.widths, strict=True)
        ]
        row_bytes = 0
        for x in arrived:
            row_bytes += x.shape[1] * x.element_size()
        engine = order.pulls.engine(row_bytes // len(arrived), self._engine, window.stream)
        met = window.meet(slot, current)
        targets = [*zip(room.offsets, arrived, strict=True)]
        _pull(order.pulls, slot, targets, engine, window.stream, met)
        return _WindowReduce(tensors, arrived, order, window, window.end())

    def release(self, group: dist.ProcessGroup) -> None:
        # Not of other groups: flags that nobody awaits now would let their next uses begin early.
        for window in list(self._windows.get(group, {}).values()):
            window.release()

    def _window(self, purpose: str, group: dist.ProcessGroup, device: torch.device) -> Window:
        windows = self._windows.get(group)
        if windows is None:
            windows = self._windows[group] = {}
        if purpose not in windows:
            windows[purpose] = Window(group, device)
        return windows[purpose]


def _pull(
    pulls: Pulls,
    slot: Slot,
    targets: Targets,
    engine: str,
    stream: torch.cuda.Stream,
    met: torch.cuda.Event,
) -> None:
    pulls.enqueue(slot, targets, engine, stream)
    if engine == SMS:
        # Both are ready from here on, and `stream` has priority. Attention that came first would take all SMs and keep
        # these few out until it ends.
        _compat.current_stream(slot.memory.device).wait_event(met)


class _WindowCast:
    sms = 0  # copy engines need none, and attention waits for what does, see `_pull`

    def __init__(self, buffers: list[Tensor], window: Window, done: torch.cuda.Event):
        self.buffers, self._window, self._done = buffers, window, done

    def wait(self) -> list[Tensor]:
        self._window.wait(self._done, _compat.current_stream(self.buffers[0].device))
        return self.buffers


class _WindowReduce:
    def __init__(
        self,
        tensors: Sequence[Tensor],
        arrived: Sequence[Tensor],
        order: _ReduceOrder,
        window: Window,
        done: torch.cuda.Event,
    ):
        self._tensors, self._arrived, self._order = tensors, arrived, order
        self._window, self._done = window, done

    def write_sums(self, outs: Sequence[Tensor], prior: Sequence[Tensor] | None = None) -> None:
        sums = self._order.sums(len(outs[0]))  # made while rows travel
        self._window.wait(self._done, _compat.current_stream(outs[0].device))
        sums.write(outs, prior, self._tensors, self._arrived)


def _publish(
    window: Window, tensors: Sequence[Tensor], widths: list[int], current: torch.cuda.Stream
) -> Slot:
    """The next slot, with the rows of all tensors side by side."""
    first, shape = tensors[0], (tensors[0].shape[0], sum(widths))
    slot = window.next_slot(shape[0] * shape[1] * first.element_size(), current)
    rows = slot.view(0, shape, first.dtype)
    if all(x[:1].is_contiguous() for x in tensors):
        torch.cat([x.flatten(1) for x in tensors], 1, out=rows)
    else:  # which would copy a tensor whose heads lie apart first
        for x, part in zip(tensors, rows.split(widths, 1), strict=True):
            part.unflatten(1, x.shape[1:]).copy_(x)
    return slot


class _Room(NamedTuple):
    """The room of a reduce in a slot."""

    offsets: list[int]  # where its tensors begin, in bytes, the same on all ranks
    num_bytes: int  # of all of them
    shapes: list[tuple[int, ...]]  # theirs, `[num_received, ...]`
    dtypes: list[torch.dtype]
    widths: list[int]  # values of a row

    @classmethod
    def of(cls, like: Sequence[Tensor], num_received: int, peak_received: int) -> _Room:
        """That of tensors whose rows are those of `like`, on a rank that receives so many, of which none receives more
        than `peak_received`."""
        ends, widths = [0], rows.widths(like)
        for x, width in zip(like, widths, strict=True):
            num_bytes = peak_received * width * x.element_size()
            ends.append(round_up(ends[-1] + num_bytes, PART_ALIGNMENT))
        shapes = [(num_received, *x.shape[1:]) for x in like]
        return cls(ends[:-1], ends[-1], shapes, [x.dtype for x in like], widths)

    def in_slot(self, slot: Slot) -> list[Tensor]:
        """Its tensors."""
        return [*map(slot.view, self.offsets, self.shapes, self.dtypes)]


class _CastOrder(Order):
    """The rows that a rank reads in a cast, and the rows that it has itself."""

    def __init__(self, route: Route, rank: int, size: int):
        super().__init__(route, rank)
        self.pulls = Pulls(self.recvs.host_ranges_of_others(), rank, size, route.recvs.device)


class _ReduceOrder(Order):
    """The rows that a rank reads in a reduce, in the order of peers, their sums, and the rows that it has itself."""

    def __init__(self, route: Route, rank: int, size: int):
        super().__init__(route, rank)
        reads, row = [], 0
        for peer, _, peer_row, count in self.sends.host_ranges_of_others():
            reads.append((peer, row, peer_row, count))
            row += count
        self.pulls = Pulls(reads, rank, size, route.sends.device)
        self._received = route.num_received, route.peak_received
        self._rooms: dict[Hashable, _Room] = {}

    def room(self, like: Sequence[Tensor]) -> _Room:
        """The room of tensors whose rows are those of `like`."""
        kind = tuple([(x.shape[1:], x.dtype) for x in like])
        if kind not in self._rooms:
            self._rooms[kind] = _Room.of(like, *self._received)
        return self._rooms[kind]
