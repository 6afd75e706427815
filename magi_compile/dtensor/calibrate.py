"""Measures the rates of a `CostModel` on the machine at hand, once, with the kernel and the group that will run.

Every rate is the median of a few runs of the real thing, on the slowest rank; all ranks return the same model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile.dtensor.collectives import Route
from magi_compile.dtensor.collectives import select as select_collective
from magi_compile.dtensor.cost import CostModel, wave_rows
from magi_compile.kernels.merge import sum_partials
from magi_compile.kernels.select import select
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType
from magi_compile.ops.library import problem_of


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

    def seconds(run: Callable[[], object]) -> float:
        return _slowest_median(run, group, device, repeats)

    forward = seconds(lambda: kernel.forward(q, k, v, slices, plan, problem))
    backward = seconds(lambda: kernel.backward(q, None, q, k, v, out, lse, slices, plan, problem))
    # The same in two stages, over one half of the keys each.
    half = seqlen // 2
    part = AttnSlices.from_slices([AttnSlice((0, seqlen), (0, half), MaskType.FULL)], seqlen, half)
    part = part.to(device)
    part_plan = kernel.plan(part, problem)
    halves = [(k[:half], v[:half]), (k[half : 2 * half], v[half : 2 * half])]
    wide = torch.promote_types(dtype, torch.float32)

    def forward_in_two() -> None:
        first = kernel.forward(q, *halves[0], part, part_plan, problem, out_dtype=wide)
        kernel.forward(q, *halves[1], part, part_plan, problem, prior=first)

    backward_in_two = seconds(
        lambda: sum_partials(
            [
                kernel.backward(q, None, q, *kv, out, lse, part, part_plan, problem).dq
                for kv in halves
            ]
        )
    )
    per_area = forward / seqlen**2
    moving = select_collective(collective, group, device)
    route = _everything_to_everyone(group, seqlen, device)
    nothing = _everything_to_everyone(group, 0, device)
    totals = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]

    def cast(route: Route) -> Sequence[Tensor]:
        casts = moving.casts((k, v), [route], group)
        buffers = next(casts).wait()
        assert next(casts, None) is None
        return buffers

    latency = seconds(lambda: cast(nothing))
    casting = max(seconds(lambda: cast(route)) - latency, 1e-9)
    buffers = cast(route)
    reduce = seconds(lambda: moving.start_reduce(buffers, route, group).add_to(totals))
    num_sms = 0
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return CostModel(
        seconds_per_area=per_area,
        seconds_per_row=casting / max(seqlen * (group.size() - 1), 1),
        stage_seconds=max(seconds(forward_in_two) - forward, 0.0),
        backward_stage_seconds=max(backward_in_two - backward, 0.0),
        latency_seconds=latency,
        backward_area_factor=backward / forward,
        backward_reduce_factor=max(reduce - latency, 1e-9) / casting,
        backward_wave_rows=wave_rows(nheads_kv, num_sms),
    )


def _everything_to_everyone(group: dist.ProcessGroup, rows: int, device: torch.device) -> Route:
    """Each rank sends all of its rows to all ranks, itself included."""
    cp_size, rank = group.size(), group.rank()
    sends = [[peer, 0, rank * rows, rows] for peer in range(cp_size)]
    recvs = [[peer, peer * rows, 0, rows] for peer in range(cp_size)]
    runs = torch.tensor(sends + recvs, dtype=torch.int32)
    counts = [rows] * cp_size
    host = [cp_size, cp_size, cp_size * rows, *counts, *counts, *runs.flatten().tolist()]
    return Route.unpack(host, runs.to(device), cp_size)


def _slowest_median(
    run: Callable[[], object], group: dist.ProcessGroup, device: torch.device, repeats: int
) -> float:
    """The median time of `run` on the rank where that is largest, after one run to warm up."""
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(times[1:])], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return slowest.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
