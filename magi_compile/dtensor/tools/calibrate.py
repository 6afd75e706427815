"""Measures the rates of a `CostModel` on the machine at hand, once, with the kernel and the group that will run.

Every rate is the median of a few runs of the real thing, on the slowest rank; all ranks return the same model. On a GPU
it is the device's time, with the host well ahead and the ranks together, as in training: the host's own time for one
call is many times what a small collective takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile.dtensor.planning.cost import DEFAULT_COST, CostModel, check_heads, wave_rows
from magi_compile.dtensor.planning.hosts import check_hosts, hosts_of, launched_hosts
from magi_compile.dtensor.transport.collectives import (
    Collective,
    CollectiveName,
    Route,
    check_collective,
)
from magi_compile.dtensor.transport.collectives import select as select_collective
from magi_compile.kernels.base import AttnProblem, BackwardOutput, ForwardOutput, Grads, Saved
from magi_compile.kernels.merge import sum_partials
from magi_compile.kernels.overlap import EarlyKernel
from magi_compile.kernels.plan import Plan
from magi_compile.kernels.select import problem_of, select
from magi_compile.masks.arguments import check_device
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType
from magi_compile.ops.validation import DTYPES

#: Keys of the attention by which the cost of another forward stage is measured.
FEW_KEYS = 1024


def calibrate(
    group: dist.ProcessGroup,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    nheads_q: int = 64,
    nheads_kv: int = 8,
    head_dim: int = 128,
    seqlen: int = 8192,
    collective: CollectiveName = "auto",
    repeats: int = 5,
    hosts: int | Sequence[int] | None = None,
) -> CostModel:
    """Measures compute and communication; all ranks of `group` call it together.

    Args:
        group: the ranks that will run attention together.
        device: where.
        dtype: of q, k and v.
        nheads_q: query heads.
        nheads_kv: key-value heads.
        head_dim: of q, k and v.
        seqlen: rows of one rank; the larger, the less fixed costs blur the rates.
        collective: how rows move, a name in `collectives.COLLECTIVES`.
        repeats: runs of each measurement.
        hosts: as in `ContextParallelOptions`; rows between hosts are measured apart.

    Returns:
        The model, equal on all ranks.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if a number is less than 1, `nheads_kv` does not divide `nheads_q`, q, k and v cannot have the
            dtype, or `hosts` are not as many as ranks.
        NotImplementedError: if no kernel can run this.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"`group` must be a process group of which this process is a member, got {type(group).__name__}"
        )
    check_heads(nheads_q, nheads_kv, head_dim=head_dim, seqlen=seqlen, repeats=repeats)
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be float32, bfloat16 or float16, got {dtype}")
    check_collective(collective)
    check_hosts(hosts)
    host = hosts_of(hosts, group.size())
    if hosts is None:
        host = launched_hosts(dist.get_process_group_ranks(group))
    device = check_device(device)
    q = torch.randn(seqlen, nheads_q, head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, seqlen, nheads_kv, head_dim, device=device, dtype=dtype)
    attention = _TimedAttention(q, k, v)
    clock = _Clock(group, device, repeats, attention.forward)
    forward, backward = clock.seconds(attention.forward), clock.seconds(attention.backward)
    stage, backward_stage = (
        _stage_seconds(attention, clock),
        _backward_stage_seconds(attention, clock),
    )
    moving = _Moving(select_collective(collective, group, device), (k, v), group, clock)
    near, far = _peers(group.size(), host)
    if any(far) and not any(len(peers) > 1 for peers in near):
        near = far  # every rank is a host of its own
    row, reduce_factor = moving.seconds_of_a_row(near)
    other_host = moving.seconds_of_a_row(far)[0] if any(far) else row
    kernel, num_sms = attention.kernel, 0
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return CostModel(
        seconds_per_area=forward / seqlen**2,
        seconds_per_row=row,
        stage_seconds_per_row=stage / seqlen,
        backward_stage_seconds_per_row=backward_stage / seqlen,
        latency_seconds=moving.latency,
        backward_area_factor=backward / forward,
        backward_reduce_factor=reduce_factor,
        backward_wave_rows=wave_rows(nheads_kv, head_dim, num_sms),
        other_host_factor=other_host / row if any(far) and row else DEFAULT_COST.other_host_factor,
        starts_early=isinstance(kernel, EarlyKernel),
        heads=(nheads_q, nheads_kv),
    )


