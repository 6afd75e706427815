"""Group collectives across GPUs: native, all-to-all, and the plain collectives that move every row to everybody.

    python benchmarks/group_collectives.py --gpus 4 --output benchmarks/results/group_collectives_h200x4_2026-11-21

k and v of every rank go to the ranks that need them (cast), and their gradients come home and add up (reduce). Range
sets: the remote keys of real masks, placed by the library, and synthetic ones in which every rank needs every other
run of `n` rows of all others. Contenders: native with each engine, the all-to-all of the library, and NCCL's
all-gather and reduce-scatter of all rows. Results are checked before anything is timed: native casts against
indexing, native reduces bit by bit against the all-to-all.

GB/s is algorithm bandwidth: the bytes that the busiest rank has to receive or to send, over the time of the slowest
rank; NVLink carries 450 in each direction. `exposed` is what a cast adds to a matrix product of at least its
length that runs beside it. `host` is the time the host needs to enqueue a call. Medians over rounds.

`--engines` measures first what the engines of native reach alone, by the size of a copy and by the number of SMs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from magi_compile.dtensor.execution import unpack
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.dtensor.tools.documents import document_packs
from magi_compile.dtensor.transport import rows
from magi_compile.dtensor.transport.collectives import Collective, Route, select
from magi_compile.dtensor.transport.native import NativeCollective, pull_triton, stream_ops
from magi_compile.dtensor.transport.native.pulls import COPY_ENGINE, SMS
from magi_compile.dtensor.transport.native.window import Window
from magi_compile.masks.library import MASKS

NVLINK = 450e9  # bytes per second and direction
SPIN_CYCLES = 4_000_000
MAX_COPIES = 1000  # of one cast by a copy engine that are worth a measurement


class Calls(NamedTuple):
    """What is timed."""

    cast: Callable[[], object]
    reduce: Callable[[], object]
    cast_beside: Callable[[Callable[[], object]], object] | None = None  # what runs beside a cast


class Rank:
    """One process, and what it measures."""

    def __init__(self, rank: int, args: argparse.Namespace):
        self.args, self.rank, self.size = args, rank, args.gpus
        self.group = dist.group.WORLD
        self.device = torch.device("cuda", rank)
        torch.manual_seed(rank)
        self.matrix = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        self.contenders: dict[str, Collective] = {
            "native, copy engine": NativeCollective(COPY_ENGINE),
            "native, SMs": NativeCollective(SMS),
            "all_to_all": select("all_to_all", self.group, self.device),
        }

    def tensors(self, num_rows: int) -> list[Tensor]:
        """k and v."""
        shape = (num_rows, self.args.heads, self.args.head_dim)
        return [torch.randn(shape, device=self.device).bfloat16() for _ in range(2)]

    def range_sets(self, tokens: int) -> Iterator[tuple[str, Route]]:
        for mask in self.args.masks:
            total = tokens * self.size
            (lengths,) = document_packs(total, 1, self.args.seed)
            slices = MASKS[mask](lengths if "document" in mask else [total]).slices
            options = ContextParallelOptions(degree=1, backward_degree=1)
            plan = plan_rank(slices, self.size, self.rank, options)
            stages = unpack(*plan.tensors(self.device)).forward
            yield mask, stages[1].route
        for run in self.args.runs:
            yield f"runs of {run}", self.striped(tokens, run)

    def striped(self, tokens: int, run: int) -> Route:
        """Every other run of `run` rows, from everybody to everybody else."""
        firsts = range(0, tokens, 2 * run)
        others = [[peer for peer in range(self.size) if peer != rank] for rank in range(self.size)]
        num_rows = len(firsts) * run
        sends, recvs = [], []
        for index, peer in enumerate(others[self.rank]):
            here = others[peer].index(self.rank) * num_rows
            for step, first in enumerate(firsts):
                sends.append([peer, first, here + step * run, run])
                recvs.append([peer, index * num_rows + step * run, first, run])
        counts = [num_rows * (peer != self.rank) for peer in range(self.size)]
        host = [len(sends), len(recvs), sum(counts), *counts, *counts]
        runs = torch.tensor(sends + recvs, dtype=torch.int32)
        host += runs.flatten().tolist()
        return Route.unpack(host, runs.to(self.device), self.size)

    def check(self, route: Route, tensors: list[Tensor], shares: list[Tensor]) -> None:
        """Raises unless every contender is right."""
        source = rows.rows_of(route.recvs[:, 2], route.recvs[:, 3], route.num_received).long()
        target = rows.rows_of(route.recvs[:, 1], route.recvs[:, 3], route.num_received).long()
        expected = []
        for x in tensors:
            everybody = x.new_empty(self.size, *x.shape)
            dist.all_gather_into_tensor(everybody, x, self.group)
            peer = (
                route.recvs[:, 0]
                .long()
                .repeat_interleave(route.recvs[:, 3], output_size=route.num_received)
            )
            buffer = x.new_empty(route.num_received, *x.shape[1:])
            buffer[target] = everybody[peer, source]
            expected.append(buffer)
        totals = {}
        for name, collective in self.contenders.items():
            for cast in collective.casts(tensors, [route], self.group):
                for buffer, right in zip(cast.wait(), expected, strict=True):
                    assert torch.equal(buffer, right), f"{name}: a cast is wrong"
            totals[name] = [torch.zeros(x.shape, device=self.device) for x in tensors]
            collective.start_reduce(shares, route, self.group).write_sums(totals[name])
        reference = totals["all_to_all"]
        for name, total in totals.items():
            for x, right in zip(total, reference, strict=True):
                assert torch.equal(x, right), f"{name}: a reduce is wrong"

    def seconds(self, run: Callable[[], object]) -> tuple[float, float]:
        """Of one call on the slowest rank's device, and on its host."""
        for _ in range(2):
            run()
        rounds = []
        for _ in range(self.args.rounds):
            torch.cuda.synchronize()
            dist.barrier(self.group)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)  # so that the host is ahead of the device
            started = time.perf_counter()
            begin.record()
            for _ in range(self.args.calls):
                run()
            end.record()
            on_host = time.perf_counter() - started
            end.synchronize()
            rounds.append((begin.elapsed_time(end) / 1e3, on_host))
        medians = [
            statistics.median(column) / self.args.calls for column in zip(*rounds, strict=True)
        ]
        slowest = torch.tensor(medians, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self.group)
        return tuple(slowest.tolist())

    def busiest(self, route: Route, row_bytes: int) -> int:
        """Bytes that the busiest rank receives or sends."""
        mine = torch.tensor(
            [
                max(
                    sum(counts) - counts[self.rank]
                    for counts in (route.send_counts, route.recv_counts)
                )
            ],
            device=self.device,
        )
        dist.all_reduce(mine, dist.ReduceOp.MAX, self.group)
        return int(mine) * row_bytes

    def sms_of_nccl(self, run: Callable[[], object]) -> int:
        """Thread blocks of the NCCL kernel in one call."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        grids = [
            e["args"]["grid"][0]
            for e in events
            if "nccl" in e.get("name", "").lower() and "grid" in e.get("args", {})
        ]
        return max(grids, default=0)

    def measured(self, tokens: int) -> Iterator[dict]:
        tensors = self.tensors(tokens)
        row_bytes = sum(x[0].numel() * x.element_size() for x in tensors)
        for name, route in self.range_sets(tokens):
            shares = self.tensors(route.num_received)
            self.check(route, tensors, shares)
            num_bytes = self.busiest(route, row_bytes)
            runs = torch.tensor(len(route.recvs), device=self.device)
            dist.all_reduce(runs, dist.ReduceOp.MAX, self.group)
            head = {
                "ranges": name,
                "tokens": tokens,
                "runs": int(runs),
                "megabytes": num_bytes / 1e6,
            }
            for contender, collective in self.contenders.items():
                if "copy engine" in contender and int(runs) > MAX_COPIES:
                    continue
                calls = self.calls(collective, route, tensors, shares)
                sms = 0 if "copy engine" in contender else pull_triton.NUM_PROGRAMS
                if contender == "all_to_all":
                    sms = self.sms_of_nccl(calls.cast)
                yield self.row(head | {"contender": contender, "sms": sms}, calls, num_bytes)
        packed = torch.cat([x.flatten(1) for x in tensors], 1)
        everything = packed.new_empty(self.size * tokens, packed.shape[1])

        def all_gather() -> None:
            dist.all_gather_into_tensor(everything, packed, self.group)

        def reduce_scatter() -> None:
            dist.reduce_scatter_tensor(packed, everything, group=self.group)

        head = {"ranges": "every row to everybody", "tokens": tokens, "runs": self.size - 1}
        num_bytes = (self.size - 1) * tokens * row_bytes
        head |= {"megabytes": num_bytes / 1e6, "contender": "all-gather, reduce-scatter"}
        head["sms"] = self.sms_of_nccl(all_gather)
        yield self.row(head, Calls(all_gather, reduce_scatter), num_bytes)

    def engines(self) -> Iterator[dict]:
        """Reading 32 MB, with no flags and no publishing around it."""
        width, num_rows = 2048, 8192
        current = torch.cuda.current_stream()
        window = Window(self.group, self.device)
        target = torch.empty(num_rows, width, device=self.device, dtype=torch.bfloat16)
        num_bytes = target.numel() * target.element_size()
        slot = window.next_slot(num_bytes, current)
        slot.memory.zero_()
        window.wait(window.meet(slot, current), current)
        source = slot.addresses[(self.rank + 1) % self.size]
        for copies in (1, 8, 32, 128, 512):
            size = num_bytes // copies
            offsets = range(0, num_bytes, size)
            copy = (
                [target.data_ptr() + offset for offset in offsets],
                [source + offset for offset in offsets],
                [size] * copies,
            )

            def by_copy_engine(copy: tuple = copy) -> None:
                window.stream.wait_stream(current)
                stream_ops.copy(*copy, window.stream)
                current.wait_stream(window.stream)

            yield self.engine_row(
                COPY_ENGINE, f"{copies} x {size >> 10} KB", num_bytes, by_copy_engine
            )
        row = torch.arange(num_rows, device=self.device)
        peer = (self.rank + 1 + row % (self.size - 1)) % self.size
        places = torch.stack([peer, row, row]).to(torch.int32)
        for sms in (4, 8, 16, 32, 64):

            def by_sms(sms: int = sms) -> None:
                pull_triton.pull(target, places, slot.device_addresses, num_programs=sms)

            yield self.engine_row(SMS, f"{sms} SMs, all peers in turn", num_bytes, by_sms)

    def engine_row(self, engine: str, how: str, num_bytes: int, run: Callable[[], object]) -> dict:
        seconds, on_host = self.seconds(run)
        gbps, host_us = round(num_bytes / seconds / 1e9), round(1e6 * on_host)
        return {"engine": engine, "how": how, "gbps": gbps, "host_us": host_us}

    def calls(
        self, collective: Collective, route: Route, tensors: list[Tensor], shares: list[Tensor]
    ) -> Calls:
        totals = [torch.zeros(x.shape, device=self.device) for x in tensors]

        def cast() -> None:
            for pending in collective.casts(tensors, [route], self.group):
                pending.wait()

        def reduce() -> None:
            collective.start_reduce(shares, route, self.group).write_sums(totals)

        def cast_beside(product: Callable[[], object]) -> None:
            for pending in collective.casts(tensors, [route], self.group):
                product()
                pending.wait()

        return Calls(cast, reduce, cast_beside)

    def row(self, row: dict, calls: Calls, num_bytes: int) -> dict:
        for name, run in (("cast", calls.cast), ("reduce", calls.reduce)):
            seconds, on_host = self.seconds(run)
            row[f"{name}_us"] = round(1e6 * seconds, 1)
            row[f"{name}_gbps"] = round(num_bytes / seconds / 1e9)
            row[f"{name}_percent"] = round(100 * num_bytes / seconds / NVLINK)
            row[f"{name}_host_us"] = round(1e6 * on_host)
        if calls.cast_beside is not None:
            product = self.product_of(row["cast_us"] / 1e6)
            alone, _ = self.seconds(product)
            both, _ = self.seconds(lambda: calls.cast_beside(product))
            row["exposed_us"] = round(1e6 * (both - alone), 1)
        return row

    def product_of(self, seconds: float) -> Callable[[], object]:
        """Matrix products that take at least `seconds`: one needs about 1.4 ms."""
        repeats = 1 + int(seconds / 1.4e-3)
        return lambda: [self.matrix @ self.matrix for _ in range(repeats)]


def work(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=args.gpus,
        device_id=torch.device("cuda", rank),
    )
    me = Rank(rank, args)
    reasons = NativeCollective().refusals(me.group, me.device)
    if reasons:
        raise SystemExit("the native collective can not serve here: " + "; ".join(reasons))
    context = record.context(
        gpus=args.gpus,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        inputs=f"k and v, bfloat16, {args.heads} heads, head_dim {args.head_dim}; "
        f"documents of dtensor/tools/documents.py, seed {args.seed}",
        timing=f"median of {args.rounds} rounds of {args.calls} calls, slowest rank",
    )
    begin, found = time.monotonic(), []
    engines = list(me.engines()) if args.engines else []
    context["engines"] = engines
    if rank == 0:
        print(*map(json.dumps, engines), sep="\n", flush=True)
    for tokens in args.tokens:
        for row in me.measured(tokens):
            found.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
                record.write(args.output, context, found, to_markdown(context, found))
        late = torch.tensor([time.monotonic() - begin > args.max_seconds], device=me.device).float()
        dist.broadcast(late, 0, me.group)
        if late:
            break
    dist.destroy_process_group()


COLUMNS = {
    "ranges": "ranges",
    "tokens": "tokens/GPU",
    "runs": "runs",
    "megabytes": "MB",
    "contender": "contender",
    "sms": "SMs",
    "cast_us": "cast us",
    "cast_gbps": "GB/s",
    "cast_percent": "% of NVLink",
    "exposed_us": "exposed us",
    "cast_host_us": "host us",
    "reduce_us": "reduce us",
    "reduce_gbps": "GB/s",
    "reduce_percent": "% of NVLink",
    "reduce_host_us": "host us",
}


def to_markdown(context: dict, found: list[dict]) -> str:
    facts = {name: value for name, value in context.items() if name != "engines"}
    lines = ["# Group collectives", "", *(f"- {name}: {value}" for name, value in facts.items())]
    if context["engines"]:
        lines += ["", "| engine | how | GB/s | host us |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(map(str, x.values())) + " |" for x in context["engines"]]
    lines += ["", "| " + " | ".join(COLUMNS.values()) + " |", "|---" * len(COLUMNS) + "|"]
    for row in found:
        cells = [row.get(column, "") for column in COLUMNS]
        lines.append(
            "| " + " | ".join(f"{x:.1f}" if isinstance(x, float) else str(x) for x in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--gpus", type=int, default=torch.cuda.device_count())
    option("--output", type=Path, help="where to write: adds .json and .md")
    option("--masks", nargs="+", default=["full", "document_full", "document_causal"])
    option("--runs", type=int, nargs="+", default=[1, 8, 64, 512], help="of the synthetic ranges")
    option("--tokens", type=int, nargs="+", default=[8192, 16384], help="of each GPU")
    option("--heads", type=int, default=8, help="of k and v")
    option("--head-dim", type=int, default=128)
    option("--seed", type=int, default=42, help="of the documents")
    option("--rounds", type=int, default=5)
    option("--calls", type=int, default=10)
    option("--engines", action="store_true", help="measure the engines of native alone too")
    option("--max-seconds", type=float, default=3600.0, help="no more tokens after that")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, (args, f"{directory}/store"), nprocs=args.gpus)


if __name__ == "__main__":
    main()
