"""Figures that others published, drawn dashed beside ours: other machines, other document lengths, so no contest.

Read off the bar charts in MagiAttention's documentation, to about 1 %: one H100, heads 64:8, head_dim 128, bf16.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path

SOURCE = (
    "Dashed: FlashAttention 3 (long) and FFA (short dashes) as MagiAttention published them for one H100 (heads 64:8, "
    "head_dim 128, bf16), read off its bar charts; "
    "its documents and block size differ from ours."
)
DOCUMENTS, HEADS, HEAD_DIM = "seeds", "64:8", "128"


@cache
def figures(mask: str, which: str) -> dict[str, dict[int, float]]:
    """TFLOP/s by system and length."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    with open(Path(__file__).with_name("published.csv"), newline="") as file:
        for row in csv.DictReader(file):
            if (row["mask"], row["pass"]) == (mask, which):
                found[row["system"]][int(row["seqlen"])] = float(row["tflops"])
    return dict(found)
