"""`magi-bench trees`: the kernels of several checkouts, in turns: a process for each tree, on one device."""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from magi_bench import arguments, runner
from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Ready, Rounds
from magi_bench.contenders.base import Contender
from magi_bench.gate import Check
from magi_bench.process import Process
from magi_bench.report.tables import ratios_by_contender
from magi_bench.workloads.presets import SEEDS_MASKS
from magi_bench.workloads.workload import MASKS, build

WORKER = Path(__file__).with_name("worker.py")
TURN_MS, MOST_CALLS = 10.0, 12
PREPARE_LIMIT_S, TURN_LIMIT_S = 180.0, 60.0
TOLERANCE = 0.03  # between fingerprints of results: trees round and add up in other orders
PASSES = ("fwd", "bwd")
QUICK = {"tokens": [128], "heads": ["2:1"], "head_dim": 16, "rounds": 2, "masks": ["causal"]}
DESCRIPTION = """The kernels of several trees of this package, interleaved on one device: whether a change costs
speed, and what a feature gives (patch it out of a copy). A tree is a folder that holds `magi_compile` and `csrc`,
such as a git worktree. Each has its own process and compiles its own kernels."""
NOTES = (
    "Each tree is a process, and all share one device. In every round each times one turn of calls, every other round "
    "in reverse; times are medians over rounds. On a GPU calls wait behind a spinning kernel, so the host takes no "
    "part. Ratios are times of a tree, of that of the first: above 1 the first is faster."
)


class Problem:
    """The calls of all trees, and the results of the first."""

    def __init__(self, case: Case, device: str):
        slices = build(case).slices
        ranges = (slices.q_ranges, slices.k_ranges, slices.mask_types[:, None])
        lists = zip(*(x.tolist() for x in ranges), strict=True)
        runs = [list(itertools.chain(*parts)) for parts in lists]
        self.request = asdict(case) | {"device": device, "slices": runs}
        self.first: list[list[float]] | None = None


class Tree(Contender):
    """A tree, in a process of its own, which knows no `Case`."""

    def __init__(self, name: str, path: Path, is_first: bool):
        self.name = self.label = name
        self.is_ours = is_first
        here = str(Path(__file__).parents[2])  # of magi_bench
        paths = [str(path), here, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.worker = Process([str(WORKER)], os.environ | {"PYTHONPATH": os.pathsep.join(paths)})

    def prepare(self, problem: Problem, case: Case) -> Ready:
        request = {"op": "prepare", "case": problem.request}
        self._found = self.worker.ask(request, PREPARE_LIMIT_S)

        def turn_ms(calls: int) -> float:
            return self.worker.ask({"op": "time", "calls": calls}, TURN_LIMIT_S)

        return Ready(list, turn_ms=turn_ms)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        """Holds the fingerprints of results to those of the first tree."""
        problem.first = problem.first or self._found
        names = (f"fingerprint {at}" for at in range(len(self._found)))
        pairs = zip(problem.first, self._found, strict=True)
        errors = {name: furthest(*pair) for name, pair in zip(names, pairs, strict=True)}
        return Check(case.seqlen, errors, dict.fromkeys(errors, TOLERANCE), "the first tree")


def furthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference; infinite where there is a NaN."""
    found = [abs(x - y) for x, y in zip(one, other, strict=True)]
    return math.inf if any(map(math.isnan, found)) else max(found)


class Trees(runner.Suite):
    """Several checkouts of this package."""

    title = "Trees of this package"
    notes = NOTES

    def __init__(self, settings: Settings, trees: Mapping[str, Path], heads: Sequence[str]):
        super().__init__(settings)
        self.heads = heads
        self.everyone: list[Tree] = [
            Tree(*item, is_first=not at) for at, item in enumerate(trees.items())
        ]
        self._problem = lru_cache(1)(Problem)

    def cases(self) -> Iterator[Case]:
        """Cheap ones first."""
        settings = self.settings
        for tokens, heads, which, mask in itertools.product(
            sorted(settings.tokens), self.heads, settings.passes, settings.masks
        ):
            nheads_q, nheads_kv = map(int, heads.split(":"))
            case = settings.case("trees", mask, tokens, which=which)
            yield replace(case, nheads_q=nheads_q, nheads_kv=nheads_kv)

    def problem(self, case: Case, contender: Contender) -> Problem:
        return self._problem(case, self.settings.device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = DESCRIPTION
    option, words = parser.add_argument, "two or more; ratios are to the first"
    tree: dict[str, Any] = {"action": "append", "type": _tree, "metavar": "NAME=PATH"}
    option("--tree", required=True, help=words, **tree)
    several: dict[str, Any] = {"nargs": "+"}
    option("--masks", choices=MASKS, metavar="NAME", default=list(SEEDS_MASKS), **several)
    option("--heads", type=arguments.heads, default=["32:8"], metavar="Q:KV", **several)
    option("--passes", choices=PASSES, default=list(PASSES), **several)
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
    settings = replace(settings, rounds=Rounds(args.rounds, TURN_MS, MOST_CALLS))
    suite = Trees(settings, trees, args.heads)
    done = runner.Runner(suite, command, args.out, arguments.say)
    try:
        rows = done.run()
    finally:
        for tree in suite.everyone:
            tree.worker.stop()
    runner.conclude(done)
    for name, (mean, least, most) in ratios_by_contender(done.ledger.results).items():
        arguments.say(f"{name}: {mean:.3f} of the time, {least:.3f} to {most:.3f}")
    return int(any("reason" in row for row in rows))


def _tree(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, Path(path).resolve()


def _without_path(word: str) -> str:
    """A tree by its name alone: where it lay is the machine's own."""
    name, is_tree, _ = word.partition("=")
    return f"{name}=..." if is_tree and not word.startswith("-") else word
