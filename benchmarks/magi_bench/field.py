"""The time of every strategy of `magi-bench ranks` on any number of ranks, by its moves and the rates of a machine; and
`magi-bench simulate --preset` and `--measured`: the field as predicted, beside what has been measured.

A strategy is its computation on the slowest rank and the rows that it moves, which wait for each other as its code has
it (`ranks/strategies`). Ranks are neighbours in **domains**: hosts, or racks whose links are as fast; a group that is
in several moves at the pace of its slowest link. Rows are rows of K and V of all kv heads, the unit of `CostModel`.
Ours is planned as always, and predicted by the cost model that plans it.

Left out: moving tokens to their ranks and back, which HybridCP's authors leave out too; several groups that share a
link; memory.

A measured row is predicted from the rate that its file has of one GPU on that mask, its heads, its documents and the
rates of links, so the error is that of balance and communication.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from magi_bench.arguments import say
from magi_bench.cases import BACKWARD, PASSES, Case
from magi_bench.progress import said_while
from magi_bench.ranks.strategies import contenders as strategies
from magi_bench.ranks.strategies.schedule import best_schedule
from magi_bench.report import chart, published
from magi_bench.results.rows import load
from magi_bench.workloads.lengths import sample
from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads
from magi_compile.dtensor.planning.cost import PACKING, CostModel
from magi_compile.dtensor.planning.dispatch import dispatch
from magi_compile.dtensor.planning.hosts import hosts_of
from magi_compile.dtensor.planning.stages import choose_pass
from magi_compile.masks.library import MASKS
from magi_compile.masks.slices import AttnSlices

#: Of the forward and the backward of our kernel's rate, on dense masks of an H200.
FLEX = (0.55, 0.5)
#: Ranks, and the share of visible pairs, from which a mask is planned in few chunks.
MANY, DENSE = 256, 0.1
#: Rows or keys that a kernel computes in vain at the edge of a document, on average.
EDGE = 64


class Predicted(NamedTuple):
    """A pass of the slowest rank, in seconds, and the rows that the rank which gets most receives forward."""

    forward: float  # seconds
    backward: float  # seconds
    near: float  # rows of its domain
    far: float  # rows of other domains


@dataclass(frozen=True, eq=False)
class Work:
    """One attention over all ranks."""

    mask: str  # a name in the library
    documents: Sequence[int]  # their lengths
    slices: AttnSlices  # the mask
    cp: int  # number of ranks
    domain: int  # ranks of a domain
    heads: tuple[int, int]  # of queries, and of keys and values
    cost: CostModel  # rates of the kernel on this mask, and of links

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.slices.seqlen_q // self.cp

    @cached_property
    def area(self) -> float:
        """Visible pairs of a rank, on average."""
        return self.slices.area() / self.cp

    @cached_property
    def known(self) -> list[int]:
        """The documents that the mask knows, or the whole sequence."""
        knows = strategies.DOCUMENT_MASKS.get(self.mask, True)
        return list(self.documents) if knows else [self.slices.seqlen_q]

    @cached_property
    def compute(self) -> tuple[float, float]:
        """Seconds of both passes of a rank, in perfect balance."""
        forward = self.area * self.cost.seconds_per_area
        return forward, forward * self.cost.backward_area_factor

    @cached_property
    def stage(self) -> tuple[float, float]:
        """The seconds of another call over a rank's queries, in both passes."""
        cost = self.cost
        rates = (cost.stage_seconds_per_row, cost.backward_stage_seconds_per_row)
        return self.tokens * rates[0], self.tokens * rates[1]

    def seconds(self, near: float, far: float) -> float:
        """Moving so many rows into a rank."""
        cost = self.cost
        return cost.latency_seconds + cost.seconds_per_row * max(near, far * cost.other_host_factor)

    def crossings(self, groups: Iterable[Sequence[int]]) -> tuple[int, int]:
        """The fewest ranks of its domain that a rank of `groups` has beside it, and others, with that."""
        nears, size = [], 1
        for ranks in groups:
            size = len(ranks)
            domains = [rank // self.domain for rank in ranks]
            nears.append(min(domains.count(x) for x in {*domains}) - 1)
        near = min(nears, default=0)
        return near, size - 1 - near

    def hop(self, rings: Iterable[Sequence[int]], rows: float) -> float:
        """The seconds in which all ranks of rings send rows to the next one."""
        is_far = any(
            a // self.domain != b // self.domain
            for ranks in rings
            for a, b in pairwise([*ranks, ranks[0]])
        )
        return self.seconds(*((0, rows) if is_far else (rows, 0)))

    def cut(self, parts: int, documents: Sequence[int] | None = None) -> float:
        """The factor by which a kernel computes more where documents are cut into parts, one for each of as many ranks,
        and each rank attends to each part by itself."""
        documents = self.known if documents is None else documents
        if parts == 1:
            return 1.0
        whole, in_parts = (
            sum(_tiles(length / n) for length in documents) * n * n for n in (1, parts)
        )
        return in_parts / whole


def _tiles(length: float) -> float:
    """Pairs that a kernel computes of a full document."""
    return (length + EDGE * min(1.0, length / (2 * EDGE))) * (length + EDGE)


Prediction = Predicted | str  # or why there is none

# Heads


def _exchanges(work: Work, groups: Sequence[Sequence[int]]) -> tuple[float, float, float, float]:
    """The seconds of q, k and v to ranks that share heads, and of out back; and rows received, near and far."""
    size, (nheads_q, nheads_kv) = len(groups[0]), work.heads
    if size == 1:
        return 0.0, 0.0, 0.0, 0.0
    near, far = work.crossings(groups)
    rows = work.tokens / size / (2 * nheads_kv)  # for each head, from each rank
    there, back = nheads_q + 2 * max(nheads_kv, size), nheads_q
    packing = PACKING * work.tokens / (2 * nheads_kv) * work.cost.seconds_per_row
    seconds = [work.seconds(near * rows * n, far * rows * n) + packing * n for n in (there, back)]
    total = rows * (there + back)
    return seconds[0], seconds[1], near * total, far * total


def ulysses(work: Work) -> Prediction:
    """All ranks share heads; kv heads are repeated where there are fewer. Nothing hides the exchanges."""
    if work.heads[0] % work.cp:
        return f"{work.heads[0]} query heads do not divide by {work.cp} ranks"
    there, back, near, far = _exchanges(work, [range(work.cp)])
    forward, backward = work.compute
    return Predicted(there + forward + back, back + backward + there, near, far)


# Rings


ON_MESH = (
    *(strategies.RingP2P, strategies.Usp, strategies.LoongTrain),
    strategies.LoongTrainContextFirst,
)


def on_mesh(work: Work, strategy: type[strategies.OnMesh]) -> Prediction:
    """A zigzag ring, or a ring of windows, of ranks that share heads."""
    mesh = strategy.mesh_of(work.cp, work.heads[1])
    if work.mask not in strategies.DOCUMENT_MASKS:
        return f"takes {', '.join(strategies.DOCUMENT_MASKS)}"
    places, heads = range(mesh.ring), range(mesh.ulysses)
    there, back, near, far = _exchanges(work, [[mesh.rank(i, j) for j in heads] for i in places])
    windows = [places[i : i + mesh.window] for i in places[:: mesh.window]]
    inner_rings = [[mesh.rank(i, j) for i in window] for window in windows for j in heads]
    outer_rings = [
        [mesh.rank(i, j) for i in places[k :: mesh.window]]
        for k in range(mesh.window)
        for j in heads
    ]
    # A place of the ring has the tokens of `ulysses` ranks, and a rank its share of the heads.
    rows, factor, seconds = float(work.tokens), work.cut(mesh.ring), []
    for which in (0, 1):
        compute = work.compute[which] * factor
        step = compute / mesh.ring + work.stage[which] * (mesh.ring > 1)
        moved = rows * (1 + which)  # gradients go around beside the keys of the next step
        inner, outer = work.hop(inner_rings, moved), work.hop(outer_rings, moved)
        window = step + (mesh.window - 1) * max(step, inner)
        slow = max(window, outer)
        total = window + (mesh.windows - 1) * slow
        if which and mesh.ring > 1:
            total += work.hop(outer_rings if mesh.windows > 1 else inner_rings, rows)
        seconds.append(there + total + back)
    is_far = any(work.crossings([ring])[1] for ring in inner_rings + outer_rings)
    around = rows * (mesh.ring - 1)
    near, far = near + around * (not is_far), far + around * is_far
    return Predicted(seconds[0], seconds[1], near, far)


def hybrid_cp(work: Work) -> Prediction:
    """Rounds of groups of ranks, each with documents of its own in one ring; a round is as long as its slowest."""
    if work.mask not in strategies.DOCUMENT_MASKS:
        return f"takes {', '.join(strategies.DOCUMENT_MASKS)}"
    is_causal, total, most_rows = work.mask.endswith("causal"), [0.0, 0.0], 0.0
    for groups in best_schedule(work.known, work.cp, work.tokens):
        ends = list(accumulate(group.size for group in groups))
        slowest = [0.0, 0.0]
        for group, end in zip(groups, ends, strict=True):
            if not group.lengths:
                continue
            ranks, rows = range(end - group.size, end), sum(group.lengths) / group.size
            area = sum(n * (n + 1) / 2 if is_causal else n * n for n in group.lengths)
            factor = work.cut(group.size, group.lengths)
            for which in (0, 1):
                compute = area / work.slices.area() * work.cp * work.compute[which] / group.size
                stage = work.stage[which] / work.tokens * rows * (group.size > 1)
                step = compute * factor / group.size + stage
                hop = work.hop([ranks], rows * (1 + which)) if group.size > 1 else 0.0
                seconds = step + (group.size - 1) * max(step, hop)
                if which and group.size > 1:
                    seconds += work.hop([ranks], rows)
                slowest[which] = max(slowest[which], seconds)
            most_rows = max(most_rows, rows * (group.size - 1))
        total = [a + b for a, b in zip(total, slowest, strict=True)]
    is_far = work.cp > work.domain
    return Predicted(total[0], total[1], most_rows * (not is_far), most_rows * is_far)


# Gathered keys


def _gathered(work: Work) -> tuple[float, float]:
    """The rows that a rank gets in an all-gather: NCCL's rings cross domains once for each, by the links of all
    ranks there."""
    far = work.cp - work.domain if work.cp > work.domain else 0
    return float((work.cp - 1) * work.tokens), far * work.tokens / min(work.domain, work.cp)


def _zigzag(work: Work) -> float:
    """The work of the heaviest rank over the mean, where the sequence is cut in a zigzag."""
    size = max(work.tokens // 2, 1)
    where = dispatch(work.slices, work.cp, chunk_size=size, strategy="zigzag")
    area = where.table.area[where.chunks].sum(1).double()
    return float(area.max() / area.mean()) if float(area.mean()) else 1.0


def ring_all_gather(work: Work) -> Prediction:
    """Keys come in parts of the heads; a part is computed while the next one comes."""
    rows, parts, imbalance = (
        _gathered(work),
        math.gcd(work.heads[1], strategies.GATHERS),
        _zigzag(work),
    )
    part = work.seconds(*(x / parts for x in rows))
    seconds = []
    for which in (0, 1):
        compute, moving = work.compute[which] * imbalance / parts, part * (1 + which)
        last = part if which else 0.0  # sums of gradients on their way home
        seconds.append(part + (parts - 1) * max(compute, moving) + compute + last)
    return Predicted(seconds[0], seconds[1], *rows)


def torch_head_tail(work: Work) -> Prediction:
    """PyTorch's: all keys are gathered, and then FlexAttention computes."""
    rows, imbalance = _gathered(work), _zigzag(work)
    moving = work.seconds(*rows)
    forward, backward = (x * imbalance / share for x, share in zip(work.compute, FLEX, strict=True))
    return Predicted(moving + forward, 2 * moving + backward, *rows)


# Ours


def loads_of(work: Work, share: int = 1) -> StageLoads:
    """The loads of each group of `share` neighbours, which share heads, by our placement."""
    groups = work.cp // share
    host = hosts_of([i * share // work.domain for i in range(groups)], groups)
    # Where every rank needs most chunks, four for each rank: finer ones would be millions of ranges.
    size = None
    if groups >= MANY and work.area > DENSE * work.slices.seqlen_q * work.tokens:
        size = max(work.tokens * share // 4, 1)
    where = dispatch(work.slices, groups, chunk_size=size, cost=work.cost, hosts=host)
    return StageLoads.of(RankRows.of(where), None if host is None else torch.tensor(host))


def _ours(work: Work, loads: StageLoads, *, relayed: bool | None) -> Prediction:
    if relayed and loads.relayed is None:
        return "there is one domain"
    cost = work.cost
    forward = choose_pass(loads, cost, early=cost.starts_early, relayed=relayed)
    backward = choose_pass(loads, cost, backward=True, relayed=relayed)
    way = loads.relayed if forward.is_relayed else loads
    assert way is not None
    near, far = (sum(hop[i] for hop in way.exchanges) for i in (0, 1))
    return Predicted(forward.seconds, backward.seconds, near, far)


def magi_heads(work: Work) -> Prediction:
    """Ours over groups of neighbours, whose ranks share the heads of their group's tokens."""
    mesh = strategies.Usp.mesh_of(work.cp, work.heads[1])
    share = mesh.ulysses
    if 1 in (share, mesh.ring):
        return f"{share} ranks share heads in {mesh.ring} groups"
    columns = [[mesh.rank(i, j) for j in range(share)] for i in range(mesh.ring)]
    there, back, near, far = _exchanges(work, columns)
    # A rank has the rows of all of its group, and its share of their heads.
    of_share = replace(work, cost=work.cost.of_share(share))
    found = _ours(of_share, loads_of(of_share, share), relayed=None)
    assert isinstance(found, Predicted)
    return Predicted(
        there + found.forward + back,
        there + found.backward + back,
        near + found.near / share,
        far + found.far / share,
    )


#: The strategies of others by name, and ours by way of shared heads.
OTHERS: dict[str, Callable[[Work], Prediction]] = {
    "magi-heads": magi_heads,
    "ulysses": ulysses,
    **{x.name: partial(on_mesh, strategy=x) for x in ON_MESH},
    "ring-all-gather": ring_all_gather,
    "hybrid-cp": hybrid_cp,
    "torch-head-tail": torch_head_tail,
}
#: Ours, and whether rows cross domains by way of relays.
OURS: dict[str, bool | None] = {"magi": None, "magi-flat": False, "magi-hierarchical": True}


def predict(work: Work, names: Iterable[str] = (*OURS, *OTHERS)) -> dict[str, Prediction]:
    """Predicts strategies of `OURS` and `OTHERS` by name, or says why they cannot run."""
    names, loads = list(names), None
    if OURS.keys() & names:
        loads = loads_of(work)
    found = {}
    for name in names:
        if name in OURS:
            assert loads is not None
            found[name] = _ours(work, loads, relayed=OURS[name])
        else:
            found[name] = OTHERS[name](work)
    return found


#: The masks of the seeds' benchmark of strategies.
SEEDS = ("full", "causal", "document_full", "document_causal")


class Measured(NamedTuple):
    """A measured time, and what it is predicted from."""

    source: str  # the file
    name: str  # of the contender
    which: str  # "fwd", "bwd" or "fwdbwd"
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
        passes = {"fwd": found.forward, "bwd": found.backward}
        seconds = passes.get(self.which, sum(passes.values()))
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
    found = [(Case(**row["case"]), row) for row in rows]
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
        both = _both_passes({x: rates.get(replace(case, which=x)) for x in PASSES})
        if row["contender"] not in OTHERS.keys() | OURS.keys() or both is None:
            continue
        # Rows have the lengths of documents whose sampler is gone.
        drawn = row.get("documents")
        documents = drawn or sample(case.lengths, case.seqlen * case.ranks, case.seed)
        heads = case.nheads_q, case.nheads_kv
        cost = cost_of(heads, both, args)
        slices = MASKS[case.mask](documents).slices
        work = Work(case.mask, documents, slices, case.ranks, case.ranks, heads, cost)
        tflops = row["passes"][case.which]["tflops"]
        yield Measured(path.stem, row["contender"], case.which, work, tflops)


def _both_passes(rates: Mapping[str, float | None]) -> tuple[float, float] | None:
    """The rates of a forward and of a backward, which was measured by itself or behind a forward."""
    forward, backward, total = (rates[which] for which in PASSES)
    if forward and total and not backward:
        backward = BACKWARD / ((1 + BACKWARD) / total - 1 / forward)
    return (forward, backward) if forward and backward else None


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


#: Ranks of a host of the machines that others published speeds of.
PUBLISHED_DOMAIN = 8


def plot(points: Sequence[Point], path: Path, title: str, documents: str) -> None:
    """TFLOP/s forward over the number of ranks, for each mask and domain: lines are predicted, crosses measured, and
    what others published of the same setup, `documents` drawn alike, is dashed. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    masks = list(dict.fromkeys(x.work.mask for x in points))
    domains = list(dict.fromkeys(x.work.domain for x in points))
    names = list(dict.fromkeys(x.name for x in points))
    ranks, told = sorted({x.work.cp for x in points}), False
    # Every second of tab20 is a pale one.
    colors = [pyplot.get_cmap("tab20")(2 * i % 20 + i // 10) for i in range(len(names))]
    sizes: dict[str, Any] = {
        "figsize": (4.2 * len(masks), 3.6 * len(domains) + 1.2),
        "layout": "constrained",
    }
    figure, grid = pyplot.subplots(len(domains), len(masks), squeeze=False, sharey=True, **sizes)
    for i, domain in enumerate(domains):
        for j, mask in enumerate(masks):
            axes = grid[i][j]
            here = [x for x in points if (x.work.domain, x.work.mask) == (domain, mask)]
            for name, color in zip(names, colors, strict=True):
                mine = [x for x in here if x.name == name]
                style = {"color": color, "linewidth": 2.5 if name.startswith("magi") else 1.2}
                places = [(x.work.cp, tflops[0]) for x in mine if (tflops := x.predicted())]
                if places:
                    axes.plot(*zip(*places, strict=True), label=f"{name}, predicted", **style)
                seen = [(x.work.cp, x.measured) for x in mine if x.measured is not None]
                if seen:
                    axes.plot(*zip(*seen, strict=True), "X", color=color, markersize=9)
            of_colors = dict(zip(names, colors, strict=True)) | {"": "black"}
            for curve in _published(here, documents) if domain == PUBLISHED_DOMAIN else ():
                dashes = tuple(float(x) for x in chart.DASHES[curve.number].split())
                style = {"color": of_colors[curve.strategy], "linestyle": (0, dashes)}
                seen = [x for x in curve.points.items() if x[0] in ranks]
                if seen:
                    axes.plot(*zip(*seen, strict=True), linewidth=1, label=curve.label, **style)
                    told = True
            axes.set_xscale("log", base=2)
            axes.set_xticks(ranks, [str(x) for x in ranks])
            axes.set(title=f"{mask}, domains of {domain}", xlabel="ranks", ylim=(0, None))
        grid[i][0].set_ylabel("TFLOP/s of a GPU, forward")
    legends = [axes.get_legend_handles_labels() for axes in grid.flat]
    handles = {label: x for some, labels in legends for x, label in zip(some, labels, strict=True)}
    place = {"loc": "outside lower center", "ncols": 5, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **place)
    words = [f"{title}. Lines are predicted; only crosses are measured"]
    figure.suptitle("\n".join([*words, *(published.STRATEGIES if told else ())]))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _published(points: Sequence[Point], documents: str) -> list[published.Curve]:
    """The curves of a panel, forward."""
    work = points[0].work
    setup = documents, f"{work.heads[0]}:{work.heads[1]}", "128"
    return published.of_strategies(setup, work.mask, "fwd", work.tokens)


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
        plot(points, args.plot, title, args.lengths)
    return 0
