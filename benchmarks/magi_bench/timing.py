"""Times a call: cold L2, median and percentiles, the host's share apart, peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from magi_compile import _compat

# The GPU spins for this many times what the host needs to enqueue all calls, so that it never waits inside one.
SPIN_MARGIN = 1.5
CYCLES_PER_MS = 2_000_000
# Calls longer than this are steady: few repetitions tell what they cost, and neither L2 nor the host does.
LONG_MS, LONG_REPS = 100.0, 3
MS_OF_A_TURN = 3.0  # of an interleaved run, about


@dataclass(frozen=True)
class Protocol:
    """The limits of time and of calls."""

    budget_ms: float = 100.0  # about how long the repetitions of one pass may take together
    min_reps: int = 5  # at least; `LONG_REPS` of calls beyond `LONG_MS`
    max_reps: int = 50  # repetitions at most
    flush_bytes: int = 256 * 2**20  # written between repetitions on a GPU; 0 for a warm cache
    rounds: int = 1  # of turns that contenders take in one process; 1 times each by itself

    def reps(self, estimate_ms: float) -> int:
        wanted = int(self.budget_ms / max(estimate_ms, 1e-3))
        least = min(self.min_reps, LONG_REPS) if estimate_ms > LONG_MS else self.min_reps
        return min(max(wanted, least), self.max_reps)


def measure(run: Callable[[], object], device: str, protocol: Protocol) -> dict[str, Any]:
    """Times `run`, which has run before: what it compiles is compiled. Gives `ms` (median), `p20_ms`, `p80_ms`,
    `reps`; on a GPU also `host_ms`, the time until a call returns, and `peak_bytes`, what it allocates at most."""
    if device == "cpu":
        return summary(_cpu_times(run, protocol))
    first = _first_call(run)
    first_ms = first["host_ms"] + first.pop("wait_ms")
    reps, flush = protocol.reps(first_ms), _flush_buffer(protocol)
    times = [first_ms] if first_ms > LONG_MS else []
    times += _gpu_times(run, reps - len(times), first["host_ms"], flush)
    return {**first, **summary(times)}


def of_turn(run: Callable[[], object], device: str, protocol: Protocol, calls: int) -> float:
    """Milliseconds of one of `calls` behind each other, the median."""
    if device == "cpu":
        return statistics.median(_wall_ms(run) for _ in range(calls))
    host_ms = _first_call(run)["host_ms"]
    return statistics.median(_gpu_times(run, calls, host_ms, _flush_buffer(protocol)))


def matmul_tflops(device: str, protocol: Protocol) -> float:
    """The rate of a large square matmul, bf16 on a GPU and fp32 on a CPU: what attention's products could reach."""
    protocol = replace(protocol, budget_ms=200.0)
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    if device == "cuda":
        times = _gpu_times(lambda: a @ b, protocol.reps(2.0), 0.1, _flush_buffer(protocol))
    else:
        times = _cpu_times(lambda: a @ b, protocol)
    return 2 * size**3 / statistics.median(times) / 1e9


def summary(times: list[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile and number of `times` in milliseconds."""
    ordered = sorted(times)

    def percentile(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return {
        "ms": statistics.median(ordered),
        "p20_ms": percentile(0.2),
        "p80_ms": percentile(0.8),
        "reps": len(ordered),
    }


def _cpu_times(run: Callable[[], object], protocol: Protocol) -> list[float]:
    estimate = min(_wall_ms(run) for _ in range(2))
    return [_wall_ms(run) for _ in range(protocol.reps(estimate))]


def _wall_ms(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def _flush_buffer(protocol: Protocol) -> torch.Tensor | None:
    if not protocol.flush_bytes:
        return None
    return torch.empty(protocol.flush_bytes, dtype=torch.int8, device="cuda")


def _gpu_times(
    run: Callable[[], object], reps: int, host_ms: float, flush: torch.Tensor | None
) -> list[float]:
    """Milliseconds of GPU time of each call, all enqueued behind a spinning kernel; `host_ms` is to enqueue one."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    torch.cuda.synchronize()
    _compat.spin_gpu(int(SPIN_MARGIN * host_ms * reps * CYCLES_PER_MS))
    for begin, end in events:
        if flush is not None:
            flush.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _first_call(run: Callable[[], object]) -> dict[str, Any]:
    """Times one call on an idle GPU: when it returns, how long the GPU still works then, and the memory it takes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    host_ms = _wall_ms(run)
    wait_ms = _wall_ms(torch.cuda.synchronize)
    peak_bytes = torch.cuda.max_memory_allocated() - before
    return {"peak_bytes": peak_bytes, "host_ms": host_ms, "wait_ms": wait_ms}
