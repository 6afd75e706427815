"""Attention across GPUs against one GPU: what of the kernel's rate is left, and where the rest goes.

    python benchmarks/context_parallel.py --gpus 4 --output benchmarks/results/context_parallel_4xh200_2026-11-21

The one-GPU rate is that of the same kernel on the same mask over the whole sequence, the mean of all GPUs; beside it is
what the slowest of them has of it, since all wait for that one. A row's rate counts the mask's mean area of a rank and
the time of the slowest rank; `stages` is the number of remote stages, forward and backward, where "auto" is the cost
model's choice with rates measured on this machine, and "wait" is 0 with a forward that waits for remote keys, where "early" tells
of one that begins before. Exposed communication is a step's time minus that of the same step with everything that moves rows taken out. All
that is compared takes turns, in another order each round: what always came first was up to 6 % slower than the same
step later. Planning is the host's time for a mask never seen before. FLOPs are 4 * area * nheads_q * head_dim forward
and 2.5 times that backward; medians over rounds, of which short steps get more.

With `--ranks` above `--gpus`, GPU 0 alone runs the steps of every rank, one after another, with everything that moves
rows taken out: what balance, kernel and stages leave, on any number of ranks.

`--dry-run` runs the same code on CPUs over gloo with a few rows, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from magi_compile.dtensor.backward import backward
from magi_compile.dtensor.execution import Execution, unpack
from magi_compile.dtensor.forward import forward as forward_across_ranks
from magi_compile.dtensor.planning import rank_plan
from magi_compile.dtensor.planning.comm_plan import Stage
from magi_compile.dtensor.planning.cost import DEFAULT_COST, CostModel
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, RankPlan, plan_rank
from magi_compile.dtensor.tools.calibrate import calibrate
from magi_compile.dtensor.tools.documents import document_packs
from magi_compile.dtensor.transport.collectives import COLLECTIVES, Collective, Route, select
from magi_compile.kernels import select as kernels
from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.select import problem_of
from magi_compile.masks.library import MASKS as LIBRARY
from magi_compile.masks.slices import AttnSlices

MASKS = ("full", "causal", "document_full", "document_causal", "block_causal_document")
SPIN_CYCLES = 2_000_000
BACKWARD_FLOPS = 2.5
MOST_ROUNDS = 15

WAIT = "wait"  # as a number of stages

# Titles, and the fields of a row that have a number for each pass.
COLUMNS_OF_PASS = {
    "one GPU": "one_gpu_tflops",
    "slowest GPU alone, %": "slowest_gpu_percent",
    "TFLOP/s": "tflops",
    "%": "percent",
    "ms": "ms",
    "exposed ms": "exposed_ms",
}

Degree = int | str | None
Step = Callable[[], object]
Key = tuple[Hashable, ...]


class Stopped(NamedTuple):
    """A cast and a reduce that are done before they begin."""

    buffers: list[Tensor]
    sms: int = 0

    def wait(self) -> list[Tensor]:
        return self.buffers

    def write_sums(self, outs: Sequence[Tensor], prior: Sequence[Tensor] | None = None) -> None:
        pass


class NoCommunication:
    """A collective that moves nothing: buffers hold whatever they held."""

    name = "none"

    def __init__(self) -> None:
        self._buffers: dict[Route, list[Tensor]] = {}

    def casts(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
    ) -> Iterator[Stopped]:
        for route in routes:
            if route not in self._buffers:
                shapes = [(route.num_received, *x.shape[1:]) for x in tensors]
                self._buffers[route] = [tensors[0].new_empty(shape).normal_() for shape in shapes]
            yield Stopped(self._buffers[route])

    def outbox(
        self, like: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> list[Tensor]:
        return [x.new_empty(route.num_received, *x.shape[1:]) for x in like]

    def start_reduce(
        self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> Stopped:
        return Stopped([])


class Rank:
    """One process of the run, and what it measures."""

    def __init__(self, rank: int, args: argparse.Namespace):
        self.args, self.rank = args, rank
        self.device = torch.device("cpu") if args.dry_run else torch.device("cuda", rank)
        self.dtype = torch.float32 if args.dry_run else torch.bfloat16
        self.group = dist.group.WORLD
        self.reduce_group = dist.new_group() if args.reduce_group else self.group
        self.meeting = torch.zeros(1, device=self.device)
        torch.manual_seed(rank)
        self.collectives: dict[str, Collective] = {}
        self.refusals: dict[str, str] = {}
        for name in args.collectives:
            try:
                self.collectives[name] = self.collective(name)
            except NotImplementedError as error:
                self.refusals[name] = "; ".join(str(error).split("\n"))

    def inputs(self, rows: int) -> list[Tensor]:
        """q, k, v, dout."""
        heads = (self.args.heads[0], self.args.heads[1], self.args.heads[1], self.args.heads[0])
        shapes = [(rows, n, self.args.head_dim) for n in heads]
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for shape in shapes]

    def in_turns(self, runs: dict[Key, Step]) -> dict[Key, list[float]]:
        """Seconds of one call on each rank: of every run the round with the median slowest rank."""
        for run in runs.values():
            run()
        rounds: dict[Key, list[list[float]]] = {key: [] for key in runs}
        turn, num_rounds = 0, self.args.rounds
        while turn < num_rounds:
            order = list(runs)
            random.Random(turn).shuffle(order)  # alike on all ranks
            for key in order:
                mine = torch.tensor(
                    [self._round(runs[key])], dtype=torch.float64, device=self.device
                )
                everybody = [torch.empty_like(mine) for _ in range(self.args.gpus)]
                dist.all_gather(everybody, mine, self.group)
                rounds[key].append([seconds.item() for seconds in everybody])
            if turn == 0:
                slowest = sum(max(times[0]) for times in rounds.values()) * (self.args.calls + 1)
                affordable = min(int(self.args.seconds / slowest), MOST_ROUNDS)
                num_rounds = max(num_rounds, affordable)
            turn += 1
        return {key: sorted(times, key=max)[len(times) // 2] for key, times in rounds.items()}

    def _round(self, run: Step) -> float:
        calls = self.args.calls
        run()
        self._synchronize()
        dist.barrier(self.group)
        if self.device.type == "cpu":
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - begin) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)  # so that the host is ahead of the device
        dist.all_reduce(self.meeting, group=self.group)  # so that all devices begin together
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls / 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def one_gpu(self, slices: AttnSlices) -> tuple[Step, Step]:
        """The kernel over the whole sequence, forward and backward; every GPU for itself."""
        q, k, v, dout = self.inputs(slices.seqlen_q)
        problem = problem_of(q, k, v, self.args.head_dim**-0.5, 0.0)
        kernel = kernels.select(problem)
        slices = slices.to(self.device)
        plan = kernel.plan(slices, problem)
        rest = (slices, plan, problem)
        out, lse = kernel.forward(q, k, v, *rest)
        return (
            lambda: kernel.forward(q, k, v, *rest),
            lambda: kernel.backward(Grads(dout, None), Saved(q, k, v, out, lse), *rest),
        )

    def cost(self, tokens: int) -> CostModel:
        """The rates that "auto" goes by: measured if it is asked for."""
        args = self.args
        if None not in args.stages or args.ranks > args.gpus:
            return DEFAULT_COST
        return calibrate(
            self.group,
            self.device,
            self.dtype,
            nheads_q=args.heads[0],
            nheads_kv=args.heads[1],
            head_dim=args.head_dim,
            seqlen=tokens,
            collective=next(iter(self.collectives)),
        )

    def planned(
        self, slices: AttnSlices, degree: Degree, cost: CostModel, rank: int
    ) -> tuple[RankPlan, float]:
        """A plan, and the milliseconds that a new mask takes on the slowest host."""
        number = 0 if degree == WAIT else degree
        options = ContextParallelOptions(
            chunk_size=self.args.chunk,
            degree=number,
            backward_degree=number,
            early=degree != WAIT,
            cost=cost,
        )
        seconds = []
        for _ in range(3):
            rank_plan._plans.clear()
            begin = time.perf_counter()
            plan = plan_rank(slices, self.args.ranks, rank, options)
            seconds.append(time.perf_counter() - begin)
        slowest = torch.tensor([min(seconds)], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self.group)
        return plan, slowest.item() * 1e3

    def steps(self, plan: RankPlan, collective: Collective) -> tuple[Step, Step]:
        """A forward and a backward pass."""
        q, k, v, dout = self.inputs(plan.dispatch.seqlen_local)
        problem = problem_of(q, k, v, self.args.head_dim**-0.5, 0.0)
        kernel = kernels.select(problem)
        ready = unpack(*plan.tensors(self.device))
        execution = Execution(ready, kernel, problem, collective, self.group, self.reduce_group)

        def forward() -> tuple[Tensor, Tensor]:
            return forward_across_ranks(q, k, v, execution)

        out, lse = forward()
        grads, saved = Grads(dout, None), Saved(q, k, v, out, lse)
        return forward, lambda: backward(grads, saved, execution)

    def rows(self, mask: str, tokens: int, cost: CostModel) -> Iterator[dict]:
        """All rows of one mask with `tokens` of each rank."""
        args, total = self.args, tokens * self.args.ranks
        (lengths,) = document_packs(total, 1, args.seed)
        slices = LIBRARY[mask](lengths if "document" in mask else [total]).slices
        ranks = [self.rank]
        if args.ranks > args.gpus:
            ranks = list(range(args.ranks if slices.area() < total**2 else 1))
        still = NoCommunication()
        collectives = self.collectives
        steps: dict[Key, tuple[Step, Step]] = {("one GPU",): self.one_gpu(slices)}
        plans: dict[Degree, tuple[RankPlan, float]] = {}
        for degree in args.stages:
            for turn, rank in enumerate(ranks):
                plans[degree] = self.planned(slices, degree, cost, rank)
                for name, collective in {still.name: still, **collectives}.items():
                    steps[degree, name, turn] = self.steps(plans[degree][0], collective)
        runs = {(*key, i): pair[i] for key, pair in steps.items() for i in (0, 1)}
        seconds = self.in_turns(runs)

        def slowest(degree: Degree, name: str) -> list[float]:
            turns = range(len(ranks))
            return [max(max(seconds[degree, name, turn, i]) for turn in turns) for i in (0, 1)]

        flops = 4 * slices.area() * args.heads[0] * args.head_dim
        work = (flops, BACKWARD_FLOPS * flops)
        of_gpus = [
            [amount / s / 1e12 for s in seconds["one GPU", i]] for i, amount in enumerate(work)
        ]
        alone = [statistics.mean(rates) for rates in of_gpus]
        for degree, name in itertools.product(args.stages, collectives):
            plan, planning_ms = plans[degree]
            moving, nothing = slowest(degree, name), slowest(degree, still.name)
            rates = [amount / args.ranks / s / 1e12 for amount, s in zip(work, moving, strict=True)]
            yield {
                "mask": mask,
                "tokens": tokens,
                "collective": name,
                "stages": "auto" if degree is None else degree,
                "stages_run": [
                    0 if plan.forward_is_early else len(plan.forward) - 1,
                    len(plan.backward) - 1,
                ],
                "begins_early": plan.forward_is_early,
                "chunk": plan.dispatch.chunk_size,
                "received_rows": [received_rows(x) for x in (plan.forward, plan.backward)],
                "one_gpu_tflops": [round(x) for x in alone],
                "gpus_percent": [
                    [round(100 * rate / mean, 1) for rate in rates]
                    for rates, mean in zip(of_gpus, alone, strict=True)
                ],
                "slowest_gpu_percent": [
                    round(100 * min(rates) / mean, 1)
                    for rates, mean in zip(of_gpus, alone, strict=True)
                ],
                "tflops": [round(x) for x in rates],
                "percent": [round(100 * x / y, 1) for x, y in zip(rates, alone, strict=True)],
                "ms": [round(1e3 * x, 3) for x in moving],
                "exposed_ms": [
                    round(1e3 * (x - y), 3) for x, y in zip(moving, nothing, strict=True)
                ],
                "planning_ms": round(planning_ms, 2),
                "timeline": [self.timeline(step) for step in steps[degree, name, 0]]
                if args.timeline
                else None,
            }

    def collective(self, name: str) -> Collective:
        if name == NoCommunication.name:
            return NoCommunication()
        return select(name, self.group, self.device)

    def timeline(self, step: Step) -> dict[str, float]:
        """Milliseconds of rank 0's device in one step, by what runs; `idle` is when nothing does."""
        if self.device.type == "cpu":
            return {}
        step()
        self._synchronize()
        dist.barrier(self.group)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            torch.cuda._sleep(SPIN_CYCLES)
            step()
            self._synchronize()
        spans = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and "spin" not in event.name
        ]
        return summary(spans)


