"""The arguments of `magi-bench mods`, and what it does with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from magi_bench import arguments
from magi_bench.mods.catalogue import MODS
from magi_bench.mods.contenders import PEERS
from magi_bench.mods.mod import BLOCK
from magi_bench.mods.problem import MIN_TOKENS, Settings
from magi_bench.mods.run import Execution, fault
from magi_bench.step.cases import PASSES
from magi_bench.step.clock import Rounds
from magi_bench.step.run import conclude
from magi_compile.kernels.select import KERNELS

# A minute on two cores of a CPU, most of it compilation.
QUICK_MODS = ["documents", "window_by_head", "block_lists", "relative_bias", "latent_positions"]
QUICK = {"tokens": 512, "heads": "4:2", "head_dim": 32, "rounds": 3, "turn_ms": 5.0}
DESCRIPTION = """Attention with mask_mods and score_mods as users of FlexAttention write them, host included: ours beside FlexAttention, in
turns. Most of the time is compilation: each mod, pass and contender compiles a graph. Exits with 1 if ours was wrong or raised."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--mods", nargs="+", choices=MODS, metavar="NAME", help=f"only these, of {', '.join(MODS)}"
    )
    parser.add_argument(
        "--tokens", type=arguments.length, default=8192, help=f"a multiple of {BLOCK}"
    )
    parser.add_argument(
        "--gate-tokens",
        type=arguments.length,
        default=8192,
        help="results are compared with fp64 at full length; longer ones at this, which compiles everything twice",
    )
    parser.add_argument("--heads", type=arguments.heads, default="32:8", metavar="Q:KV")
    parser.add_argument("--head-dim", type=arguments.count, default=128)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="by default bfloat16, on a CPU float32",
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=KERNELS,
        default=[],
        help="ours also with each of these asked for by name",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=[],
        help="beside FlexAttention's own kernels: flex-flash, its FLASH backend (flash-attn-4)",
    )
    parser.add_argument(
        "--mask-in-graph",
        action="store_true",
        help="every call makes its BlockMask, in the function that is compiled; else it is made before",
    )
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
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, and without --mods five of them: a minute on a CPU",
    )
    parser.add_argument("--out", type=Path, help="where to write: adds .json and .md")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed, or if anybody was compiled again while time was taken."""
    device = arguments.device_of(args.device)
    if args.quick:
        vars(args).update(QUICK, mods=args.mods or QUICK_MODS)
    for name in ("tokens", "gate_tokens"):
        count = getattr(args, name)
        if count % BLOCK or count < MIN_TOKENS:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"`{option}` must be a multiple of {BLOCK}, at least {MIN_TOKENS}, got {count}"
            )
    arguments.check_out(args.out)
    command = arguments.as_typed(args.command_line, args.out)
    rows = Execution(settings_of(args, device), command, args.out, _say).run()
    return conclude(rows, args.out, _say, fault)


def settings_of(args: argparse.Namespace, device: str) -> Settings:
    """What the arguments ask for."""
    nheads_q, nheads_kv = map(int, args.heads.split(":"))
    return Settings(
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        tokens=args.tokens,
        gate_tokens=args.gate_tokens,
        nheads_q=nheads_q,
        nheads_kv=nheads_kv,
        head_dim=args.head_dim,
        mods=tuple(args.mods or MODS),
        passes=tuple(args.passes),
        kernels=tuple(args.kernels),
        peers=tuple(args.peers),
        mask_in_graph=args.mask_in_graph,
        rounds=Rounds(args.rounds, args.turn_ms),
        seconds=args.seconds,
        seed=args.seed,
    )


def _say(line: str) -> None:
    print(line, flush=True)
