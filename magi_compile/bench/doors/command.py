"""The arguments of `magi-bench doors`, and what it does with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from magi_compile.bench import arguments
from magi_compile.bench.doors.run import Execution
from magi_compile.bench.doors.settings import ATTENTIONS, FRAMEWORKS, MODES, Settings
from magi_compile.bench.step.clock import Rounds
from magi_compile.bench.step.run import FAULTS
from magi_compile.bench.workloads.lengths import SAMPLERS

QUICK = {
    "tokens": [512],
    "heads": "4:2",
    "head_dim": 16,
    "ffn_dim": 128,
    "layers": 2,
    "vocab": 256,
    "gate_tokens": 256,
    "rounds": 2,
    "turn_ms": 2.0,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = (
        "Training steps of a Llama of transformers and of torchtitan with each of their attentions, random weights, packed "
        "documents. Compiling takes most of the time: on a GPU about half a minute for each attention and length."
    )
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", nargs="+", type=arguments.length, default=[8192, 32768])
    parser.add_argument("--lengths", choices=SAMPLERS, default="seeds", help="of documents")
    parser.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="torchtitan without CUDA graphs, which it records by default",
    )
    parser.add_argument("--layers", type=arguments.count, default=4)
    parser.add_argument("--heads", type=arguments.heads, default="32:8", metavar="Q:KV")
    parser.add_argument("--head-dim", type=arguments.count, default=128)
    parser.add_argument("--ffn-dim", type=arguments.count, default=14336)
    parser.add_argument(
        "--vocab",
        type=arguments.count,
        default=32768,
        help="fewer than Llama 3's 128256, whose logits of 32K tokens take 50 GB",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="by default bfloat16, on a CPU float32",
    )
    parser.add_argument("--gate-tokens", type=arguments.length, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda if there is one")
    parser.add_argument("--rounds", type=arguments.count, default=Rounds().count)
    parser.add_argument("--turn-ms", type=arguments.positive, default=200.0)
    parser.add_argument(
        "--seconds",
        type=arguments.positive,
        default=float("inf"),
        help="begin nothing that would end later",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--out", type=Path, help="where to write: adds .json and .md")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed."""
    device = arguments.device_of(args.device)
    if args.quick:
        vars(args).update(QUICK)
    arguments.check_out(args.out)
    command = arguments.as_typed(args.command_line, args.out)
    rows = Execution(settings_of(args, device), command, args.out, _say).run()
    for row in rows:
        if row["status"] in FAULTS:
            what = f"{row['framework']}, {row['attention']}, {row['mode']}, {row['tokens']} tokens"
            _say(f"{what}: {row['reason']}")
    measured = sum("tokens_per_s" in row for row in rows)
    where = f": {args.out}.md" if args.out else ""
    _say(f"{measured} measured, {len(rows) - measured} not{where}")
    return int(any(row["is_ours"] and row["status"] in FAULTS for row in rows))


def settings_of(args: argparse.Namespace, device: str) -> Settings:
    """What the arguments ask for."""
    nheads_q, nheads_kv = map(int, args.heads.split(":"))
    return Settings(
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        tokens=tuple(args.tokens),
        layers=args.layers,
        nheads_q=nheads_q,
        nheads_kv=nheads_kv,
        head_dim=args.head_dim,
        ffn_dim=args.ffn_dim,
        vocab=args.vocab,
        frameworks=tuple(args.frameworks),
        attentions=tuple(args.attentions),
        modes=tuple(args.modes),
        lengths=args.lengths,
        cuda_graphs=not args.no_cuda_graphs,
        gate_tokens=args.gate_tokens,
        rounds=Rounds(args.rounds, args.turn_ms),
        seconds=args.seconds,
        seed=args.seed,
    )


def _say(line: str) -> None:
    print(line, flush=True)
