"""The arguments of `magi-bench ranks`, and what it does with them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from magi_bench import arguments
from magi_bench.ranks import world as ranks
from magi_bench.ranks.contenders import CONTENDERS
from magi_bench.ranks.model import TRAININGS
from magi_bench.ranks.problem import Settings
from magi_bench.ranks.run import Execution
from magi_bench.ranks.world import World
from magi_bench.step.cases import PASSES
from magi_bench.step.clock import Rounds
from magi_bench.step.run import conclude, fault
from magi_bench.workloads.lengths import SAMPLERS
from magi_compile.masks.library import MASKS

ALL_MASKS = (
    "document_causal",
    "causal",
    "sliding_window_causal",
    "block_causal_document",
    "prefix_lm_causal",
)
BLOCK = 128
QUICK = {
    "tokens": [256],
    "heads": "4:2",
    "head_dim": 32,
    "rounds": 2,
    "turn_ms": 2.0,
    "vocab": 256,
    "layers": 2,
}
DESCRIPTION = """Attention across ranks, host included: ours, PyTorch's context parallelism, all-to-all over heads, one rank alone.
Starts its own processes, or takes those that torchrun has started. Time goes into compilation: a mask, a length and a pass cost
FlexAttention's contenders a graph each (on two cores of a CPU 10 to 40 s, and on a GPU seconds), the BlockMask of PyTorch's
context parallelism another; ours and `one-rank` compile their CUDA kernels once. --seconds begins nothing that would end later,
judging by what a contender took before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--ranks",
        type=arguments.count,
        help="processes to start, by default one a GPU, or 2 on a CPU; not with torchrun",
    )
    parser.add_argument(
        "--masks", nargs="+", choices=MASKS, metavar="NAME", default=list(ALL_MASKS[:2])
    )
    parser.add_argument("--all-masks", action="store_true", help=f"{', '.join(ALL_MASKS)}")
    parser.add_argument(
        "--tokens", nargs="+", type=arguments.length, default=[8192], help="of a rank"
    )
    parser.add_argument("--lengths", choices=SAMPLERS, default="seeds", help="of documents")
    parser.add_argument("--heads", type=arguments.heads, default="32:8", metavar="Q:KV")
    parser.add_argument("--head-dim", type=arguments.count, default=128)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="by default bfloat16, on a CPU float32",
    )
    parser.add_argument(
        "--model",
        action="store_true",
        help="in place of attention alone, steps of a Llama of --layers on packed causal documents, ours and "
        "torch-head-tail; each compiles its model once a pass, about half a minute",
    )
    parser.add_argument("--layers", type=arguments.count, default=4, help="of the model")
    parser.add_argument("--vocab", type=arguments.count, default=32000, help="of the model")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    names = [x.name for x in CONTENDERS]
    parser.add_argument("--contenders", nargs="+", choices=names, metavar="NAME", default=names)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda if there is one")
    parser.add_argument("--rounds", type=arguments.count, default=Rounds().count)
    parser.add_argument("--turn-ms", type=arguments.positive, default=Rounds().turn_ms)
    parser.add_argument(
        "--seconds",
        type=arguments.positive,
        default=150.0,
        help="begin nothing that would end later",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--out", type=Path, help="where to write: adds .json and .md")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed, or if anybody was compiled again while time was taken."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count()
    if args.quick:
        vars(args).update(QUICK)
    trained = [x.name for x in TRAININGS]
    if args.model and not set(trained) & set(args.contenders):
        raise ValueError(f"`--contenders` of --model must be among {', '.join(trained)}")
    wrong = [x for x in args.tokens if x % BLOCK]
    if wrong:
        raise ValueError(f"`--tokens` must be multiples of {BLOCK}, got {wrong[0]}")
    if args.ranks and ranks.is_launched():
        raise ValueError("`--ranks` must not be given to processes of torchrun, which counts them")
    num_ranks = args.ranks or (gpus if kind == "cuda" else 2)
    if kind == "cuda" and not ranks.is_launched() and not 0 < num_ranks <= gpus:
        raise ValueError(f"`--ranks` must be at most the number of GPUs, {gpus}, got {num_ranks}")
    arguments.check_out(args.out)
    command = arguments.as_typed(args.command_line, args.out)
    return ranks.start(measure, num_ranks, kind, settings_of(args, kind), command, args.out)


def settings_of(args: argparse.Namespace, kind: str) -> Settings:
    """What the arguments ask for."""
    nheads_q, nheads_kv = map(int, args.heads.split(":"))
    return Settings(
        kind=kind,
        dtype=args.dtype or ("float32" if kind == "cpu" else "bfloat16"),
        tokens=tuple(args.tokens),
        nheads_q=nheads_q,
        nheads_kv=nheads_kv,
        head_dim=args.head_dim,
        masks=ALL_MASKS if args.all_masks else tuple(args.masks),
        lengths=args.lengths,
        passes=tuple(args.passes),
        contenders=tuple(args.contenders),
        rounds=Rounds(args.rounds, args.turn_ms),
        seconds=args.seconds,
        seed=args.seed,
        layers=args.layers if args.model else 0,
        vocab=args.vocab,
    )


def measure(world: World, settings: Settings, command: list[str], out: Path | None) -> int:
    """On each rank; the exit code."""
    say = _say if world.rank == 0 else _say_nothing
    rows = Execution(world, settings, command, out, say).run()
    return conclude(rows, out, say, lambda row: fault({"row": row["mask"], **row}))


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(line: str) -> None:
    pass
