"""Simulates the cost of a placement (`magi-bench simulate`), for any number of ranks, without any of them.

For each number of ranks and each strategy: balance, key rows received and sent per rank (in units of the rows
a rank holds), beside all-gather, Ulysses and a lower bound, planning time on one thread, and the efficiency that
the cost model predicts, forward and backward. With `--preset` and `--measured`, every strategy of the field instead
(`field.py`).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from statistics import mean

import torch

from magi_bench import arguments, field
from magi_bench.progress import said_while
from magi_bench.workloads.lengths import SAMPLERS, sample
from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads, plan_communication
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.dispatch import STRATEGIES, Dispatch, dispatch
from magi_compile.dtensor.planning.ranges import total_by_owner, unite
from magi_compile.dtensor.planning.stages import choose_pass
from magi_compile.masks.library import MASKS
from magi_compile.masks.slices import AttnSlices


@dataclass(frozen=True)
class Outcome:
    """One strategy on one mask. Rows are in units of the rows a rank holds."""

    cp: int
    chunk: int
    strategy: str
    imbalance: float  # largest area over the mean
    recv_mean: float
    recv_max: float
    send_max: float
    bound: float  # no placement within the slack receives less on average
    gather: float  # an all-gather, or a ring
    ulysses: float
    plan_ms: float  # dispatch, communication and stages of one rank, forward and backward
    degree_fwd: int
    degree_bwd: int
    eff_fwd: float  # perfectly balanced compute alone, over the predicted time
    eff_bwd: float


def simulate(
    slices: AttnSlices,
    cp_size: int,
    strategy: str = "local",
    *,
    chunk_size: int | None = None,
    slack: float = 0.01,
    cost: CostModel | None = None,
    ulysses_rows: Callable[[int], float] | None = None,
    repeats: int = 3,
) -> Outcome:
    """Plans `slices` for `cp_size` ranks by a strategy of `dispatch.STRATEGIES` and evaluates the plan; the fastest
    of the planning runs counts. Rates are by default those of 64:8 heads on H200s, and `ulysses_rows` is what Ulysses
    receives per rank."""
    cost = cost or CostModel.of_heads()
    ulysses_rows = ulysses_rows or ulysses_rows_of(64, 8)
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        where = dispatch(
            slices, cp_size, chunk_size=chunk_size, strategy=strategy, slack=slack, cost=cost
        )
        rows = RankRows.of(where)
        loads = StageLoads.of(rows)
        forward = choose_pass(loads, cost, early=cost.starts_early)
        backward = choose_pass(loads, cost, backward=True)
        # A forward pass that begins early is cut in two like one stage.
        degrees = {1 if forward.is_early else forward.degree, backward.degree}
        plan_communication(rows, sorted(degrees)).stages(0)
        seconds.append(time.thread_time() - start)
    area, local = loads.area.double(), where.seqlen_local
    ideal = area.mean().item() * cost.seconds_per_area
    ideal_bwd = ideal * cost.backward_area_factor
    return Outcome(
        cp=cp_size,
        chunk=where.chunk_size,
        strategy=strategy,
        imbalance=(area.max() / area.mean()).item() if ideal else 1.0,
        recv_mean=loads.recv_rows.double().mean().item() / local,
        recv_max=int(loads.recv_rows.max()) / local,
        send_max=int(loads.send_rows.max()) / local,
        bound=lower_bound(where, slack),
        gather=float(cp_size - 1),
        ulysses=ulysses_rows(cp_size),
        plan_ms=min(seconds) * 1e3,
        degree_fwd=forward.degree,
        degree_bwd=backward.degree,
        eff_fwd=ideal / forward.seconds if ideal else 1.0,
        eff_bwd=ideal_bwd / backward.seconds if ideal else 1.0,
    )


def ulysses_rows_of(nheads_q: int, nheads_kv: int) -> Callable[[int], float]:
    """The traffic that one rank receives in a Ulysses forward, as key rows (K and V of all kv heads) over the rows it
    holds: q, k, v and out cross the ranks once, with kv heads repeated until every rank has one."""

    def rows(cp_size: int) -> float:
        return (cp_size - 1) / cp_size * (nheads_q + max(nheads_kv, cp_size)) / nheads_kv

    return rows


def lower_bound(where: Dispatch, slack: float) -> float:
    """A mean of received rows that no placement of these chunks within `slack` undercuts.

    A rank with a chunk that needs n rows has n rows, of which it holds at most `seqlen_local`. The chunks that
    need at least n rows have some area in total and some number, and a rank takes no more than its share of
    either, so at least so many ranks have n rows. Summed over all n. Chunks whose needs differ could make it
    worse; that is not counted.
    """
    table = where.table
    needed = total_by_owner(unite(table.needs, table.total), table.num_chunks)
    needed, order = needed.sort(descending=True)
    share = table.area.sum().double() / where.cp_size * (1 + slack)
    by_area = table.area[order].cumsum(0) / share.clamp(min=1)
    by_count = torch.arange(1, len(order) + 1, device="cpu").double() / where.chunks.shape[1]
    ranks = torch.maximum(by_area, by_count).sub(1e-9).ceil().clamp(max=where.cp_size)
    beyond = (needed - where.seqlen_local).clamp(min=0)
    steps = beyond - torch.cat([beyond[1:], beyond.new_zeros(1)])
    return float((ranks * steps).sum()) / where.cp_size / where.seqlen_local


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean of every figure over several packs; degrees are those of the first."""
    values = {x.name: [getattr(one, x.name) for one in outcomes] for x in fields(Outcome)}
    means = {k: mean(x) if isinstance(x[0], float) else x[0] for k, x in values.items()}
    return Outcome(**means)


