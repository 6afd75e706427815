"""The native implementation of group collectives, see `collectives.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor import rows
from magi_compile.dtensor.all_to_all import HEAD_START_CYCLES
from magi_compile.dtensor.collectives import Route
from magi_compile.dtensor.native.peers import refusals
from magi_compile.dtensor.native.pulls import SMS, Pulls
from magi_compile.dtensor.native.window import Slot, Window


class NativeCollective:
    """Rows are read from their owner's memory. For GPUs of one host that reach each other's memory.

    Home rows are as many on every rank. Buffers of all casts of one call are allocated together.

    Args:
        engine: how rows are read, "copy_engine" or "sms"; None takes the faster one for each route.
    """

    name = "native"

    def __init__(self, engine: str | None = None):
        self._engine = engine
        self._windows: WeakKeyDictionary[dist.ProcessGroup, dict[str, Window]] = WeakKeyDictionary()

    def refusals(self, group: dist.ProcessGroup, device: torch.device) -> list[str]:
        return refusals(group, device, self)

    def casts(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
    ) -> Iterator[_Cast]:
        if not routes:
            return
        window = self._window("casts", group, tensors[0].device)
        current = torch.cuda.current_stream(tensors[0].device)
        slot = _fill(window, tensors, tensors[0].shape[0], current)
        received = [route.num_received for route in routes]
        packed = tensors[0].new_empty(sum(received), sum(rows.widths(tensors)))
        pulls_of = [_pulls_of_cast(route, group) for route in routes]
        published = _publish(slot, current, window.stream)
        like = [x[:0] for x in tensors]
        for index, (pulls, part) in enumerate(zip(pulls_of, packed.split(received), strict=True)):
            self._pull(pulls, slot, part, window.stream, published)
            if index == len(routes) - 1:
                slot.release(window.stream)
            yield _Cast(rows.split(part, like), window.stream.record_event())

    def start_reduce(
        self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> _Reduce:
        window = self._window("reduces", group, tensors[0].device)
        current = torch.cuda.current_stream(tensors[0].device)
        slot = _fill(window, tensors, route.peak_received, current)
        arrived = tensors[0].new_empty(route.num_sent, sum(rows.widths(tensors)))
        pulls = _pulls_of_reduce(route, group)
        published = _publish(slot, current, window.stream)
        self._pull(pulls, slot, arrived, window.stream, published)
        slot.release(window.stream)
        return _Reduce(route, arrived, window.stream.record_event())

    def _window(self, purpose: str, group: dist.ProcessGroup, device: torch.device) -> Window:
        windows = self._windows.setdefault(group, {})
        if purpose not in windows:
            windows[purpose] = Window(group, device)
        return windows[purpose]

    def _pull(
        self,
        pulls: Pulls,
        slot: Slot,
        target: Tensor,
        stream: torch.cuda.Stream,
        published: torch.cuda.Event,
    ) -> None:
        engine = self._engine or pulls.engine(target.shape[1] * target.element_size())
        pulls.enqueue(slot, target, engine, stream)
        if engine == SMS:
            # Attention that comes next would take all SMs and keep these few waiting until it ends.
            torch.cuda.current_stream().wait_event(published)
            _compat.spin_gpu(HEAD_START_CYCLES)


class _Cast:
    def __init__(self, buffers: list[Tensor], done: torch.cuda.Event):
        self._buffers, self._done = buffers, done

    def wait(self) -> list[Tensor]:
        torch.cuda.current_stream().wait_event(self._done)
        return self._buffers


class _Reduce:
    def __init__(self, route: Route, arrived: Tensor, done: torch.cuda.Event):
        self._route, self._arrived, self._done = route, arrived, done

    def add_to(self, totals: Sequence[Tensor]) -> None:
        torch.cuda.current_stream().wait_event(self._done)
        _sums_of(self._route, totals[0].shape[0]).add_to(totals, self._arrived)


def _fill(
    window: Window, tensors: Sequence[Tensor], num_rows: int, current: torch.cuda.Stream
) -> Slot:
    """The next slot, of `num_rows` rows, with the rows of all tensors side by side."""
    first, width = tensors[0], sum(rows.widths(tensors))
    slot = window.next_slot(num_rows * width * first.element_size())
    slot.acquire(current)
    num_bytes = first.shape[0] * width * first.element_size()
    packed = slot.memory[:num_bytes].view(first.dtype).view(first.shape[0], width)
    torch.cat([x.flatten(1) for x in tensors], 1, out=packed)
    return slot


def _publish(slot: Slot, current: torch.cuda.Stream, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Lets `stream` read the slots of all ranks, once what `current` holds is done everywhere."""
    stream.wait_stream(current)
    slot.publish(stream)
    return stream.record_event()


def _pulls_of_cast(route: Route, group: dist.ProcessGroup) -> Pulls:
    if "casts" not in route.derived:
        route.derived["casts"] = Pulls(route.recvs, route.host_recvs, group.rank(), group.size())
    return route.derived["casts"]


def _pulls_of_reduce(route: Route, group: dist.ProcessGroup) -> Pulls:
    """What comes home is read in the order of peers, one run after another."""
    if "reduces" not in route.derived:
        tables = _in_order_of_arrival(route.sends), _in_order_of_arrival(route.host_sends)
        route.derived["reduces"] = Pulls(*tables, group.rank(), group.size())
    return route.derived["reduces"]


def _in_order_of_arrival(sends: Tensor) -> Tensor:
    """`sends` of a route with the rows of a buffer that holds one run after another."""
    peer, _, peer_row, count = sends.unbind(1)
    row = count.cumsum(0, dtype=count.dtype) - count
    return torch.stack([peer, row, peer_row, count], 1)


def _sums_of(route: Route, num_rows: int) -> rows.Sums:
    key = "sums", num_rows
    if key not in route.derived:
        home = rows.rows_of(route.sends[:, 1], route.sends[:, 3], route.num_sent)
        route.derived[key] = rows.Sums(home, num_rows, route.send_counts)
    return route.derived[key]
