"""What a placement would cost, for any number of ranks, without any of them.

    python -m magi_compile.dtensor.tools.simulate --mask document_causal --tokens 512k --cp 8,64 --chunk 512

For each number of ranks and each strategy: balance, key rows received and sent per rank (in units of the rows
a rank holds), beside all-gather, Ulysses and a lower bound, planning time on one thread, and the efficiency that
the cost model predicts, forward and backward.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads, plan_communication
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.dispatch import (
    STRATEGIES,
    Dispatch,
    dispatch,
)
from magi_compile.dtensor.planning.ranges import total_by_owner, unite
from magi_compile.dtensor.planning.stages import (
    backward_seconds,
    choose_degree,
    early_seconds,
    forward_begins_early,
    forward_seconds,
)
from magi_compile.dtensor.tools.documents import document_packs
from magi_compile.masks import library
from magi_compile.masks.slices import AttnSlices

MASKS = (
    "full",
    "causal",
    "document_full",
    "document_causal",
    "block_causal_document",
    "sliding_window_causal",
    "block_diffusion",
    "sliding_tiles",
)


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
    """Plans `slices` for `cp_size` ranks and evaluates the plan.

    Args:
        slices: the mask.
        cp_size: number of ranks.
        strategy: a name in `dispatch.STRATEGIES`.
        chunk_size: tokens of a chunk; None chooses it from the mask.
        slack: as in `dispatch`.
        cost: rates; those of 64:8 heads on H200s by default.
        ulysses_rows: what Ulysses receives per rank, by the number of ranks; for 64:8 heads by default.
        repeats: planning runs, of which the fastest counts.

    Returns:
        The figures.
    """
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
        degree_fwd = choose_degree(loads, cost, early=cost.starts_early)
        degree_bwd = choose_degree(loads, cost, backward=True)
        is_early = cost.starts_early and degree_fwd == 0 and forward_begins_early(loads, cost)
        # A forward pass that begins early is cut in two like one stage.
        degrees = {1 if is_early else degree_fwd, degree_bwd}
        plan_communication(rows, sorted(degrees)).stages(0)
        seconds.append(time.thread_time() - start)
    area, local = loads.area.double(), where.seqlen_local
    ideal = area.mean().item() * cost.seconds_per_area
    ideal_bwd = ideal * cost.backward_area_factor
    forward, backward = (
        early_seconds(loads, cost) if is_early else forward_seconds(loads, degree_fwd, cost),
        backward_seconds(loads, degree_bwd, cost),
    )
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
        degree_fwd=degree_fwd,
        degree_bwd=degree_bwd,
        eff_fwd=ideal / forward if ideal else 1.0,
        eff_bwd=ideal_bwd / backward if ideal else 1.0,
    )


def ulysses_rows_of(nheads_q: int, nheads_kv: int) -> Callable[[int], float]:
    """What one rank receives in a Ulysses forward, as key rows (K and V of all kv heads) over the rows it holds:
    q, k, v and out cross the ranks once, with kv heads repeated until every rank has one."""

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
    first = outcomes[0]
    values = {}
    for item in fields(Outcome):
        value = getattr(first, item.name)
        if isinstance(value, float):
            value = sum(getattr(x, item.name) for x in outcomes) / len(outcomes)
        values[item.name] = value
    return Outcome(**values)


def table_of(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as aligned text."""
    names = [item.name for item in fields(Outcome)]
    rows = [names]
    for outcome in outcomes:
        values = (getattr(outcome, name) for name in names)
        rows.append([f"{x:.3f}" if isinstance(x, float) else str(x) for x in values])
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    return "\n".join(
        "  ".join(x.rjust(width) for x, width in zip(row, widths, strict=True)) for row in rows
    )


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Received rows and predicted efficiency over the number of ranks, as a picture. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (traffic, efficiency) = pyplot.subplots(1, 2, figsize=(12, 4))
    for strategy in dict.fromkeys(outcome.strategy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.strategy == strategy]
        ranks = [outcome.cp for outcome in mine]
        traffic.plot(ranks, [outcome.recv_mean for outcome in mine], marker="o", label=strategy)
        efficiency.plot(ranks, [outcome.eff_fwd for outcome in mine], marker="o", label=strategy)
    last = [outcome for outcome in outcomes if outcome.strategy == outcomes[-1].strategy]
    ranks = [outcome.cp for outcome in last]
    for name, style in (("bound", ":"), ("gather", "--"), ("ulysses", "-.")):
        values = [getattr(outcome, name) for outcome in last]
        traffic.plot(ranks, values, style, color="grey", label=name)
    for axes in (traffic, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set_xlabel("ranks")
    traffic.set(yscale="symlog", ylim=(0, None), ylabel="rows received / rows held")
    efficiency.set(ylim=(0, 1.05), ylabel="predicted forward efficiency")
    traffic.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def mask_of(name: str, lengths: Sequence[int]) -> AttnSlices:
    return getattr(library, name)(lengths).slices


def parse_count(text: str) -> int:
    """An integer with an optional k or m: 512k is 512 * 1024."""
    units = {"k": 1 << 10, "m": 1 << 20}
    unit = units.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(
            f"must be a positive count like 4096, 512k or 16m, got {text!r}"
        )
    return int(digits) * unit


def parse_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, and not negative, got {text!r}")
    return number


def parse_positive(text: str) -> float:
    number = parse_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return number


def parse_counts(text: str) -> list[int]:
    """Several counts, with commas in between."""
    return [parse_count(part.strip()) for part in text.split(",")]


def parse_strategies(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(STRATEGIES)}, got {name!r}")
    return names


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(
        prog="python -m magi_compile.dtensor.tools.simulate",
        description="What a placement would cost, for any number of ranks.",
    )
    option = parser.add_argument
    option("--mask", choices=MASKS, default="document_causal")
    option("--tokens", type=parse_count, default="512k", help="of the whole sequence")
    option("--cp", type=parse_counts, default="8,64", help="numbers of ranks")
    option("--chunk", type=parse_count, help="tokens of a chunk; by default chosen from the mask")
    option("--strategies", type=parse_strategies, default=",".join(STRATEGIES))
    option("--packs", type=parse_count, default=4, help="packs of documents to average over")
    option("--seed", type=int, default=42, help="of the packs")
    option("--slack", type=parse_number, default=0.01)
    option("--nheads-q", type=parse_count, default=64)
    option("--nheads-kv", type=parse_count, default=8)
    option("--head-dim", type=parse_count, default=128)
    option("--tflops", type=parse_positive, default=600.0, help="of one rank's attention forward")
    option("--gbytes", type=parse_positive, default=350.0, help="per second into one rank")
    option("--plot", type=Path, help="where to write a picture")
    options = parser.parse_args(arguments)
    if options.nheads_q % options.nheads_kv:
        parser.error(
            f"--nheads-q must be a multiple of --nheads-kv {options.nheads_kv}, got {options.nheads_q}"
        )
    if options.plot and not options.plot.parent.is_dir():
        parser.error(f"--plot must lie in a directory that exists, got {str(options.plot)!r}")

    torch.set_num_threads(1)
    cost = CostModel.of_heads(
        options.nheads_q,
        options.nheads_kv,
        options.head_dim,
        flops_per_second=options.tflops * 1e12,
        bytes_per_second=options.gbytes * 1e9,
    )
    packs = document_packs(options.tokens, options.packs, options.seed)
    masks = [mask_of(options.mask, lengths) for lengths in packs]
    outcomes = [
        mean_outcome(
            [
                simulate(
                    slices,
                    cp_size,
                    strategy,
                    chunk_size=options.chunk,
                    slack=options.slack,
                    cost=cost,
                    ulysses_rows=ulysses_rows_of(options.nheads_q, options.nheads_kv),
                )
                for slices in masks
            ]
        )
        for cp_size in options.cp
        for strategy in options.strategies
    ]
    print(
        f"{options.mask}, {options.tokens} tokens, mean of {options.packs} packs, seed {options.seed}"
    )
    print(table_of(outcomes))
    if options.plot:
        plot(outcomes, options.plot, f"{options.mask}, {options.tokens} tokens")
    return outcomes


if __name__ == "__main__":
    main()
