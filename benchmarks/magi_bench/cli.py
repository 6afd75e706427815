"""The command line:
`magi-bench
kernel | sparse | step | mods | ranks | doors | first | trees | plans | simulate | masks | report | chart | compare`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from magi_bench import arguments, masks, plans, simulate, step
from magi_bench.arguments import say
from magi_bench.doors import suite as doors
from magi_bench.first import suite as first
from magi_bench.kernel import command as kernel
from magi_bench.mods import suite as mods
from magi_bench.ranks import suite as ranks
from magi_bench.results import rows
from magi_bench.results.compare import compare, to_text
from magi_bench.trees import suite as trees
from magi_bench.workloads.workload import MASKS
from magi_compile import __version__

COMMANDS = {
    "step": (step, "wall time of calls and of training steps, beside peers"),
    "mods": (mods, "mask_mods and score_mods of users, beside FlexAttention"),
    "ranks": (ranks, "attention and training steps across ranks, beside peers"),
    "doors": (doors, "training steps of transformers' and torchtitan's models"),
    "first": (first, "seconds of the first call, in fresh processes with empty caches"),
    "trees": (trees, "several checkouts of this package, interleaved"),
    "plans": (
        plans,
        "what the host does before a kernel runs: masks to slices, slices to tile plans",
    ),
    "simulate": (simulate, "what a placement on ranks would cost, without any of them"),
    "masks": (masks, "list the masks, or draw one"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad arguments end in a message and exit code 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.command_line = ["magi-bench", *(sys.argv[1:] if argv is None else argv)]
    try:
        return args.command(args)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"magi-bench: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="magi-bench", description="Benchmarks of attention.")
    version = f"magi-bench of magi_compile {__version__}, PyTorch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    for level, summary in (
        ("kernel", "masks that all heads share, on one device"),
        ("sparse", "block-sparse masks of each head, on one device"),
    ):
        kernel.add_arguments(commands.add_parser(level, help=summary), level)
    for name, (module, summary) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=summary))
    report = commands.add_parser("report", help="Markdown and one self-contained HTML page")
    report.add_argument("results", type=Path, nargs="+", help="files of results")
    report.add_argument("--contenders", nargs="+", metavar="NAME", help="only these")
    report.add_argument("--output", type=Path, help="without suffix; by default beside the first")
    report.add_argument("--title", help="by default that of the first run")
    report.add_argument("--note", default="", help="a sentence below the title")
    report.add_argument("--readme", type=Path, help="rewrite the marked table of this file")
    report.set_defaults(command=_report)
    chart = commands.add_parser("chart", help="one picture of some contenders at one length")
    chart.add_argument("results", type=Path, nargs="+", help="files of results")
    chart.add_argument("--seqlen", type=arguments.length, required=True)
    chart.add_argument("--masks", nargs="+", required=True, choices=MASKS, metavar="NAME")
    chart.add_argument("--contenders", nargs="+", required=True, metavar="NAME")
    words = "lines over the number of ranks, of results of `ranks`; --seqlen is of a rank"
    chart.add_argument("--by-ranks", action="store_true", help=words)
    chart.add_argument("--output", type=Path, required=True, help="an .svg")
    chart.set_defaults(command=_chart)
    versus = commands.add_parser("compare", help="what is faster in B than in A, beyond noise")
    versus.add_argument("before", type=Path)
    versus.add_argument("after", type=Path)
    versus.add_argument("--threshold", type=float, default=0.03, help="changes below do not count")
    versus.add_argument("--fail-on-regression", action="store_true", help="exit code 1")
    versus.set_defaults(command=_compare)
    return parser


def _report(args: argparse.Namespace) -> int:
    from magi_bench.report.pages import write_readme_table, write_report

    results = rows.load(args.results)
    if args.contenders:
        results = results.only(args.contenders)
    output = args.output or args.results[0].with_suffix("")
    for path in write_report(results, output, args.title, args.note):
        say(str(path))
    if args.readme:
        write_readme_table(results, args.readme)
    return 0


def _chart(args: argparse.Namespace) -> int:
    from magi_bench.report.chart import to_chart

    labels = [name.replace("_", " ") for name in args.masks]
    results = rows.load(args.results)
    made = to_chart(results, args.seqlen, labels, args.contenders, by_ranks=args.by_ranks)
    args.output.write_text(made)
    say(str(args.output))
    return 0


def _compare(args: argparse.Namespace) -> int:
    verdicts = compare(rows.load([args.before]), rows.load([args.after]), args.threshold)
    say(to_text(verdicts))
    return int(args.fail_on_regression and any(v.verdict == "slower" for v in verdicts))
