"""The arguments of `magi-bench trees`, and what it does with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from magi_bench import arguments
from magi_bench.results import provenance
from magi_bench.results.rows import write_record
from magi_bench.trees.report import TITLES, to_markdown
from magi_bench.trees.run import Settings, means, measure
from magi_bench.workloads.lengths import SAMPLERS
from magi_bench.workloads.workload import MASKS

SIX_MASKS = (
    "full",
    "causal",
    "document_full",
    "document_causal",
    "sliding_window_causal",
    "block_causal_document",
)
QUICK = {"tokens": [128], "heads": ["2:1"], "head_dim": 16, "rounds": 2, "masks": ["causal"]}
DESCRIPTION = """The kernels of several trees of this package, interleaved on one device: whether a change costs speed, and what a
feature gives (patch it out of a copy). A tree is a folder that holds `magi_compile` and `csrc`, such as a git worktree. Each has
its own process and compiles its own kernels."""


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
        "--masks", nargs="+", choices=MASKS, metavar="NAME", default=list(SIX_MASKS)
    )
    parser.add_argument("--tokens", nargs="+", type=arguments.length, default=[4096, 16384, 65536])
    parser.add_argument(
        "--heads", nargs="+", type=arguments.heads, default=["32:8"], metavar="Q:KV"
    )
    parser.add_argument("--head-dim", type=arguments.count, default=128)
    parser.add_argument("--passes", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--lengths", choices=SAMPLERS, default="seeds", help="of documents")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda if there is one")
    parser.add_argument("--rounds", type=arguments.count, default=7)
    parser.add_argument(
        "--seconds", type=arguments.positive, default=300.0, help="begin no case after that"
    )
    parser.add_argument("--quick", action="store_true", help="one small case, for a CPU")
    parser.add_argument("--out", type=Path, help="where to write: adds .json and .md")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if a tree failed, or has other results than the first."""
    device = arguments.device_of(args.device)
    if args.quick:
        vars(args).update(QUICK)
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
    arguments.check_out(args.out)
    settings = Settings(
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        masks=tuple(args.masks),
        tokens=tuple(args.tokens),
        heads=tuple(args.heads),
        head_dim=args.head_dim,
        passes=tuple(args.passes),
        lengths=args.lengths,
        rounds=args.rounds,
        seconds=args.seconds,
    )
    rows = measure(trees, settings, _say)
    for name, (mean, least, most) in means(rows).items():
        _say(f"{name}: {mean:.3f} of the time, {least:.3f} to {most:.3f}")
    command = [_without_path(x) for x in arguments.as_typed(args.command_line, args.out)]
    context = provenance.describe(device, command)
    write_record(args.out, context, rows, to_markdown(context, rows))
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


def _say(line: str) -> None:
    print(line, flush=True)
