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

from magi_compile.dtensor.planning.cost import CostModel, wave_rows
from magi_compile.dtensor.transport.collectives import Route
from magi_compile.dtensor.transport.collectives import select as select_collective
from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.merge import sum_partials
from magi_compile.kernels.overlap import EarlyKernel
from magi_compile.kernels.select import problem_of, select
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType

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
    collective: str = "auto",
    repeats: int = 5,
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

    Returns:
        The model, equal on all ranks.

    Raises:
        NotImplementedError: if no kernel can run this.
    """
    device = torch.device(device)
    q = torch.randn(seqlen, nheads_q, head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, seqlen, nheads_kv, head_dim, device=device, dtype=dtype)
    problem = problem_of(q, k, v, head_dim**-0.5, 0.0)
    kernel = select(problem)
    slices = AttnSlices.full(seqlen).to(device)
    plan = kernel.plan(slices, problem)
    out, lse = kernel.forward(q, k, v, slices, plan, problem)

    def attend() -> object:
        return kernel.forward(q, k, v, slices, plan, problem)

    clock = _Clock(group, device, repeats, attend)
    forward = clock.seconds(attend)
    backward = clock.seconds(
        lambda: kernel.backward(Grads(q, None), Saved(q, k, v, out, lse), slices, plan, problem)
    )
    # Another stage forward, over few keys, so that it is not a small difference of large numbers.
    few = max(min(seqlen, FEW_KEYS) // 2, 1)
    stages = [_keys(seqlen, n, device) for n in (2 * few, few)]
    once, half_of = ((x, kernel.plan(x, problem), problem) for x in stages)
    wide = torch.promote_types(dtype, torch.float32)

    def forward_in_two() -> None:
        first = kernel.forward(q, k[:few], v[:few], *half_of, out_dtype=wide)
        kernel.forward(q, k[few : 2 * few], v[few : 2 * few], *half_of, prior=first)

    few_in_two = clock.seconds(forward_in_two)
    few_in_one = clock.seconds(lambda: kernel.forward(q, k[: 2 * few], v[: 2 * few], *once))
    # Another stage backward, with next to no work for its keys: what comes before and after them, and the sum of dq.
    one_pair = _keys(1, 1, device, seqlen_q=seqlen)
    one = one_pair, kernel.plan(one_pair, problem), problem

    def gradient_of_one_pair() -> Tensor:
        return kernel.backward(Grads(q, None), Saved(q, k[:1], v[:1], out, lse), *one).dq

    dq = gradient_of_one_pair()
    backward_stage = clock.seconds(gradient_of_one_pair)
    backward_stage += clock.seconds(lambda: sum_partials([dq, dq]))
    per_area = forward / seqlen**2
    moving = select_collective(collective, group, device)
    route = _everything_to_everyone(group, seqlen, device)
    one_row = _everything_to_everyone(group, 1, device)
    sums = [torch.empty_like(x) for x in (k, v)]

    def cast(route: Route) -> Sequence[Tensor]:
        casts = moving.casts((k, v), [route], group)
        buffers = next(casts).wait()
        assert next(casts, None) is None
        return buffers

    latency = clock.seconds(lambda: cast(one_row))
    casting = max(clock.seconds(lambda: cast(route)) - latency, 1e-9)
    buffers = cast(route)
    reduce = clock.seconds(lambda: moving.start_reduce(buffers, route, group).write_sums(sums))
    num_sms = 0
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return CostModel(
        seconds_per_area=per_area,
        seconds_per_row=casting / max(seqlen * (group.size() - 1), 1),
        stage_seconds_per_row=max(few_in_two - few_in_one, 0.0) / seqlen,
        backward_stage_seconds_per_row=backward_stage / seqlen,
        latency_seconds=latency,
        backward_area_factor=backward / forward,
        backward_reduce_factor=max(reduce - latency, 1e-9) / casting,
        backward_wave_rows=wave_rows(nheads_kv, head_dim, num_sms),
        starts_early=isinstance(kernel, EarlyKernel),
        backward_starts_early=isinstance(kernel, EarlyKernel)
        and kernel.backward_may_be_early()
        and moving.signals(group, device) is not None,
    )


def _keys(
    queries: int,
    keys: int,
    device: torch.device,
    seqlen_q: int | None = None,
) -> AttnSlices:
    """One slice, of the first queries if there are more."""
    slices = [AttnSlice((0, queries), (0, keys), MaskType.FULL)]
    return AttnSlices.from_slices(slices, seqlen_q or queries, keys).to(device)


def _everything_to_everyone(group: dist.ProcessGroup, rows: int, device: torch.device) -> Route:
    """Each rank sends all of its rows to all ranks, itself included."""
    cp_size, rank = group.size(), group.rank()
    sends = [[peer, 0, rank * rows, rows] for peer in range(cp_size)]
    recvs = [[peer, peer * rows, 0, rows] for peer in range(cp_size)]
    runs = torch.tensor(sends + recvs, dtype=torch.int32)
    counts = [rows] * cp_size
    host = [cp_size, cp_size, cp_size * rows, *counts, *counts, *runs.flatten().tolist()]
    return Route.unpack(host, runs.to(device), cp_size)


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
        self._word = torch.zeros(1, device=device)

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