def received_rows(stages: list[Stage]) -> int:
    return sum(stage.transfer.num_received for stage in stages if stage.transfer)


def summary(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Milliseconds by kind of work, from (name, begin, end) in microseconds."""
    kinds = {
        "ffa": "attention",
        "nccl": "communication",
        "pull": "communication",
        "Memcpy": "copies",
    }
    times: dict[str, float] = {}
    for name, begin, end in spans:
        kind = next((kind for part, kind in kinds.items() if part in name), "other")
        times[kind] = times.get(kind, 0.0) + end - begin
    covered, reach = 0.0, -1.0
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        covered += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    total = max(end for *_, end in spans) - min(begin for _, begin, _ in spans)
    times |= {"idle": total - covered, "total": total}
    return {kind: round(us / 1e3, 3) for kind, us in times.items()}


def work(rank: int, args: argparse.Namespace, store: str) -> None:
    if not args.dry_run:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo" if args.dry_run else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=args.gpus,
        device_id=None if args.dry_run else torch.device("cuda", rank),
    )
    me = Rank(rank, args)
    begin = time.monotonic()
    context = record.context(
        gpus=args.gpus,
        ranks=args.ranks,
        inputs=f"{me.dtype}, heads {args.heads[0]}:{args.heads[1]}, head_dim {args.head_dim}; "
        f"documents of dtensor/tools/documents.py, seed {args.seed}",
        timing=f"median of {args.rounds} to {max(args.rounds, MOST_ROUNDS)} rounds of {args.calls} calls, slowest rank",
    )
    for name, reasons in me.refusals.items():
        context[f"{name} can not serve"] = reasons
    costs: dict[int, CostModel] = {}
    rows: list[dict] = []
    for tokens, mask in itertools.product(args.tokens, args.masks):
        if me_is_late(me, begin):
            break
        if tokens not in costs:
            costs[tokens] = me.cost(tokens)
            context[f"rates of {tokens} tokens"] = str(costs[tokens])
        for row in me.rows(mask, tokens, costs[tokens]):
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
                record.write(args.output, context, rows, to_markdown(context, rows))
    dist.destroy_process_group()


def me_is_late(me: Rank, begin: float) -> bool:
    """Whether the time limit has passed, as rank 0 sees it."""
    late = torch.tensor([time.monotonic() - begin > me.args.max_seconds], device=me.device).float()
    dist.broadcast(late, 0, me.group)
    return bool(late)


def to_markdown(context: dict, rows: list[dict]) -> str:
    lines = ["# Attention across GPUs, TFLOP/s of a GPU", ""]
    lines += [f"- {name}: {value}" for name, value in context.items()]
    header = ["mask", "tokens/GPU", "collective", "stages", "pass", *COLUMNS_OF_PASS]
    header += ["planning ms", "received rows"]
    lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        for index, name in enumerate(("forward", "backward")):
            stages = row["stages"]
            if stages == "auto":
                stages = f"auto: {row['stages_run'][index]}"
            if name == "forward" and row["begins_early"]:
                stages = f"{stages}, early"
            cells = [row["mask"], row["tokens"], row["collective"], stages, name]
            cells += [row[field][index] for field in COLUMNS_OF_PASS.values()]
            cells += [row["planning_ms"], row["received_rows"][index]]
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def stages_argument(text: str) -> Degree:
    return None if text == "auto" else text if text == WAIT else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    names = [*COLLECTIVES, "auto", NoCommunication.name]
    option("--gpus", type=int, default=torch.cuda.device_count() or 2)
    option("--ranks", type=int, help="that the sequence is spread over; as many as GPUs")
    option("--output", type=Path, help="where to write: adds .json and .md")
    option("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    option("--tokens", type=int, nargs="+", default=[8192, 16384], help="of each GPU")
    option("--chunk", type=int, help="tokens of a chunk; by default chosen from the mask")
    option("--stages", type=stages_argument, nargs="+", default=[None, 0, 1, 2, 4])
    option("--collectives", nargs="+", choices=names, default=["all_to_all"])
    option("--heads", type=record.heads_argument, default=(64, 8))
    option("--head-dim", type=int, default=128)
    option("--seed", type=int, default=42, help="of the documents")
    option("--reduce-group", action="store_true", help="gradients go home in a group of their own")
    option("--rounds", type=int, default=3)
    option("--calls", type=int, default=3)
    option("--seconds", type=float, default=1.0, help="of each mask, in more rounds if they fit")
    option("--timeline", action="store_true", help="profile a step of every row on rank 0")
    option("--max-seconds", type=float, default=3600.0, help="no new mask after that")
    option("--dry-run", action="store_true")
    args = parser.parse_args()
    args.ranks = args.ranks or args.gpus
    if args.ranks > args.gpus:
        args.gpus, args.collectives = 1, [NoCommunication.name]
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, (args, f"{directory}/store"), nprocs=args.gpus)


if __name__ == "__main__":
    main()
