"""Placement of packed documents on ranks: what it moves, how even it is, and what planning a new mask costs.

    python benchmarks/placement.py --output benchmarks/results/placement_cpu_2026-11-21.md

Times are CPU time of the one thread that plans, which other work on the machine slows down but does not count in.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from magi_bench import simulate
from magi_bench.workloads.documents import document_packs
from magi_compile.dtensor.planning import rank_plan
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.masks.slices import AttnSlices

SEEDS = (101, 102, 103)  # the algorithm was developed on others
RANKS, TOKENS = 64, 512 << 10
PLACEMENTS = (
    ("document_causal", 512),
    ("document_causal", 1024),
    ("document_full", 512),
    ("document_full", 256),
)
PLANS = (
    ("document_causal", 512),
    ("document_causal", 1024),
    ("document_full", 512),
    ("document_full", 1024),
)
COMMANDS = (
    "--mask document_causal --tokens 512k --cp 64 --chunk 512 --packs 8 --seed 101",
    "--mask document_causal --tokens 64k --cp 8 --packs 20 --seed 101",
    "--mask document_full --tokens 64k --cp 8 --packs 20 --seed 101",
    "--mask causal --tokens 64k --cp 8 --packs 1",
    "--mask document_causal --tokens 16m --cp 64,512 --packs 1 --strategies min_heap,local --seed 101",
    "--mask document_causal --tokens 512k --cp 64 --chunk 512 --packs 8 --strategies min_heap,local --gbytes 45 "
    "--seed 101",
)


def masks_of(name: str, num_packs: int, seed: int) -> list[AttnSlices]:
    return [simulate.mask_of(name, lengths) for lengths in document_packs(TOKENS, num_packs, seed)]


def compared_with_min_heap(num_packs: int) -> list[list[str]]:
    """Remote rows of all packs of each seed over min_heap's, and the largest imbalance of each."""
    rows = []
    for name, chunk in PLACEMENTS:
        ratios, worst = [], {"local": 0.0, "min_heap": 0.0}
        for seed in SEEDS:
            received = dict.fromkeys(worst, 0.0)
            for slices in masks_of(name, num_packs, seed):
                for strategy in worst:
                    outcome = simulate.simulate(
                        slices, RANKS, strategy, chunk_size=chunk, repeats=1
                    )
                    received[strategy] += outcome.recv_mean
                    worst[strategy] = max(worst[strategy], outcome.imbalance)
            ratios.append(received["local"] / received["min_heap"])
        figures = [*ratios, statistics.mean(ratios), *worst.values()]
        rows.append([name, str(chunk), *(f"{x:.3f}" for x in figures)])
    return rows


def planning(num_packs: int, repeats: int) -> list[list[str]]:
    """Milliseconds of `plan_rank`; masks take turns, so that each finds the caches as another one left them."""
    rows = []
    for name, chunk in PLANS:
        masks = [slices for seed in SEEDS for slices in masks_of(name, num_packs, seed)]
        options = ContextParallelOptions(chunk_size=chunk)
        times: list[list[float]] = [[] for _ in masks]
        for _ in range(repeats):
            for slices, mine in zip(masks, times, strict=True):
                rank_plan._plans.clear()
                begin = time.thread_time()
                plan_rank(slices, RANKS, 0, options)
                mine.append(1e3 * (time.thread_time() - begin))
        fastest = [min(mine) for mine in times]
        middle = [statistics.median(mine) for mine in times]
        figures = [statistics.mean(fastest), max(fastest), statistics.mean(middle), max(middle)]
        rows.append([name, str(chunk), *(f"{x:.1f}" for x in figures)])
    return rows


def command_and_output(arguments: str) -> list[str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        simulate.main(arguments.split())
    command = f"$ python -m magi_bench.simulate {arguments}"
    return ["```", command, text.getvalue().rstrip(), "```", ""]


def table(header: str, rows: list[list[str]]) -> list[str]:
    names = header.split(", ")
    lines = [names, ["---"] * len(names), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--output", type=Path, help="where to write; also printed")
    option("--packs", type=int, default=8, help="packs of each seed in the comparison")
    option("--planned-packs", type=int, default=4, help="packs of each seed that are timed")
    option("--repeats", type=int, default=15, help="plans of each pack")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    planned = planning(args.planned_packs, args.repeats)
    after = os.getloadavg()[0]
    seeds = ", ".join(f"seed {seed}" for seed in SEEDS)
    lines = [
        "# Placement of packed documents on ranks",
        "",
        f"- machine: {os.cpu_count()} cores, {platform.machine()}, shared with other work: load average {before:.1f} "
        f"before and {after:.1f} after the times were taken; Python {platform.python_version()}, torch "
        f"{torch.__version__}",
        f"- date: {datetime.date.today().isoformat()}, command: python benchmarks/placement.py",
        "- rows are in units of the rows a rank holds; `bound` undercuts every placement of these chunks within the "
        "slack",
        "- efficiency is predicted by the cost model at 600 TFLOP/s and 350 GB/s a rank (64:8 heads of 128, bf16)",
        "- the algorithm was developed on seeds 1 to 5 and 42; these packs it never saw",
        "",
        "## 512K tokens on 64 ranks: remote rows over min_heap's",
        "",
        f"All {args.packs} packs of each seed together, and the largest imbalance among them.",
        "",
        *table(
            f"mask, chunk, {seeds}, mean, largest imbalance, min_heap's",
            compared_with_min_heap(args.packs),
        ),
        "## A whole `plan_rank` for a new mask",
        "",
        f"{args.planned_packs} packs of each seed, which take turns; 64 ranks, 512K tokens, one thread; CPU "
        f"milliseconds of {args.repeats} plans of each. Fastest and median of a pack's plans: their mean over packs "
        "and the slowest pack.",
        "",
        *table("mask, chunk, fastest, slowest pack's, median, slowest pack's", planned),
        "## Commands and their output",
        "",
    ]
    for arguments in COMMANDS:
        lines += command_and_output(arguments)
    text = "\n".join(lines)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
