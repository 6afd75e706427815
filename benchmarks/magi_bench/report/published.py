"""Speeds that others published, of kernels and across ranks: other machines and other documents than ours, so no
contest.

They are read off the bar charts in MagiAttention's documentation, to about 1 %: heads 64:8, head_dim 128, bf16, and
documents as `seeds` draws them; kernels on one H100, and strategies on H100s with 8K tokens a GPU, those of others
around FlashAttention 3.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from magi_bench.cases import BACKWARD

KERNELS = (
    "Dashed: FlashAttention 3 (long) and FFA (short dashes) as MagiAttention published them for one H100 (heads 64:8, "
    "head_dim 128, bf16), read off its bar charts; "
    "its documents and block size differ from ours."
)
STRATEGIES = (
    "Dashed: published by MagiAttention for H100s, 8K tokens a GPU (heads 64:8, head_dim 128, bf16, others around "
    "FlashAttention 3), read off",
    "its bar charts; hosts and documents differ from ours. Black are its own two, native (long) and all-to-all-v "
    "(short dashes).",
)
#: What they are of: the sampler of documents, heads and head_dim.
SETUP = ("seeds", "64:8", "128")


class Published(NamedTuple):
    """A speed under one mask in one pass."""

    system: str  # and its hardware
    strategy: str  # the contender of `ranks` that is the same strategy, or ""
    mask: str  # a name in the library
    which: str  # a name in `cases.PASSES`
    seqlen: int  # tokens, across ranks those of a rank
    ranks: int
    tflops: float  # of a GPU


def of_kernels(mask: str, which: str) -> list[Published]:
    """The speeds of kernels under a mask in a pass."""
    return [x for x in _every() if (x.mask, x.which, x.ranks) == (mask, which, 1)]


class Curve(NamedTuple):
    """The speeds of a system over the number of ranks."""

    label: str  # the system with its hardware
    strategy: str  # as in `Published`
    number: int  # among those that are no strategy of `ranks`, which differ by their dashes
    points: dict[int, float]  # TFLOP/s of a GPU by number of ranks


def of_strategies(setup: tuple[str, str, str], mask: str, which: str, tokens: int) -> list[Curve]:
    """The speeds across ranks of so many tokens each, if they are of this setup. Those of both passes together follow
    from the times of both."""
    passes = ("fwd", "bwd") if which == "fwdbwd" else (which,)
    found: dict[tuple[str, str], dict[int, list[Published]]] = {}
    for x in _every() if setup == SETUP else ():
        if x.ranks > 1 and (x.mask, x.seqlen) == (mask, tokens) and x.which in passes:
            found.setdefault((x.system, x.strategy), {}).setdefault(x.ranks, []).append(x)
    unlike = [system for system, strategy in found if not strategy]
    return [
        Curve(
            f"{system}, published",
            strategy,
            0 if strategy else unlike.index(system),
            {ranks: _together(x) for ranks, x in of_ranks.items()},
        )
        for (system, strategy), of_ranks in found.items()
    ]


def _together(passes: list[Published]) -> float:
    """The speed of one pass after the other."""
    flops = {"fwd": 1.0, "bwd": BACKWARD}
    seconds = sum(flops[x.which] / x.tflops for x in passes)
    return sum(flops[x.which] for x in passes) / seconds


@cache
def _every() -> tuple[Published, ...]:
    return tuple(_read())


def _read() -> Iterator[Published]:
    with open(Path(__file__).with_name("published.csv"), newline="") as file:
        for row in csv.DictReader(file):
            numbers = int(row["seqlen"]), int(row["ranks"]), float(row["tflops"])
            names = row["system"], row["strategy"], row["mask"], row["pass"]
            yield Published(*names, *numbers)
