"""`magi-bench simulate --preset` and `--measured`: the field as predicted, beside what has been measured.

Every figure says which of the two it is. A measured row is predicted from the rate that its file has of one GPU on that
mask, its heads, its documents and the rates of links, so the error is that of balance and communication.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from magi_bench.arguments import say
from magi_bench.cases import Case
from magi_bench.field import OTHERS, OURS, Predicted, Work, predict
from magi_bench.progress import said_while
from magi_bench.results.rows import load
from magi_bench.workloads.lengths import sample
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.masks.library import MASKS

#: The masks of the seeds' benchmark of strategies.
SEEDS = ("full", "causal", "document_full", "document_causal")
#: FLOPs of a backward over those of a forward, as benchmarks count them.
BACKWARD = 2.5


class Measured(NamedTuple):
    """A measured time, and what it is predicted from."""

    source: str  # the file
    name: str  # of the contender
    which: str  # "fwd" or "fwdbwd"
    work: Work  # the attention, at the rates of one GPU
    tflops: float  # of a GPU

    @property
    def key(self) -> tuple[Any, ...]:
        """The measurement that a prediction is beside."""
        work = self.work
        return self.name, work.mask, work.tokens, work.cp, work.heads, self.which

    def predicted(self) -> float | None:
        """TFLOP/s of a GPU; None where the strategy cannot run."""
        found = predict(self.work, [self.name])[self.name]
        if isinstance(found, str):
            return None
        seconds = found.forward + (found.backward if self.which == "fwdbwd" else 0.0)
        return tflops_of(self.work, self.which, seconds)


def tflops_of(work: Work, which: str, seconds: float) -> float:
    """TFLOP/s of a rank for the mean visible area of its queries, with head_dim 128."""
    factor = {"fwd": 1.0, "bwd": BACKWARD, "fwdbwd": 1 + BACKWARD}[which]
    return factor * 4 * work.area * work.heads[0] * 128 / seconds / 1e12


def cost_of(
    heads: tuple[int, int], tflops: tuple[float, float], args: argparse.Namespace
) -> CostModel:
    """The rates of a kernel with such TFLOP/s in both passes, and of links as `args` say."""
    forward, backward = tflops
    rates = {
        "flops_per_second": forward * 1e12,
        "bytes_per_second": args.gbytes * 1e9,
        "bytes_per_second_between_hosts": args.gbytes_far * 1e9,
    }
    model = CostModel.of_heads(*heads, 128, **rates)
    factor = BACKWARD * forward / backward
    return CostModel(**{**vars(model), "backward_area_factor": factor})


def measured_in(path: Path, args: argparse.Namespace) -> Iterator[Measured]:
    """The rows of a file of `magi-bench ranks` that a strategy of the model has; a ValueError if there are none."""
    rows = [row for row in load([path]).ok_rows() if row["case"]["level"] == "ranks"]
    found = [(Case.from_json(row["case"]), row) for row in rows]
    rates = {
        case: row["passes"][case.which]["tflops"]
        for case, row in found
        if row["contender"] == "one-rank"
    }
    if not rates:
        raise ValueError(
            f"`--measured` must be results of `magi-bench ranks` with `one-rank`, got {path}"
        )
    for case, row in found:
        both = [rates.get(replace(case, which=which)) for which in ("fwd", "fwdbwd")]
        if row["contender"] not in OTHERS.keys() | OURS.keys() or None in both:
            continue
        forward, total = (float(x or 0) for x in both)
        backward = BACKWARD / ((1 + BACKWARD) / total - 1 / forward)
        documents = sample(case.lengths, case.seqlen * case.ranks, case.seed)
        heads = case.nheads_q, case.nheads_kv
        cost = cost_of(heads, (forward, backward), args)
        slices = MASKS[case.mask](documents).slices
        work = Work(case.mask, documents, slices, case.ranks, case.ranks, heads, cost)
        tflops = row["passes"][case.which]["tflops"]
        yield Measured(path.stem, row["contender"], case.which, work, tflops)


def compare(rows: Sequence[Measured]) -> str:
    """A table of measured and predicted TFLOP/s with errors, and their means."""
    lines = [
        ["file", "mask", "tokens", "ranks", "pass", "strategy", "measured", "predicted", "error"]
    ]
    errors: dict[str, list[float]] = {}
    for row in rows:
        predicted, work = row.predicted(), row.work
        if predicted is None:
            continue
        error = predicted / row.tflops - 1
        errors.setdefault(row.name, []).append(abs(error))
        where = [row.source, work.mask, str(work.tokens), str(work.cp), row.which, row.name]
        lines.append([*where, f"{row.tflops:.0f}", f"{predicted:.0f}", f"{error:+.1%}"])
    every = [x for found in errors.values() for x in found]
    if not every:
        return "nothing of what was measured is predicted"
    means = ", ".join(f"{name} {mean(x):.1%} of {len(x)}" for name, x in errors.items())
    total = f"mean error {mean(every):.1%}, median {median(every):.1%}, of {len(every)} rows"
    return f"{aligned(lines)}\n{total}; {means}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(x.rjust(width) for x, width in zip(line, widths, strict=True)) for line in lines
    )


class Point(NamedTuple):
    """A prediction at a number of ranks, and what was measured there: TFLOP/s of a forward."""

    work: Work
    name: str
    found: Predicted | str
    measured: float | None

    def predicted(self) -> tuple[float, float] | None:
        """TFLOP/s forward and backward."""
        if isinstance(self.found, str):
            return None
        passes = (("fwd", self.found.forward), ("bwd", self.found.backward))
        forward, backward = (tflops_of(self.work, *x) for x in passes)
        return forward, backward


def predict_field(args: argparse.Namespace, measured: Sequence[Measured]) -> Iterator[Point]:
    """Every strategy on every mask, number of ranks and domain of `args`."""
    heads = args.nheads_q, args.nheads_kv
    cost = cost_of(heads, (args.tflops, args.tflops), args)
    known = {row.key: row.tflops for row in measured}
    for mask in SEEDS:
        for cp in args.cp:
            documents = sample(args.lengths, args.rank_tokens * cp, args.seed)
            slices = MASKS[mask](documents).slices
            for domain in args.domain:
                work = Work(mask, documents, slices, cp, domain, heads, cost)
                for name, found in predict(work).items():
                    # Measurements are of one host.
                    there = cp <= domain and name != "magi-flat"
                    key = (name, mask, work.tokens, cp, heads, "fwd")
                    yield Point(work, name, found, known.get(key) if there else None)


def table_of(points: Sequence[Point]) -> str:
    """TFLOP/s of a GPU, rows that cross, and what is measured, as aligned text."""
    names = ["mask", "ranks", "domain", "strategy", "predicted fwd", "bwd", "measured fwd"]
    lines = [[*names, "near rows", "far rows"]]
    refused: dict[str, None] = {}
    for point in points:
        work, name, found, measured = point
        tflops = point.predicted()
        if tflops is None or isinstance(found, str):
            refused[f"{name}: {found}"] = None
            continue
        told = "-" if measured is None else f"{measured:.0f}"
        rows = [f"{x / work.tokens:.2f}" for x in (found.near, found.far)]
        place = [work.mask, str(work.cp), str(work.domain), name]
        lines.append([*place, *(f"{x:.0f}" for x in tflops), told, *rows])
    notes = "\n".join(f"  {note}" for note in refused)
    return aligned(lines) + (f"\nnot predicted:\n{notes}" if refused else "")


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """TFLOP/s forward over the number of ranks, for each mask and domain: lines are predicted, crosses measured. Needs
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    masks = list(dict.fromkeys(x.work.mask for x in points))
    domains = list(dict.fromkeys(x.work.domain for x in points))
    names = list(dict.fromkeys(x.name for x in points))
    ranks = sorted({x.work.cp for x in points})
    # Every second of tab20 is a pale one.
    colors = [pyplot.get_cmap("tab20")(2 * i % 20 + i // 10) for i in range(len(names))]
    sizes: dict[str, Any] = {
        "figsize": (4.2 * len(masks), 3.6 * len(domains)),
        "layout": "constrained",
    }
    figure, grid = pyplot.subplots(len(domains), len(masks), squeeze=False, sharey=True, **sizes)
    for i, domain in enumerate(domains):
        for j, mask in enumerate(masks):
            axes = grid[i][j]
            here = [x for x in points if (x.work.domain, x.work.mask) == (domain, mask)]
            for name, color in zip(names, colors, strict=True):
                mine = [x for x in here if x.name == name]
                style = {"color": color, "linestyle": "-" if name in OURS else "--"}
                places = [(x.work.cp, tflops[0]) for x in mine if (tflops := x.predicted())]
                if places:
                    axes.plot(*zip(*places, strict=True), label=f"{name}, predicted", **style)
                seen = [(x.work.cp, x.measured) for x in mine if x.measured is not None]
                if seen:
                    axes.plot(*zip(*seen, strict=True), "X", color=color, markersize=9)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ranks, [str(x) for x in ranks])
            axes.set(title=f"{mask}, domains of {domain}", xlabel="ranks", ylim=(0, None))
        grid[i][0].set_ylabel("TFLOP/s of a GPU, forward")
    handles = grid[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(f"{title}. Lines are predicted; only crosses are measured")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> int:
    """Prints the comparison with what was measured, the predictions, or both; draws."""
    measured = [row for path in args.measured for row in measured_in(path, args)]
    if args.measured:
        say(compare(measured))
    if not args.preset:
        return 0
    wanted = len(SEEDS) * len(args.cp) * len(args.domain)
    points: list[Point] = []

    def doing() -> str:
        return f"{len({id(x.work) for x in list(points)})} of {wanted} masks, ranks and domains"

    with said_while(doing, say):
        points.extend(predict_field(args, measured))
    title = (
        f"heads {args.nheads_q}:{args.nheads_kv}, {args.rank_tokens} tokens a rank, {args.tflops:g} TFLOP/s, "
        f"{args.gbytes:g} GB/s in a domain, {args.gbytes_far:g} GB/s between domains"
    )
    say(
        f"{title}, documents {args.lengths}, seed {args.seed}; rows are over those that a rank holds"
    )
    say(table_of(points))
    if args.plot:
        plot(points, args.plot, title)
    return 0
