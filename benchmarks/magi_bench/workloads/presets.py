"""The named grids of cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from magi_bench.cases import Case
from magi_bench.workloads.workload import SPARSE_MASKS
from magi_compile.masks.library import MASKS as NAMED_MASKS

# The masks of MagiAttention's kernel benchmark.
SEEDS_MASKS = (
    "full",
    "causal",
    "document_full",
    "document_causal",
    "sliding_window_causal",
    "block_causal_document",
)
# Those of LongCA-bench.
LONGCA_MASKS = tuple(
    name for name in NAMED_MASKS if name not in ("block_diffusion", "sliding_tiles")
)
K = 1024


@dataclass(frozen=True)
class Preset:
    """A grid, and which contenders take part when nobody says otherwise."""

    # of a level ("kernel" or "sparse") on a device ("cuda" or "cpu")
    cases: Callable[[str, str], list[Case]]
    contenders: dict[str, tuple[str, ...] | None]  # on each device; None for all that run there
    budget_ms: float = 100.0  # for the repetitions of one pass
    # the longest sequence that numbers are checked at, by level; more than window and blocks
    gate_seqlens: dict[str, int] = field(default_factory=lambda: {"kernel": 2048, "sparse": 1024})


def _kernel_cases(
    masks: tuple[str, ...],
    seqlens: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    lengths: str,
) -> list[Case]:
    return [
        Case("kernel", mask, seqlen, nheads_q, nheads_kv, 128, lengths=_lengths(mask, lengths))
        for nheads_q, nheads_kv in heads
        for seqlen in seqlens
        for mask in masks
    ]


def _lengths(mask: str, lengths: str) -> str:
    """LongCA-bench draws the documents of block-causal masks as whole blocks."""
    return "blocks" if mask == "block_causal_document" and lengths == "longca" else lengths


def _sparse_cases(
    seqlens: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    blocks: tuple[int, ...],
    densities: tuple[float, ...],
) -> list[Case]:
    return [
        Case("sparse", mask, seqlen, *pair, 128, block=block, density=density)
        for pair in heads
        for seqlen in seqlens
        for mask in SPARSE_MASKS
        for block in blocks
        for density in densities
    ]


def _smoke(level: str, device: str) -> list[Case]:
    if level == "kernel" and device == "cuda":
        return _kernel_cases(SEEDS_MASKS, (4 * K,), ((64, 8),), "seeds")
    if level == "kernel":
        return [
            Case("kernel", mask, seqlen, 2, 1, 64, "float32")
            for seqlen in (K, 2 * K)
            for mask in SEEDS_MASKS
        ]
    if device == "cuda":
        return _sparse_cases((8 * K,), ((8, 8),), (64, 128), (0.2,))
    return [
        Case("sparse", mask, K, 4, 2, 64, "float32", block=64, density=density)
        for mask in SPARSE_MASKS
        for density in (0.2, 0.5)
    ]


def _seeds(level: str, device: str) -> list[Case]:
    if level == "sparse":
        return []
    seqlens = tuple(K * 2**power for power in range(8))
    return _kernel_cases(SEEDS_MASKS, seqlens, ((64, 8),), "seeds")


def _longca(level: str, device: str) -> list[Case]:
    seqlens = (16 * K, 32 * K, 64 * K)
    if level == "kernel":
        return _kernel_cases(LONGCA_MASKS, seqlens, ((64, 8), (64, 64)), "longca")
    # Eight heads fill a GPU at these lengths; every key-value head has a mask of its own.
    heads = ((8, 8), (16, 2), (64, 8), (64, 64))
    return _sparse_cases((*seqlens, 128 * K), heads, (64, 128), (0.1, 0.2, 0.5, 0.8))


def _diffusion(level: str, device: str) -> list[Case]:
    if level == "sparse":
        return []
    return _kernel_cases(
        ("block_diffusion",), (8 * K, 16 * K, 32 * K, 64 * K), ((64, 8),), "longca"
    )


def _video(level: str, device: str) -> list[Case]:
    """Videos of 3, 5 and 9 frames of 6 by 10 tiles of 384 tokens."""
    if level == "sparse":
        return []
    seqlens = tuple(23040 * frames for frames in (3, 5, 9))
    return _kernel_cases(("sliding_tiles",), seqlens, ((24, 24),), "whole")


PRESETS = {
    "smoke": Preset(
        _smoke,
        {"cuda": None, "cpu": ("magi-cpu", "flash-cpu", "naive")},
        budget_ms=50.0,
        gate_seqlens={"kernel": 1280, "sparse": 1024},
    ),
    "seeds": Preset(_seeds, {"cuda": None, "cpu": None}),
    "longca": Preset(_longca, {"cuda": None, "cpu": None}),
    "diffusion": Preset(_diffusion, {"cuda": None, "cpu": None}),
    "video": Preset(_video, {"cuda": None, "cpu": None}),
}
