"""`magi-bench step`: rows of four groups, at every length, forward and forward with backward."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from magi_bench import arguments, runner
from magi_bench.cases import Case
from magi_bench.contenders.base import Contender
from magi_bench.results.rows import Row
from magi_bench.settings import Settings
from magi_bench.step.contenders import CONTENDERS
from magi_bench.step.problem import Problem, Way

GROUPS = {
    "calls": "One attention a graph",
    "layers": "Many layers of attention in one graph, milliseconds a layer",
    "eager": "Eager calls, the mask at hand",
    "training": "A step of a small Llama: forward, loss, backward",
}
FROM_OUTSIDE, GRAPHS = "BlockMask from outside", "reduce-overhead"
WAYS = (
    Way("outside", "calls", "BlockMask from PyTorch's create_block_mask", "pytorch"),
    Way("outside_magi", "calls", "BlockMask from magi_compile.create_block_mask", "magi"),
    Way("inside", "calls", "mask made in the graph", "graph"),
    Way("new_layout", "calls", f"{FROM_OUTSIDE}, another in every call", "pytorch", True),
    Way("cuda_graphs", "calls", f'{FROM_OUTSIDE}, mode="{GRAPHS}"', "pytorch", mode=GRAPHS),
    Way("layers_outside", "layers", FROM_OUTSIDE, "pytorch"),
    Way("layers_inside", "layers", "mask made in the graph", "graph"),
    Way("eager", "eager", "packed tensors", "at hand"),
    Way(
        "training_inside",
        "training",
        "mask made in the graph, another in every step",
        "graph",
        True,
    ),
    Way("training_outside", "training", f"{FROM_OUTSIDE}, another in every step", "pytorch", True),
)
# A minute on two cores of a CPU, most of it compilation.
QUICK = {"tokens": [1024], "heads": "2:1", "head_dim": 64, "layers": [2], "train_layers": 1}
QUICK |= {"vocab": 256, "rounds": 3}
QUICK_ROWS = [way.name for way in WAYS if way.name not in ("layers_inside", "training_inside")]


class Step(runner.Suite):
    """Wall time of what a user gets."""

    title = "Wall time of attention and of training steps"
    notes = (
        "Milliseconds, host included: medians over rounds in which contenders take turns. Ratios are to ours, above 1 "
        "where ours is faster."
    )
    counts_work = True
    shares_graphs = True

    def __init__(self, settings: Settings):
        super().__init__(settings)
        taking_part = settings.contenders
        self._all = [x() for x in CONTENDERS if taking_part is None or x.name in taking_part]

    def cases(self) -> Iterator[Case]:
        for tokens in self.settings.tokens:
            self._problem = Problem(self.settings, tokens, {way.name: way for way in WAYS})
            for way in WAYS:
                if way.name in self.settings.rows:
                    yield from self._cases(way, tokens)

    def _cases(self, way: Way, tokens: int) -> Iterator[Case]:
        deep = {"layers": self.settings.layers, "training": (self.settings.train_layers,)}
        for layers in deep.get(way.group, (1,)):
            for which in self.settings.passes:
                more = {"lengths": "short", "layers": layers, "which": which}
                yield self.settings.case("step", way.name, tokens, **more)

    def contenders(self, case: Case) -> Sequence[Contender]:
        return [x for x in self._all if self._problem.ways[case.mask].group in x.groups]

    def problem(self, case: Case, contender: Contender) -> Problem:
        return self._problem

    def place(self, case: Case) -> Row:
        way = self._problem.ways[case.mask]
        return {"group": GROUPS[way.group], "what": way.label}

    def rates(self, case: Case, contender: Contender, ms: float) -> Row:
        deep = self._problem.ways[case.mask].group == "layers"
        return {"layer_ms": ms / case.layers} if deep else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    names = [*GROUPS, *(way.name for way in WAYS if way.name not in GROUPS)]
    option, count = parser.add_argument, arguments.count
    words = f"groups, or single rows: {', '.join(names)}"
    option("--rows", nargs="+", choices=names, metavar="NAME", help=words)
    option("--layers", nargs="+", type=count, default=[16], help="of attention in one graph")
    option("--train-layers", type=count, default=4, help="of the Llama")
    option("--contenders", nargs="+", choices=[x.name for x in CONTENDERS])
    more = ("tokens", "vocab", "dtype", "turn_ms", "seed")
    arguments.add(parser, (*arguments.RUN, *more), tokens=[1024, 2048, 4096, 8192, 32768])
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed, or if anybody was compiled again while time was taken."""
    asked = set(args.rows or (QUICK_ROWS if args.quick else GROUPS))
    rows = tuple(way.name for way in WAYS if {way.name, way.group} & asked)
    return runner.run_command(Step(arguments.settings_of(args, QUICK, rows=rows)), args)
