"""Group collectives over one all-to-all: gather rows, exchange, scatter rows. Works on every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor import rows
from magi_compile.dtensor.collectives import Route

# NCCL's kernel and the attention kernel that is launched next become ready together, once rows are packed. Attention
# would take all SMs and keep NCCL out until it ends; given about ten microseconds, NCCL takes the few that it needs,
# and attention's remaining thread blocks follow when it is done.
HEAD_START_CYCLES = 20_000


class AllToAll:
    """The implementation that always works."""

    name = "all_to_all"

    def refusals(self, group: dist.ProcessGroup, device: torch.device) -> list[str]:
        return []

    def casts(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
    ) -> Iterator[_Cast]:
        return (_Cast(tensors, route, group) for route in routes)

    def start_reduce(
        self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> _Reduce:
        return _Reduce(tensors, route, group)


class _Cast:
    def __init__(self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup):
        self._order = _order_of(route)
        self._like = [x[:0] for x in tensors]
        packed = rows.gather(tensors, self._order.send_rows)
        self._exchange = Exchange(packed, route.send_counts, route.recv_counts, group)

    def wait(self) -> list[Tensor]:
        packed = self._exchange.wait()
        if self._order.arrives_in_place:
            return rows.split(packed, self._like)
        return rows.scatter(packed, self._order.recv_rows, self._like)


class _Reduce:
    def __init__(self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup):
        self._route = route
        packed = rows.gather(tensors, _order_of(route).recv_rows)
        self._exchange = Exchange(packed, route.recv_counts, route.send_counts, group)

    def add_to(self, totals: Sequence[Tensor]) -> None:
        _sums_of(self._route, totals[0].shape[0]).add_to(totals, self._exchange.wait())


class Exchange:
    """An all-to-all of rows `[num, width]` under way; keeps both buffers alive."""

    def __init__(
        self, packed: Tensor, send: list[int], recv: list[int], group: dist.ProcessGroup
    ) -> None:
        self._sent = packed
        self._arrived = packed.new_empty(sum(recv), packed.shape[1])
        # As bytes, because backends differ in the dtypes they know.
        outgoing, incoming = (x.view(torch.uint8) for x in (packed, self._arrived))
        self._work = dist.all_to_all_single(incoming, outgoing, recv, send, group, async_op=True)
        if packed.is_cuda:
            _compat.spin_gpu(HEAD_START_CYCLES)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._arrived


class _Order(NamedTuple):
    """Row by row what a route says in runs."""

    send_rows: Tensor  # int32, home rows ordered by receiver
    recv_rows: Tensor  # int32, buffer rows ordered by sender
    arrives_in_place: bool  # `recv_rows` counts up from 0


def _order_of(route: Route) -> _Order:
    if AllToAll not in route.derived:
        first, count = route.host_recvs[:, 1], route.host_recvs[:, 3]
        route.derived[AllToAll] = _Order(
            rows.rows_of(route.sends[:, 1], route.sends[:, 3], route.num_sent),
            rows.rows_of(route.recvs[:, 1], route.recvs[:, 3], route.num_received),
            torch.equal(first, count.cumsum(0, dtype=first.dtype) - count),
        )
    return route.derived[AllToAll]


def _sums_of(route: Route, num_rows: int) -> rows.Sums:
    key = AllToAll, num_rows
    if key not in route.derived:
        route.derived[key] = rows.Sums(_order_of(route).send_rows, num_rows, route.send_counts)
    return route.derived[key]
