"""The arguments of `magi-bench step`, and what it does with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from magi_bench import arguments
from magi_bench.step.cases import GROUPS, PASSES, ROWS, Settings
from magi_bench.step.clock import Rounds
from magi_bench.step.contenders import CONTENDERS
from magi_bench.step.run import conclude, execute, fault

TOKENS = (1024, 2048, 4096, 8192, 32768)
# A minute on two cores of a CPU, most of it compilation.
QUICK_ROWS = [row.name for row in ROWS if row.name not in ("layers_inside", "training_inside")]
QUICK = {
    "tokens": [1024],
    "heads": "2:1",
    "head_dim": 64,
    "layers": [2],
    "train_layers": 1,
    "vocab": 256,
    "rounds": 3,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    names = [*GROUPS, *(row.name for row in ROWS if row.name not in GROUPS)]
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"groups, or single rows: {', '.join(names)}",
    )
    parser.add_argument("--tokens", nargs="+", type=arguments.length, default=list(TOKENS))
    parser.add_argument(
        "--layers", nargs="+", type=arguments.count, default=[16], help="of attention in one graph"
    )
    parser.add_argument("--train-layers", type=arguments.count, default=4, help="of the Llama")
    parser.add_argument("--heads", type=arguments.heads, default="32:8", metavar="Q:KV")
    parser.add_argument("--head-dim", type=arguments.count, default=128)
    parser.add_argument("--vocab", type=arguments.count, default=32000)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="by default bfloat16, on a CPU float32",
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--contenders", nargs="+", choices=[x.name for x in CONTENDERS])
    parser.add_argument("--optimizer", action="store_true", help="end training steps with AdamW's")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda if there is one")
    parser.add_argument("--rounds", type=arguments.count, default=Rounds().count)
    parser.add_argument("--turn-ms", type=arguments.positive, default=Rounds().turn_ms)
    parser.add_argument(
        "--seconds",
        type=arguments.positive,
        default=float("inf"),
        help="begin nothing that would end later",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--quick", action="store_true", help="small sizes: a minute on a CPU")
    parser.add_argument("--out", type=Path, help="where to write: adds .json and .md")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed, or if anybody was compiled again while time was taken."""
    device = arguments.device_of(args.device)
    if args.quick:
        vars(args).update(QUICK, rows=args.rows or QUICK_ROWS)
    arguments.check_out(args.out)
    command = arguments.as_typed(args.command_line, args.out)
    rows = execute(_settings(args, device), command, args.out, _say)
    return conclude(rows, args.out, _say, fault)


def _settings(args: argparse.Namespace, device: str) -> Settings:
    nheads_q, nheads_kv = map(int, args.heads.split(":"))
    return Settings(
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        tokens=tuple(args.tokens),
        nheads_q=nheads_q,
        nheads_kv=nheads_kv,
        head_dim=args.head_dim,
        layers=tuple(args.layers),
        train_layers=args.train_layers,
        vocab=args.vocab,
        rows=tuple(x.name for x in ROWS if {x.name, x.group} & set(args.rows or GROUPS)),
        passes=tuple(args.passes),
        contenders=tuple(args.contenders) if args.contenders else None,
        rounds=Rounds(args.rounds, args.turn_ms),
        seconds=args.seconds,
        has_optimizer=args.optimizer,
        seed=args.seed,
    )


def _say(line: str) -> None:
    print(line, flush=True)
