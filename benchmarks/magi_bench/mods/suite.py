"""`magi-bench mods`: mask_mods and score_mods as users of FlexAttention write them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from magi_bench import arguments, runner
from magi_bench.cases import Case
from magi_bench.contenders.base import Contender
from magi_bench.mods.contenders import PEERS, Compiled, contenders
from magi_bench.mods.masks import MASKS as MASK_MODS
from magi_bench.mods.mod import BLOCK, Mod
from magi_bench.mods.problem import MIN_TOKENS, Problem
from magi_bench.mods.scores import SCORES
from magi_bench.results.rows import Row
from magi_bench.settings import Settings
from magi_compile.kernels.select import KERNELS

MODS = {
    build.__name__: Mod.of(kind, build)
    for kind, builds in (("mask", MASK_MODS), ("score", SCORES))
    for build in builds
}
# A minute on two cores of a CPU, most of it compilation.
QUICK_MODS = ["documents", "window_by_head", "block_lists", "relative_bias", "latent_positions"]
QUICK = {"tokens": [512], "heads": "4:2", "head_dim": 32, "rounds": 3, "turn_ms": 5.0}
DESCRIPTION = """Attention with mask_mods and score_mods as users of FlexAttention write them, host included: ours
beside FlexAttention, in turns. Most of the time is compilation: each mod, pass and contender compiles a graph. Exits
with 1 if ours was wrong or raised."""
MASKS = {
    False: "BlockMasks are made before, by PyTorch, and ours is derived from them in the first call.",
    True: "Every call makes its BlockMask, in the function that is compiled.",
}
NOTES = (
    "Times are of a call, host included: medians over rounds in which contenders take turns. {masks} Ratios are to "
    "the first of ours, above 1 where ours is faster. A mask goes to kernels by intervals of keys, by blocks of bits, "
    "or, on a CPU, as its data decide."
)


class Mods(runner.Suite):
    """Every mod beside FlexAttention. Every contender compiles a function of its own for each mod and pass, so none
    sees what another compiled."""

    title = "mask_mods and score_mods beside FlexAttention"
    counts_work = True

    def __init__(self, settings: Settings, taking_part: Sequence[Compiled] | None = None):
        super().__init__(settings)
        self.notes = NOTES.format(masks=MASKS[settings.mask_in_graph])
        self.everyone = taking_part or contenders(settings.kernels, settings.peers)
        self._problem = lru_cache(1)(self._new_problem)

    def cases(self) -> Iterator[Case]:
        for tokens in self.settings.tokens:
            for mod in self.settings.mods:
                for which in self.settings.passes:
                    yield self.settings.case("mods", mod, tokens, which=which)

    def problem(self, case: Case, contender: Contender) -> Problem:
        return self._problem(case.mask, case.seqlen)

    def _new_problem(self, mod: str, tokens: int) -> Problem:
        gated = Problem(self.settings, MODS[mod], min(tokens, self.settings.gate_tokens))
        return gated if gated.tokens == tokens else Problem(self.settings, MODS[mod], tokens, gated)

    def place(self, case: Case) -> Row:
        return {**super().place(case), "what": case.mask, **MODS[case.mask].facts}

    def kind(self, case: Case) -> str:
        return case.which


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = DESCRIPTION
    option = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    option("--mods", choices=MODS, help=f"only these, of {', '.join(MODS)}", **several)
    words = "ours also with each of these asked for by name"
    option("--kernels", choices=KERNELS, default=[], help=words, **several)
    words = "beside FlexAttention's own kernels: flex-flash, its FLASH backend (flash-attn-4)"
    option("--peers", choices=PEERS, default=[], help=words, **several)
    words = (
        "every call makes its BlockMask, in the function that is compiled; else it is made before"
    )
    option("--mask-in-graph", action="store_true", help=words)
    more = ("tokens", "gate_tokens", "dtype", "turn_ms", "seed")
    arguments.add(parser, (*arguments.RUN, *more), tokens=[8192])
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed, or if anybody was compiled again while time was taken."""
    mods = tuple(args.mods or (QUICK_MODS if args.quick else MODS))
    settings = arguments.settings_of(args, QUICK, mods=mods)
    for name, counts in (("tokens", settings.tokens), ("gate-tokens", (settings.gate_tokens,))):
        for count in counts:
            if count % BLOCK or count < MIN_TOKENS:
                least = f"a multiple of {BLOCK}, at least {MIN_TOKENS}"
                raise ValueError(f"`--{name}` must be {least}, got {count}")
    return runner.run_command(Mods(settings), args)