class _TimedAttention:
    """Attention over all keys of a rank, by the kernel that is chosen for it, with what its backward reads."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor):
        self.problem = problem_of(q, k, v, q.shape[2] ** -0.5, 0.0)
        self.kernel = select(self.problem).kernel
        self.q, self.k, self.v = q, k, v
        self._whole = self.planned(AttnSlices.full(q.shape[0]).to(q.device))
        self.out, self.lse = self.forward()

    def planned(self, slices: AttnSlices) -> tuple[AttnSlices, Plan, AttnProblem]:
        """The arguments of the kernel behind its tensors."""
        return slices, self.kernel.plan(slices, self.problem), self.problem

    def forward(self) -> ForwardOutput:
        return self.kernel.forward(self.q, self.k, self.v, *self._whole)

    def backward(self) -> BackwardOutput:
        saved = Saved(self.q, self.k, self.v, self.out, self.lse)
        return self.kernel.backward(Grads(self.q, None), saved, *self._whole)


def _stage_seconds(attention: _TimedAttention, clock: _Clock) -> float:
    """The time of another stage forward, over few keys, so that it is not a small difference of large numbers."""
    kernel, q, k, v = attention.kernel, attention.q, attention.k, attention.v
    seqlen = q.shape[0]
    few = max(min(seqlen, FEW_KEYS) // 2, 1)
    once, half_of = (attention.planned(_keys(seqlen, n, q.device)) for n in (2 * few, few))
    partial_dtype = torch.promote_types(q.dtype, torch.float32)

    def forward_in_two() -> None:
        first = kernel.forward(q, k[:few], v[:few], *half_of, out_dtype=partial_dtype)
        kernel.forward(q, k[few : 2 * few], v[few : 2 * few], *half_of, prior=first)

    in_two = clock.seconds(forward_in_two)
    in_one = clock.seconds(lambda: kernel.forward(q, k[: 2 * few], v[: 2 * few], *once))
    return max(in_two - in_one, 0.0)


def _backward_stage_seconds(attention: _TimedAttention, clock: _Clock) -> float:
    """The time of another stage backward, with next to no work for its keys: the kernels around the main one, and the
    sum of dq."""
    q = attention.q
    one_pair = attention.planned(_keys(1, 1, q.device, seqlen_q=q.shape[0]))
    saved = Saved(q, attention.k[:1], attention.v[:1], attention.out, attention.lse)

    def gradient_of_one_pair() -> Tensor:
        return attention.kernel.backward(Grads(q, None), saved, *one_pair).dq

    dq = gradient_of_one_pair()
    return clock.seconds(gradient_of_one_pair) + clock.seconds(lambda: sum_partials([dq, dq]))


class _Moving:
    """Casts and reduces of the rows of `tensors`; `latency` is the time of a cast of one row."""

    def __init__(
        self,
        collective: Collective,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup,
        clock: _Clock,
    ):
        self._collective, self._tensors, self._group = collective, tensors, group
        self._clock = clock
        everyone, _ = _peers(group.size(), None)
        one_row = self._route(everyone, 1)
        self.latency = clock.seconds(lambda: self._cast(one_row))

    def _route(self, peers: Sequence[Sequence[int]], rows: int) -> Route:
        return Route.of_peers(self._group.rank(), peers, rows, self._tensors[0].device)

    def _cast(self, route: Route) -> Sequence[Tensor]:
        casts = self._collective.casts(self._tensors, [route], self._group)
        buffers = next(casts).wait()
        assert next(casts, None) is None
        return buffers

    def seconds_of_a_row(self, peers: Sequence[Sequence[int]]) -> tuple[float, float]:
        """The time in which a rank receives a row, where each rank sends all of its rows to each of its `peers`; and
        that of sending its gradients back, over that."""
        rows = self._tensors[0].shape[0]
        route = self._route(peers, rows)
        sums = [torch.empty_like(x) for x in self._tensors]
        casting = max(self._clock.seconds(lambda: self._cast(route)) - self.latency, 1e-9)
        buffers = self._cast(route)

        def reduce() -> None:
            self._collective.start_reduce(buffers, route, self._group).write_sums(sums)

        reducing = max(self._clock.seconds(reduce) - self.latency, 1e-9)
        others = max(len({*of_rank} - {rank}) for rank, of_rank in enumerate(peers))
        return casting / max(rows * others, 1), reducing / casting


def _peers(cp_size: int, host: Sequence[int] | None) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of the host of each rank, itself among them, and the others."""
    host = host or [0] * cp_size
    ranks = range(cp_size)
    near = [[peer for peer in ranks if host[peer] == host[rank]] for rank in ranks]
    far = [[peer for peer in ranks if host[peer] != host[rank]] for rank in ranks]
    return near, far


def _keys(queries: int, keys: int, device: torch.device, seqlen_q: int | None = None) -> AttnSlices:
    """One slice, of the first queries if there are more."""
    slices = [AttnSlice((0, queries), (0, keys), MaskType.FULL)]
    return AttnSlices.from_slices(slices, seqlen_q or queries, keys).to(device)


class _Clock:
    """Measures on all ranks of `group` together; `ahead` keeps a device busy while the host enqueues what follows."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        repeats: int,
        ahead: Callable[[], object],
    ) -> None:
        self._group, self._device, self._repeats, self._ahead = group, device, repeats, ahead
        self._word = torch.zeros(1, dtype=torch.float32, device=device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of `run` on the rank where that is largest, after one run to warm up."""
        once = self._on_device if self._device.type == "cuda" else self._on_host
        times = [once(run) for _ in range(self._repeats + 1)]
        median = statistics.median(times[1:])
        slowest = torch.tensor([median], dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self._group)
        return slowest.item()

    def _on_device(self, run: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        self._ahead()
        # Ranks leave this together, so that a collective's time is not the wait for another rank.
        dist.all_reduce(self._word, group=self._group)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _on_host(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
