"""`magi-bench trees`: times every case in every tree, in turns: a process for each tree, on one device."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from magi_bench import arguments
from magi_bench.cases import Case, format_length
from magi_bench.process import Process, WorkerLost
from magi_bench.report.markdown import to_markdown
from magi_bench.report.tables import PASS_TITLES, ratios_by_contender
from magi_bench.results import provenance
from magi_bench.results.rows import Ledger, Row
from magi_bench.settings import Settings
from magi_bench.timing import summary
from magi_bench.workloads.presets import SEEDS_MASKS
from magi_bench.workloads.workload import MASKS, build

WORKER = Path(__file__).with_name("worker.py")
TURN_MS, MOST_CALLS = 10.0, 12
PREPARE_LIMIT_S, TURN_LIMIT_S = 180.0, 60.0
TOLERANCE = 0.03  # between fingerprints of results: trees round and add up in other orders
PASSES = ("fwd", "bwd")
QUICK = {"tokens": [128], "heads": ["2:1"], "head_dim": 16, "rounds": 2, "masks": ["causal"]}
DESCRIPTION = """The kernels of several trees of this package, interleaved on one device: whether a change costs speed, and what a
feature gives (patch it out of a copy). A tree is a folder that holds `magi_compile` and `csrc`, such as a git worktree. Each has
its own process and compiles its own kernels."""
NOTES = (
    "Each tree is a process, and all share one device. In every round each times one turn of calls, in another order; times are "
    "medians over rounds. On a GPU calls wait behind a spinning kernel, so the host takes no part. Ratios are times of a tree, of "
    "that of the first: above 1 the first is faster."
)


def cases(settings: Settings, heads: Sequence[str]) -> Iterator[Case]:
    """Cheap ones first."""
    for tokens, pair, which, mask in itertools.product(
        sorted(settings.tokens), heads, settings.passes, settings.masks
    ):
        nheads_q, nheads_kv = map(int, pair.split(":"))
        sizes = (nheads_q, nheads_kv, settings.head_dim, settings.dtype, settings.lengths)
        yield Case("trees", mask, tokens, *sizes, seed=settings.seed, which=which)


def request_of(case: Case, device: str) -> dict[str, Any]:
    """A case as the workers take it, which know no `Case`."""
    slices = build(case).slices
    ranges = (slices.q_ranges, slices.k_ranges, slices.mask_types[:, None])
    lists = zip(*(x.tolist() for x in ranges), strict=True)
    sizes = {
        name: getattr(case, name) for name in ("nheads_q", "nheads_kv", "head_dim", "dtype", "seed")
    }
    where = {"tokens": case.seqlen, "pass": case.which, "device": device}
    return {**sizes, **where, "slices": [list(itertools.chain(*parts)) for parts in lists]}


def measure(
    trees: Mapping[str, Path],
    every: Iterator[Case],
    settings: Settings,
    ledger: Ledger,
    say: Callable[[str], None],
) -> None:
    """A row for each case and tree, medians over rounds, or the reason why there is none."""
    begin, order = time.monotonic(), random.Random(settings.seed)
    workers = {name: _worker(path) for name, path in trees.items()}
    try:
        for case in every:
            if time.monotonic() - begin > settings.seconds:
                say("time limit: the longest cases were not run")
                break
            place = {"group": PASS_TITLES[case.which], "what": case.mask_label}
            try:
                outcomes = _timed(workers, request_of(case, settings.device), settings, order)
            except WorkerLost as lost:
                outcomes = _failed(workers, lost.status, f"{lost.status}: {lost.reason}")
            for name, outcome in outcomes.items():
                passes = {case.which: outcome["times"]} if "times" in outcome else {}
                status = {"passes": passes} if passes else {}
                who = {"label": name, "is_ours": name == next(iter(workers))}
                rest = {k: x for k, x in outcome.items() if k != "times"}
                ledger.add(case, name, {**place, **who, **rest, **status})
            say(
                f"{case.which} {case.mask} {format_length(case.seqlen)} {case.heads} d{case.head_dim}: {_in_words(outcomes)}"
            )
    finally:
        for worker in workers.values():
            worker.stop()


def _in_words(outcomes: Mapping[str, Row]) -> str:
    first, *others = outcomes.values()
    if "times" not in first:
        return str(first["reason"])
    names = list(outcomes)[1:]
    more = (f", {name} {x['times']['ratio']:.3f}" for name, x in zip(names, others, strict=True))
    return f"{first['times']['ms']:.3f} ms{''.join(more)}"


def _worker(tree: Path) -> Process:
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Process([str(WORKER)], os.environ | {"PYTHONPATH": os.pathsep.join(paths)})


def _failed(workers: Mapping[str, Process], status: str, reason: str) -> dict[str, Row]:
    return {name: {"status": status, "reason": reason} for name in workers}


def _timed(
    workers: Mapping[str, Process], case: dict[str, Any], settings: Settings, order: random.Random
) -> dict[str, Row]:
    request = {"op": "prepare", "case": case}
    results = {name: worker.ask(request, PREPARE_LIMIT_S) for name, worker in workers.items()}
    first, *others = results.values()
    for name, other in zip(list(results)[1:], others, strict=True):
        differences = [_furthest(x, y) for x, y in zip(first, other, strict=True)]
        if not all(x <= TOLERANCE for x in differences):
            reason = f"{name} has other results: fingerprints differ by {differences}"
            return _failed(workers, "wrong", reason)

    def turn(name: str, calls: int) -> float:
        return workers[name].ask({"op": "time", "calls": calls}, TURN_LIMIT_S)

    calls = max(1, min(MOST_CALLS, int(TURN_MS / turn(next(iter(workers)), 2))))
    found: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(settings.rounds.count):
        for name in order.sample(list(workers), len(workers)):
            found[name].append(turn(name, calls))
    times = {name: summary(x) for name, x in found.items()}
    yardstick = next(iter(times.values()))["ms"]
    return {
        name: {"status": "ok", "times": {**x, "calls": calls, "ratio": x["ms"] / yardstick}}
        for name, x in times.items()
    }


def _furthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference; NaN where there is one."""
    found = [abs(x - y) for x, y in zip(one, other, strict=True)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--tree",
        action="append",
        type=_tree,
        required=True,
        metavar="NAME=PATH",
        help="two or more; ratios are to the first",
    )
    parser.add_argument(
        "--masks", nargs="+", choices=MASKS, metavar="NAME", default=list(SEEDS_MASKS)
    )
    parser.add_argument(
        "--heads", nargs="+", type=arguments.heads, default=["32:8"], metavar="Q:KV"
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    names = ("tokens", "head_dim", "lengths", "device", "rounds", "seconds", "quick", "out")
    arguments.add(parser, names, tokens=[4096, 16384, 65536], seconds=300.0)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if a tree failed, or has other results than the first."""
    settings = arguments.settings_of(args, QUICK)
    trees = dict(args.tree)
    if len(trees) != len(args.tree) or len(trees) < 2:
        names = ", ".join(name for name, _ in args.tree)
        raise ValueError(
            f"`--tree` must be given twice or more, under different names, got {names}"
        )
    for name, path in trees.items():
        if not (path / "magi_compile" / "__init__.py").is_file():
            raise ValueError(
                f"`--tree {name}` must be a folder that holds magi_compile, got {path}"
            )
    command = [_without_path(x) for x in arguments.as_typed(args.command_line, args.out)]
    described = provenance.describe(settings.device, command)
    ledger = Ledger.fresh(args.out)
    ledger.begin(
        {**described, "title": f"Trees of this package, {described['device']}", "notes": NOTES}
    )
    measure(trees, cases(settings, args.heads), settings, ledger, arguments.say)
    for name, (mean, least, most) in ratios_by_contender(ledger.results).items():
        arguments.say(f"{name}: {mean:.3f} of the time, {least:.3f} to {most:.3f}")
    if args.out:
        Path(f"{args.out}.md").write_text(to_markdown(ledger.results))
    return int(any("reason" in row for row in ledger.results.rows.values()))


def _tree(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, Path(path).resolve()


def _without_path(word: str) -> str:
    """A tree by its name alone: where it lay is the machine's own."""
    name, is_tree, _ = word.partition("=")
    return f"{name}=..." if is_tree and not word.startswith("-") else word
