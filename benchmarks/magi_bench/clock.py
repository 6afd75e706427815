"""Times calls: of one contender by itself, on a GPU with a cold L2 and the host's share apart; or of several in turns,
many calls between two synchronizations of the device."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


# Calls of a contender until CUDA graphs have been recorded and replayed.
WARMUP_CALLS = 3
# Single calls that say how many fit in a turn.
TRIAL_CALLS = 2
PROFILED_CALLS = 2


def _nothing(calls: int) -> None:
    pass


class Ready(NamedTuple):
    """A contender prepared for a case."""

    call: Callable[[], Sequence[Tensor]]  # one call, or one step; returns what is checked
    renew: Callable[[int], None] = _nothing  # makes the masks of calls to come, out of the time
    facts: Mapping[str, Any] = {}  # of its row, once called; numbers of the rank that has most
    # milliseconds of one of so many calls, if these are not in this process; else the wall time of `call`
    turn_ms: Callable[[int], float] | None = None
    # the same call with nothing moved between ranks, whose results are wrong; it takes turns, too
    without_moves: Callable[[], Sequence[Tensor]] | None = None


class Prefetched:
    """The inputs of calls to come, made by turn before their time is taken; the turns of everybody are the same."""

    def __init__(self, make: Callable[[int], Any]):
        self.make = make
        self._turns = itertools.count()
        self._made: list[Any] = []

    def renew(self, calls: int) -> None:
        """Makes what so many calls need."""
        self._made = [self.make(turn) for turn in itertools.islice(self._turns, calls)][::-1]

    def next(self) -> Any:
        """The inputs of the next call."""
        return self._made.pop()


@dataclass(frozen=True)
class Rounds:
    """The numbers of turns and of calls."""

    count: int = 7  # rounds; each contender has one turn in each
    turn_ms: float = 20.0  # about how long a turn takes
    max_calls: int = 100  # calls of a turn at most; at least one
    max_masks: int = 20  # the same where each call gets a mask of its own, made before the turn

    def calls(self, estimate_ms: float, makes_masks: bool = False) -> int:
        """Calls of a turn, of which one takes about `estimate_ms`."""
        most = self.max_masks if makes_masks else self.max_calls
        return min(max(int(self.turn_ms / max(estimate_ms, 1e-3)), 1), most)


class Turns(NamedTuple):
    """The times of the turns of one contender."""

    times_ms: list[float]  # of one call, the mean over each turn
    host_ms: list[float]  # the same until the last call returned; 0 of other processes
    calls: int  # of each turn
    recompiles: int  # graphs that Dynamo compiled in them; 0 unless something is wrong


class Work(NamedTuple):
    """The work of the GPU and its driver in one call."""

    kernels: float  # how many run
    launches: float  # by the host; a CUDA graph is one
    kernel_ms: float  # the sum of the times of all kernels, without what lies between them


class Alone:
    """One process is timed by itself. `world.World` times several together."""

    rank, size = 0, 1

    def meet(self) -> None:
        """Waits for everybody who is timed."""

    def slowest(self, number: float) -> float:
        """The largest `number` of everybody who is timed."""
        return number

    def all_of(self, thing: Any) -> list[Any]:
        """Those of all contenders that are timed."""
        return [thing]

    def total(self, x: Tensor) -> Tensor:
        """The sum of everybody's `x`, in its place."""
        return x


ALONE = Alone()


def wait(device: str) -> None:
    """Until the device has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def warm_up(ready: Ready, device: str) -> int:
    """The calls after the first, which compiled, and before those that count; how many graphs they compiled."""
    before = _compat.num_compiled_graphs()
    ready.renew(WARMUP_CALLS - 1)
    for _ in range(WARMUP_CALLS - 1):
        ready.call()
    wait(device)
    return _compat.num_compiled_graphs() - before


def in_turns(
    contenders: Mapping[str, Ready], device: str, rounds: Rounds, together: Alone = ALONE
) -> dict[str, Turns]:
    """Times all `contenders`, which are warm, round by round; every other round begins with the last of them.

    Processes that are timed `together` have the same contenders. Each turn then lasts until the slowest process is
    done.
    """

    def turn_ms(ready: Ready, count: int) -> tuple[float, float]:
        total, host = _turn_ms(ready, count, device, together)
        return together.slowest(total), together.slowest(host)

    calls = {
        name: rounds.calls(
            min(turn_ms(ready, 1)[0] for _ in range(TRIAL_CALLS)),
            makes_masks=ready.renew is not _nothing,
        )
        for name, ready in contenders.items()
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    hosts: dict[str, list[float]] = {name: [] for name in contenders}
    recompiles = dict.fromkeys(contenders, 0)
    for number in range(rounds.count):
        order = list(contenders)
        for name in reversed(order) if number % 2 else order:
            before = _compat.num_compiled_graphs()
            total, host = turn_ms(contenders[name], calls[name])
            times[name].append(total)
            hosts[name].append(host)
            recompiles[name] += _compat.num_compiled_graphs() - before
    return {
        name: Turns(times[name], hosts[name], calls[name], recompiles[name]) for name in contenders
    }


def _turn_ms(ready: Ready, calls: int, device: str, together: Alone) -> tuple[float, float]:
    """Milliseconds of wall time of one of `calls` consecutive calls, and of these until the last one returned: 0 of
    calls in other processes."""
    if ready.turn_ms is not None:
        return ready.turn_ms(calls), 0.0
    ready.renew(calls)
    wait(device)
    together.meet()
    begin = time.perf_counter()
    for _ in range(calls):
        ready.call()
    returned = time.perf_counter()
    wait(device)
    ended = time.perf_counter()
    return (ended - begin) * 1e3 / calls, (returned - begin) * 1e3 / calls


def work_of(ready: Ready) -> Work:
    """Counts the work of a GPU in one call. CUPTI slows what comes after it,
    so this comes after everything that is timed."""
    from torch.profiler import ProfilerActivity, profile

    ready.renew(PROFILED_CALLS)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            ready.call()
        torch.cuda.synchronize()
    events = list(profiler.events())
    kernels = [event.time_range.elapsed_us() / 1e3 for event in events if _is_kernel(event)]
    launches = sum(map(_is_launch, events))
    return Work(*(x / PROFILED_CALLS for x in (len(kernels), launches, sum(kernels))))


def _is_kernel(event: object) -> bool:
    """True if a profiler's event is a kernel on the GPU: no copy, no fill, no annotation."""
    if getattr(event, "device_type", None) != torch.autograd.DeviceType.CUDA:
        return False
    is_annotation = getattr(event, "is_user_annotation", False)
    return not is_annotation and not getattr(event, "name", "").startswith(("Memcpy", "Memset"))


def _is_launch(event: object) -> bool:
    """True if it is a call of the CUDA runtime or driver that launches a kernel or a graph."""
    name = getattr(event, "name", "")
    return name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch"))
