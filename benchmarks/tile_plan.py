"""Time and size of tile plans: packed documents, causal or in block diffusion, 64K to 1M tokens.

python benchmarks/tile_plan.py [--device cuda] [--output benchmarks/results/tile_plan_NAME]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import record
from magi_compile.kernels.heuristics import PlanTiles
from magi_compile.masks.library import NamedMask, block_diffusion, document_causal
from magi_compile.plan.tiles import TilePlan, build_tile_plan

TILE_SIZES = PlanTiles(q_tile_rows=128, q_block_cols=128, k_tile_rows=128, k_block_cols=64)
TILES = TILE_SIZES._asdict()
WORKLOADS = [  # mask, tokens, documents
    (document_causal, 1 << 16, 100),
    (document_causal, 1 << 20, 1),
    (document_causal, 1 << 20, 1000),
    (document_causal, 1 << 20, 4000),
    (block_diffusion, 1 << 16, 16),
    (block_diffusion, 1 << 20, 16),
]


def documents(seqlen: int, count: int) -> list[int]:
    """Random lengths of so many documents."""
    generator = torch.Generator().manual_seed(0)
    inner = torch.randperm(seqlen - 1, generator=generator)[: count - 1] + 1
    borders = torch.tensor([0, *inner.sort().values.tolist(), seqlen])
    return borders.diff().tolist()


def median_ms(build: Callable[[], TilePlan], device: str, num_runs: int = 20) -> float:
    """Median wall-clock milliseconds of `build`, after three warm-up runs."""

    def once() -> float:
        begin = time.perf_counter()
        build()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    return statistics.median([once() for _ in range(num_runs + 3)][3:])


def captured(build: Callable[[], TilePlan]) -> Callable[[], None]:
    """`build` as a CUDA graph."""
    build()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build()
    return graph.replay


def measure(
    mask: Callable[..., NamedMask], seqlen: int, num_documents: int, device: str
) -> list[dict]:
    slices = mask(documents(seqlen, num_documents), device=device).slices
    rows = []

    def add(how: str, build: Callable[[], TilePlan], plan: TilePlan) -> None:
        rows.append(
            {
                "mask": mask.__name__,
                "slices": len(slices),
                "seqlen": seqlen,
                "num_documents": num_documents,
                "how": how,
                "ms": round(median_ms(build, device), 3),
                "bytes": sum(tensor.nbytes for tensor in plan),
            }
        )

    for exact in (True, False):
        plan = build_tile_plan(slices, **TILES, exact=exact)
        add(
            "exact" if exact else "padded",
            lambda exact=exact: build_tile_plan(slices, **TILES, exact=exact),
            plan,
        )
    if device == "cuda":
        from magi_compile.kernels.sm90.planner.tile_plan import plan_on_device

        add("padded, CUDA graph", captured(lambda: build_tile_plan(slices, **TILES)), plan)
        add("one launch", lambda: plan_on_device(slices, TILE_SIZES), plan)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, help="results go to this path plus .json and .md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    context = record.context(tiles=TILES, threads=1)
    rows = [row for workload in WORKLOADS for row in measure(*workload, args.device)]
    fields = ("mask", "seqlen", "num_documents", "slices", "how", "ms", "bytes")
    lines = [
        "| mask | tokens | documents | slices | plan | ms | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(str(row[field]) for field in fields) + " |" for row in rows]
    markdown = "\n".join(lines) + "\n"
    print(markdown, end="")
    record.write(args.output, context, rows, markdown)


if __name__ == "__main__":
    main()
