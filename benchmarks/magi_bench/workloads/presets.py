"""The named grids of cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from magi_bench.cases import Case
from magi_bench.workloads.workload import SPARSE_MASKS
from magi_compile.masks.library import MASKS as NAMED_MASKS

# The masks of MagiAttention's kernel benchmark.
SEEDS_MASKS = (
    *("full", "causal", "document_full", "document_causal", "sliding_window_causal"),
    "block_causal_document",
)
# Those of LongCA-bench.
LONGCA_MASKS = tuple(x for x in NAMED_MASKS if x not in ("block_diffusion", "sliding_tiles"))
K = 1024


class Grid(NamedTuple):
    """Every combination; `blocks` and `densities` of sparse masks."""

    masks: tuple[str, ...]
    seqlens: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    lengths: str = "seeds"
    blocks: tuple[int, ...] = (0,)
    densities: tuple[float, ...] = (1.0,)
    head_dim: int = 128
    dtype: str = "bfloat16"

    def cases(self, level: str) -> list[Case]:
        every = product(self.heads, self.seqlens, self.masks, self.blocks, self.densities)
        made = []
        for heads, seqlen, mask, block, density in every:
            # LongCA-bench draws the documents of block-causal masks as whole blocks.
            is_blocks = mask == "block_causal_document" and self.lengths == "longca"
            lengths = "blocks" if is_blocks else self.lengths
            sizes = (seqlen, *heads, self.head_dim, self.dtype, lengths)
            made.append(Case(level, mask, *sizes, block=block, density=density))
        return made


@dataclass(frozen=True)
class Preset:
    """Grids, and which contenders take part when nobody says otherwise."""

    kernel: Grid
    sparse: Grid | None = None
    on_cpu: Mapping[str, Grid] = field(default_factory=dict)  # in place of those, by level
    contenders_on_cpu: tuple[str, ...] | None = None  # None for all that run there
    budget_ms: float = 100.0  # for the repetitions of one pass
    # The longest sequence that numbers are checked at, by level; more than window and blocks.
    gate_seqlens: Mapping[str, int] = field(
        default_factory=lambda: {"kernel": 2048, "sparse": 1024}
    )

    def cases(self, level: str, device: str) -> list[Case]:
        """Those of a level, "kernel" or "sparse", on a device."""
        grid: Grid | None = getattr(self, level)
        if device == "cpu":
            grid = self.on_cpu.get(level, grid)
        return grid.cases(level) if grid else []


PRESETS = {
    "smoke": Preset(
        Grid(SEEDS_MASKS, (4 * K,), ((64, 8),)),
        Grid(SPARSE_MASKS, (8 * K,), ((8, 8),), blocks=(64, 128), densities=(0.2,)),
        {
            "kernel": Grid(SEEDS_MASKS, (K, 2 * K), ((2, 1),), head_dim=64, dtype="float32"),
            "sparse": Grid(
                SPARSE_MASKS, (K,), ((4, 2),), "seeds", (64,), (0.2, 0.5), 64, "float32"
            ),
        },
        ("magi-cpu", "flash-cpu", "naive"),
        budget_ms=50.0,
        gate_seqlens={"kernel": 1280, "sparse": 1024},
    ),
    "seeds": Preset(Grid(SEEDS_MASKS, tuple(K * 2**x for x in range(8)), ((64, 8),))),
    # Eight heads fill a GPU at these lengths; every key-value head of sparse masks has a mask of its own.
    "longca": Preset(
        Grid(LONGCA_MASKS, (16 * K, 32 * K, 64 * K), ((64, 8), (64, 64)), "longca"),
        Grid(
            *(SPARSE_MASKS, tuple(K * 2**x for x in range(4, 8))),
            heads=((8, 8), (16, 2), (64, 8), (64, 64)),
            blocks=(64, 128),
            densities=(0.1, 0.2, 0.5, 0.8),
        ),
    ),
    "diffusion": Preset(
        Grid(("block_diffusion",), tuple(K * 2**x for x in range(3, 7)), ((64, 8),), "longca")
    ),
    # Videos of 3, 5 and 9 frames of 6 by 10 tiles of 384 tokens.
    "video": Preset(
        Grid(("sliding_tiles",), tuple(23040 * x for x in (3, 5, 9)), ((24, 24),), "whole")
    ),
}