def table_of(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as aligned text."""
    rows = [
        [f"{x:.3f}" if isinstance(x, float) else str(x) for x in vars(outcome).values()]
        for outcome in outcomes
    ]
    return field.aligned([[item.name for item in fields(Outcome)], *rows])


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Received rows and predicted efficiency over the number of ranks, as a picture. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (traffic, efficiency) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    ranks = sorted({outcome.cp for outcome in outcomes})
    for strategy in dict.fromkeys(outcome.strategy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.strategy == strategy]
        traffic.plot(ranks, [x.recv_mean for x in mine], marker="o", label=strategy)
        efficiency.plot(ranks, [x.eff_fwd for x in mine], marker="o", label=strategy)
    for name, style, label in (
        ("bound", ":", "least for equal work"),
        ("gather", "--", "all-gather or ring"),
        ("ulysses", "-.", "Ulysses"),
    ):
        traffic.plot(ranks, [getattr(x, name) for x in mine], style, color="grey", label=label)
    for axes in (traffic, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set_xlabel("ranks")
    traffic.set(yscale="symlog", ylim=(0, None), ylabel="rows received / rows held")
    efficiency.set(ylim=(0, 1.05), ylabel="predicted forward efficiency")
    handles = traffic.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _each(parse: Callable[[str], object]) -> Callable[[str], list[object]]:
    """Several, with commas in between."""
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def _strategy(text: str) -> str:
    if text not in STRATEGIES:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(STRATEGIES)}, got {text!r}")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    option, count, positive = parser.add_argument, arguments.count, arguments.positive
    option("--mask", choices=MASKS, default="document_causal")
    option("--tokens", type=arguments.length, default="512K", help="of the whole sequence")
    option("--cp", type=_each(count), default="8,64", help="numbers of ranks")
    option("--chunk", type=count, help="tokens of a chunk; by default chosen from the mask")
    option("--strategies", type=_each(_strategy), default=",".join(STRATEGIES))
    option("--lengths", choices=SAMPLERS, default="seeds", help="of documents")
    option("--packs", type=count, default=4, help="packs of documents to average over")
    option("--seed", type=int, default=42, help="of the packs")
    option(
        "--slack",
        type=arguments.number("a number, and not negative", lambda x: 0 <= x < inf),
        default=0.01,
    )
    option("--nheads-q", type=count, default=64)
    option("--nheads-kv", type=count, default=8)
    option("--head-dim", type=count, default=128)
    option("--tflops", type=positive, default=600.0, help="of one rank's attention forward")
    option("--gbytes", type=positive, default=350.0, help="per second into one rank")
    option("--plot", type=Path, help="where to write a picture")
    words = "predict every strategy of `ranks` on the seeds' masks"
    option("--preset", choices=("seeds",), help=words)
    option("--rank-tokens", type=arguments.length, default="8K", help="of a rank, with --preset")
    words = "ranks with fast links, with --preset"
    option("--domain", type=_each(count), default="8,72", help=words)
    option("--gbytes-far", type=positive, default=50.0, help="per second between domains")
    option("--measured", type=Path, nargs="+", default=[], help="results to compare with")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Prints a table, and draws."""
    if args.nheads_q % args.nheads_kv:
        raise ValueError(
            f"`--nheads-q` must be a multiple of `--nheads-kv` {args.nheads_kv}, got {args.nheads_q}"
        )
    if args.plot and not args.plot.parent.is_dir():
        raise FileNotFoundError(f"`--plot` must lie in a folder that exists, got {args.plot}")
    torch.set_num_threads(1)
    if args.preset or args.measured:
        return field.run(args)
    outcomes = measure(args)
    title = f"{args.mask}, {args.tokens} tokens"
    arguments.say(f"{title}, mean of {args.packs} packs, seed {args.seed}")
    arguments.say(table_of(outcomes))
    if args.plot:
        plot(outcomes, args.plot, title)
    return 0


def measure(args: argparse.Namespace) -> list[Outcome]:
    """The mean over packs of each number of ranks and strategy."""
    heads = args.nheads_q, args.nheads_kv
    rates = {"flops_per_second": args.tflops * 1e12, "bytes_per_second": args.gbytes * 1e9}
    options = {
        "chunk_size": args.chunk,
        "slack": args.slack,
        "cost": CostModel.of_heads(*heads, args.head_dim, **rates),
        "ulysses_rows": ulysses_rows_of(*heads),
    }
    packs = [sample(args.lengths, args.tokens, args.seed + at) for at in range(args.packs)]
    masks = [MASKS[args.mask](lengths).slices for lengths in packs]
    outcomes: list[Outcome] = []
    wanted = len(args.cp) * len(args.strategies)
    with said_while(lambda: f"{len(outcomes)} of {wanted} placements", arguments.say):
        for cp_size, strategy in itertools.product(args.cp, args.strategies):
            made = [simulate(slices, cp_size, strategy, **options) for slices in masks]
            outcomes.append(mean_outcome(made))
    return outcomes
