"""The lengths of documents: length tables of public corpora and the samplers of two benchmarks.

A table is a histogram of document lengths; the tables are in `length_tables/`. "seeds" is that of MagiAttention's
kernel benchmark, the others are those of LongCA-bench (arXiv 2510.17896).
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parent / "length_tables"

# Documents of the "seeds" sampler are cut at this share of the sequence.
SEEDS_CAP = 4
# The "blocks" sampler draws documents of 1 to 8 blocks.
BLOCK, MAX_BLOCKS = 1024, 8
# The "longca-long" sampler fills this share of the sequence with documents of any length of this range.
LONG_SHARE, LONG = 0.6, (8 * 1024, 30 * 1024)
# The "short" sampler draws documents of this range of tokens, 700 on average.
SHORT = (64, 1336)


class Bin(NamedTuple):
    """Document lengths in `[begin, end)`, and their share of all documents."""

    begin: int
    end: int
    share: float


@cache
def load_table(name: str) -> tuple[Bin, ...]:
    """The histogram `length_tables/<name>.csv`."""
    with open(TABLES / f"{name}.csv", newline="") as file:
        return tuple(
            Bin(int(row["begin"]), int(row["end"]), float(row["share"]))
            for row in csv.DictReader(file)
        )


def sample(sampler: str, seqlen: int, seed: int) -> list[int]:
    """Lengths of the documents of one sequence, in their order, drawn by a sampler of `SAMPLERS`; their sum is
    `seqlen`, so the last one may be cut. Equal seeds draw equal documents."""
    if sampler not in SAMPLERS:
        raise ValueError(f"`sampler` must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    return _filled(seqlen, SAMPLERS[sampler](seqlen, random.Random(seed)))


def _seeds(seqlen: int, rng: random.Random) -> Callable[[], int]:
    """Every bin stands for its middle; longer documents become pieces of S/4 and a rest; pieces are shuffled."""
    cap = max(seqlen // SEEDS_CAP, 1)
    pieces: dict[int, float] = {}
    for begin, end, share in load_table("seeds"):
        whole, rest = divmod((begin + end) // 2, cap)
        pieces[cap] = pieces.get(cap, 0.0) + whole * share
        if rest:
            pieces[rest] = pieces.get(rest, 0.0) + share
    sizes, weights = list(pieces), list(pieces.values())
    return lambda: rng.choices(sizes, weights)[0]


def _uniform_in_bin(table: str) -> Callable[[int, random.Random], Callable[[], int]]:
    """A bin by its share, then any length of the bin."""

    def sampler(seqlen: int, rng: random.Random) -> Callable[[], int]:
        bins = load_table(table)
        weights = [item.share for item in bins]

        def draw() -> int:
            chosen = rng.choices(bins, weights)[0]
            return rng.randrange(max(chosen.begin, 1), chosen.end)

        return draw

    return sampler


def _longca(seqlen: int, rng: random.Random) -> Callable[[], int]:
    """LongCA-bench's choice of a table: Pile to 12K tokens, ProLong64K to 64K, ProLong512K beyond."""
    table = "pile" if seqlen <= 12288 else "prolong64k" if seqlen <= 65536 else "prolong512k"
    return _uniform_in_bin(table)(seqlen, rng)


def _longca_long(seqlen: int, rng: random.Random) -> Callable[[], int]:
    """LongCA-bench's LONG variant: 60 % of the tokens are in long documents, the others as "longca" draws them;
    shuffled."""
    of_long = round(LONG_SHARE * seqlen)
    lengths = _filled(seqlen - of_long, _longca(seqlen, rng))
    lengths += _filled(of_long, lambda: rng.randint(*LONG))
    rng.shuffle(lengths)
    return iter(lengths).__next__


def _filled(total: int, draw: Callable[[], int]) -> list[int]:
    """Lengths whose sum is `total`; the last one is cut."""
    lengths: list[int] = []
    while total:
        lengths.append(min(draw(), total))
        total -= lengths[-1]
    return lengths


def _whole(seqlen: int, rng: random.Random) -> Callable[[], int]:
    """One document."""
    return lambda: seqlen


def _blocks(seqlen: int, rng: random.Random) -> Callable[[], int]:
    """LongCA-bench's documents for block-causal masks: 1 to 8 blocks of 1024 tokens."""
    return lambda: BLOCK * rng.randint(1, MAX_BLOCKS)


def _short(seqlen: int, rng: random.Random) -> Callable[[], int]:
    """Many documents in every sequence: all lengths of `SHORT` are equally likely."""
    return lambda: rng.randint(*SHORT)


SAMPLERS: dict[str, Callable[[int, random.Random], Callable[[], int]]] = {
    "seeds": _seeds,
    "longca": _longca,
    "longca-long": _longca_long,
    "pile": _uniform_in_bin("pile"),
    "prolong64k": _uniform_in_bin("prolong64k"),
    "prolong512k": _uniform_in_bin("prolong512k"),
    "blocks": _blocks,
    "short": _short,
    "whole": _whole,
}
