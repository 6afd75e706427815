"""`magi-bench simulate --preset` and `--measured`: the field as predicted, beside what has been measured.

Every figure says which of the two it is. A measured row is predicted from the rate that its file has of one GPU on that
mask, its heads, its documents and the rates of links, so the error is that of balance and communication.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from magi_bench.arguments import say
from magi_bench.field import OTHERS, OURS, Predicted, Work, loads_of, predict
from magi_bench.progress import said_while
from magi_bench.workloads.lengths import packs_of_corpus, sample
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.stages import backward_seconds, forward_seconds
from magi_compile.masks.library import MASKS

#: The masks of the seeds' benchmark of strategies.
SEEDS = ("full", "causal", "document_full", "document_causal")
#: Names of contenders in older files.
OLD_NAMES = {"ulysses-magi": "ulysses"}
#: FLOPs of a backward over those of a forward, as benchmarks count them.
BACKWARD = 2.5


class Measured(NamedTuple):
    """A measured time, and what it is predicted from.

    Attributes:
        source: the file.
        name: of the contender.
        which: "fwd", "bwd" or "fwdbwd".
        work: the attention, at the rates of one GPU.
        tflops: of a GPU.
        note: how it moved rows, if that was chosen for it.
        stages: of remote keys; None where the cost model chose.
    """

    source: str
    name: str
    which: str
    work: Work
    tflops: float
    note: str = ""
    stages: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """The measurement that a prediction is beside."""
        work = self.work
        return self.name, work.mask, work.tokens, work.cp, work.heads, self.which

    def predicted(self) -> float | None:
        """TFLOP/s of a GPU; None where the model has no such contender."""
        if self.stages is None:
            found = predict(self.work, [self.name])[self.name]
            if not isinstance(found, Predicted):
                return None
            seconds = {"fwd": found.forward, "bwd": found.backward}
        else:
            loads, cost = loads_of(self.work), self.work.cost
            seconds = {
                "fwd": forward_seconds(loads, self.stages, cost),
                "bwd": backward_seconds(loads, self.stages, cost),
            }
        seconds["fwdbwd"] = seconds["fwd"] + seconds["bwd"]
        return tflops_of(self.work, self.which, seconds[self.which])


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
    """The rows of a file of `magi-bench ranks`, or of the script before it, that a strategy of the model has.

    Args:
        path: a JSON file.
        args: with the rates of links.

    Yields:
        What was measured.

    Raises:
        ValueError: the file has no such rows.
    """
    content = json.loads(path.read_text())
    context, rows = content["context"], content["rows"]
    if "ranks" in context and "settings" in context:
        yield from _of_command(path.stem, context, rows, args)
    elif rows and "one_gpu_tflops" in rows[0]:
        yield from _of_script(path.stem, context, rows, args)
    else:
        raise ValueError(f"`--measured` must be results of `magi-bench ranks`, got {path}")


def _of_command(
    source: str, context: dict[str, Any], rows: list[dict[str, Any]], args: argparse.Namespace
) -> Iterator[Measured]:
    settings, cp = context["settings"], context["ranks"]
    heads = settings["nheads_q"], settings["nheads_kv"]
    rates = {
        (row["mask"], row["tokens"], row["pass"]): row["tflops"]
        for row in rows
        if row["contender"] == "one-rank" and row.get("tflops")
    }
    for row in rows:
        name = OLD_NAMES.get(row["contender"], row["contender"])
        place = row["mask"], row["tokens"]
        both = [rates.get((*place, which)) for which in ("fwd", "fwdbwd")]
        if name not in OTHERS.keys() | OURS.keys() or not row.get("tflops") or None in both:
            continue
        forward, total = (float(x or 0) for x in both)
        backward = BACKWARD / ((1 + BACKWARD) / total - 1 / forward)
        documents = sample(settings["lengths"], row["tokens"] * cp, settings["seed"])
        cost = cost_of(heads, (forward, backward), args)
        slices = MASKS[row["mask"]](documents).slices
        work = Work(row["mask"], documents, slices, cp, cp, heads, cost)
        yield Measured(source, name, row["pass"], work, row["tflops"])


def _of_script(
    source: str, context: dict[str, Any], rows: list[dict[str, Any]], args: argparse.Namespace
) -> Iterator[Measured]:
    cp = int(context["ranks"])
    for row in rows:
        (documents,) = packs_of_corpus(row["tokens"] * cp, 1)
        slices = MASKS[row["mask"]](documents).slices
        forward, backward = row["one_gpu_tflops"]
        cost = cost_of((64, 8), (forward, backward), args)
        work = Work(row["mask"], documents, slices, cp, cp, (64, 8), cost)
        stages = None if row["stages"] == "auto" else int(row["stages"])
        note = f"{row['collective']}, stages {row['stages']}"
        for which, tflops in zip(("fwd", "bwd"), row["tflops"], strict=True):
            yield Measured(source, "magi", which, work, tflops, note, stages)


def compare(rows: Sequence[Measured]) -> str:
    """A table of measured and predicted TFLOP/s with errors, and their means."""
    lines = [
        ["file", "mask", "tokens", "ranks", "pass", "strategy", "measured", "predicted", "error"]
    ]
    errors: dict[str, list[float]] = {}
    for row in rows:
        predicted = row.predicted()
        if predicted is None:
            continue
        error, work = predicted / row.tflops - 1, row.work
        kind = row.name if row.stages is None else f"{row.name} with stages that were chosen for it"
        errors.setdefault(kind, []).append(abs(error))
        name = f"{row.name} ({row.note})" if row.note else row.name
        where = [row.source, work.mask, str(work.tokens), str(work.cp), row.which, name]
        lines.append([*where, f"{row.tflops:.0f}", f"{predicted:.0f}", f"{error:+.1%}"])
    everything = [x for found in errors.values() for x in found]
    if not everything:
        return "nothing of what was measured is predicted"
    means = [f"{name} {sum(x) / len(x):.1%} of {len(x)}" for name, x in errors.items()]
    total = (
        f"mean error {sum(everything) / len(everything):.1%}, median {median(everything):.1%}, of "
        f"{len(everything)} rows"
    )
    return "\n".join([aligned(lines), f"{total}; {', '.join(means)}"])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(x.rjust(width) for x, width in zip(line, widths, strict=True)) for line in lines
    )


class Point(NamedTuple):
    """A prediction at a number of ranks, and what was measured there.

    Attributes:
        work: the attention.
        name: of the strategy.
        found: the prediction, or why there is none.
        measured: TFLOP/s forward and backward; None where nobody has measured.
    """

    work: Work
    name: str
    found: Predicted | str
    measured: tuple[float | None, float | None]

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
    # Of several with one key the first: by peers' reads, where a file has them.
    known: dict[tuple[Any, ...], float] = {}
    for row in measured:
        if row.stages is None:
            known.setdefault(row.key, row.tflops)
    for mask in SEEDS:
        for cp in args.cp:
            documents = sample(args.lengths, args.rank_tokens * cp, args.seed)
            slices = MASKS[mask](documents).slices
            for domain in args.domain:
                work = Work(mask, documents, slices, cp, domain, heads, cost)
                for name, found in predict(work).items():
                    # Measurements are of one host.
                    keys = ((name, mask, work.tokens, cp, heads, x) for x in ("fwd", "bwd"))
                    there = cp <= domain and name != "magi-flat"
                    forward, backward = (known.get(key) if there else None for key in keys)
                    yield Point(work, name, found, (forward, backward))


def table_of(points: Sequence[Point]) -> str:
    """TFLOP/s of a GPU, rows that cross, and what is measured, as aligned text."""
    names = ["mask", "ranks", "domain", "strategy", "predicted fwd", "bwd", "measured fwd", "bwd"]
    lines = [[*names, "near rows", "far rows"]]
    refused: dict[str, None] = {}
    for work, name, found, measured in points:
        tflops = Point(work, name, found, measured).predicted()
        if tflops is None or isinstance(found, str):
            refused[f"{name}: {found}"] = None
            continue
        told = ["-" if x is None else f"{x:.0f}" for x in measured]
        rows = [f"{x / work.tokens:.2f}" for x in (found.near, found.far)]
        place = [work.mask, str(work.cp), str(work.domain), name]
        lines.append([*place, *(f"{x:.0f}" for x in tflops), *told, *rows])
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
    # Every second of tab20 is a pale one.
    colors = [pyplot.get_cmap("tab20")(2 * i % 20 + i // 10) for i in range(len(names))]
    figure, grid = pyplot.subplots(
        len(domains),
        len(masks),
        figsize=(4.2 * len(masks), 3.6 * len(domains)),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for i, domain in enumerate(domains):
        for j, mask in enumerate(masks):
            axes = grid[i][j]
            for number, name in enumerate(names):
                mine = [
                    x
                    for x in points
                    if (x.work.mask, x.work.domain, x.name) == (mask, domain, name)
                ]
                style = {"color": colors[number], "linestyle": "-" if name in OURS else "--"}
                places = [(x.work.cp, tflops[0]) for x in mine if (tflops := x.predicted())]
                if places:
                    axes.plot(*zip(*places, strict=True), label=f"{name}, predicted", **style)
                seen = [(x.work.cp, x.measured[0]) for x in mine if x.measured[0] is not None]
                if seen:
                    axes.plot(*zip(*seen, strict=True), "X", color=colors[number], markersize=9)
            ranks = sorted({x.work.cp for x in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ranks, [str(x) for x in ranks])
            axes.set(title=f"{mask}, domains of {domain}", xlabel="ranks", ylim=(0, None))
        grid[i][0].set_ylabel("TFLOP/s of a GPU, forward")
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False
    )
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
