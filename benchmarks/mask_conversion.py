"""Time and memory from a mask_mod to its slices, on the host. Budget: 1M tokens of causal documents in 0.5 s, 200 MB.

One thread by default: on a busy machine, threads that wait for each other cost more than the work.

python benchmarks/mask_conversion.py [--threads 1] [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from magi_compile.masks import (
    AttnSlices,
    padded_slices_from_intervals,
    row_intervals,
    slices_from_intervals,
    trace_mask_mod,
)
from magi_compile.masks.library import MASKS

BUDGET_SECONDS, BUDGET_MB = 0.5, 200.0
SIZES = [1 << 13, 1 << 17, 1 << 20]
# mask, mean document length
WORKLOADS = [("document_causal", 2048), ("document_causal", 128)] + [
    (name, 2048) for name in MASKS if name != "document_causal"
]
COLUMNS = [
    "mask",
    "tokens",
    "mean_document",
    "slices",
    "first_ms",
    "best_ms",
    "median_ms",
    "padded_ms",
    "peak_mb",
]


def document_lengths(total: int, mean: int) -> list[int]:
    """Exponentially distributed lengths that add up to `total`."""
    generator = torch.Generator().manual_seed(0)
    lengths = (-mean * torch.rand(2 * total // mean + 16, generator=generator).log()).long() + 1
    ends = lengths.cumsum(0)
    lengths = lengths[: int(torch.searchsorted(ends, total)) + 1]
    lengths[-1] -= int(lengths.sum()) - total
    return lengths.tolist()


def convert(mask_mod, total: int) -> AttnSlices:
    program, tables, _ = trace_mask_mod(mask_mod)
    intervals = row_intervals(
        program, tables, batch=1, seqlen_q=total, seqlen_k=total, device="cpu"
    )
    intervals.check()
    return slices_from_intervals(intervals)


def convert_padded(mask_mod, total: int, capacity: int) -> AttnSlices:
    """As a compiled graph does it."""
    program, tables, _ = trace_mask_mod(mask_mod)
    intervals = row_intervals(
        program, tables, batch=1, seqlen_q=total, seqlen_k=total, device="cpu"
    )
    slices, _ = padded_slices_from_intervals(intervals, capacity)
    return slices


def measure(name: str, total: int, mean: int) -> dict:
    """One cell, in this process, which should do nothing else: the peak is that of the process."""
    convert(MASKS[name]([100, 28]).mask_mod, 128)  # lazy imports and code caches
    mask = MASKS[name](document_lengths(total, mean))
    resident = _resident_mb()
    first, slices = _timed(convert, mask.mask_mod, total)
    peak = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - resident, 0.0)
    if slices.area() != mask.slices.area():
        raise AssertionError(f"{name} at {total} tokens is wrong")
    again = [_timed(convert, mask.mask_mod, total)[0] for _ in range(7)]
    capacity = total // 16 + 256
    padded = statistics.median(
        _timed(convert_padded, mask.mask_mod, total, capacity)[0] for _ in range(7)
    )
    times = {
        "first_ms": first,
        "best_ms": min(again),
        "median_ms": statistics.median(again),
        "padded_ms": padded,
    }
    return {
        "mask": name,
        "tokens": total,
        "mean_document": mean,
        "slices": len(slices),
        **{key: round(1e3 * value, 2) for key, value in times.items()},
        "peak_mb": round(peak, 1),
    }


def _timed(function, *args):
    begin = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - begin, result


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--check", action="store_true", help="fail where the budget is exceeded")
    parser.add_argument(
        "--cell", nargs=3, metavar=("MASK", "TOKENS", "MEAN"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.cell:
        name, total, mean = options.cell
        print(json.dumps(measure(name, int(total), int(mean))))
        return
    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.processor() or platform.machine()}"
    )
    print(" ".join(f"{column:>{_width(column)}}" for column in COLUMNS))
    rows = []
    for name, mean in WORKLOADS:
        for total in SIZES:
            cell = ["--cell", name, str(total), str(mean), "--threads", str(options.threads)]
            done = subprocess.run(
                [sys.executable, __file__, *cell], stdout=subprocess.PIPE, text=True, check=True
            )
            rows.append(json.loads(done.stdout))
            line = (f"{rows[-1][column]:>{_width(column)}}" for column in COLUMNS)
            print(" ".join(line), flush=True)
    if options.json:
        with options.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    budgeted = [row for row in rows if row["mask"] == "document_causal"]
    seconds = max(row["median_ms"] for row in budgeted) / 1e3
    megabytes = max(row["peak_mb"] for row in budgeted)
    is_within = seconds < BUDGET_SECONDS and megabytes < BUDGET_MB
    print(
        f"document_causal: at most {seconds:.3f} s of {BUDGET_SECONDS} s, {megabytes:.0f} MB of {BUDGET_MB:.0f} MB"
        f"{'' if is_within else ': EXCEEDED'}"
    )
    if options.check and not is_within:
        sys.exit(1)


def _width(column: str) -> int:
    return 22 if column == "mask" else max(len(column), 9)


if __name__ == "__main__":
    main()
