"""The CPU kernel against `scaled_dot_product_attention` with the same mask as a dense tensor, at 4096 tokens.

python benchmarks/cpu_kernel.py [--threads 2] [--passes 3] [--repeats 5] [--only NAME] [--out benchmarks/results]

Both read the same memory, `[heads, tokens, head_dim]` contiguous, as FlexAttention models have it. The dense side gets
what suits it best: an additive mask of its own dtype made beforehand, `is_causal` instead of a mask where the mask is
causal, grouped heads through `enable_gqa`.
The two sides run in turns, the whole table several times over; a time is the median of all, and beside the ratio of
medians stands, in brackets, that of the fastest runs. Every cell is compared with the dense result before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.masks.slices import MaskType
from magi_compile.testing.cases import Case, Heads, one, sliding_window, varlen

SEQLEN = 4096
HEADS = [Heads(8, 8, 64, 64), Heads(8, 2, 64, 64)]
DTYPES = [torch.float32, torch.bfloat16]


def lognormal_lengths(median: float, sigma: float, seed: int = 0) -> list[int]:
    """Lengths that fill SEQLEN tokens, the last one cut."""
    rng, lengths = random.Random(seed), []
    while sum(lengths) < SEQLEN:
        lengths.append(max(1, round(rng.lognormvariate(0, sigma) * median)))
    lengths[-1] -= sum(lengths) - SEQLEN
    return lengths


def documents(name: str, lengths: list[int]) -> Case:
    return varlen(f"documents {name}", lengths, MaskType.CAUSAL)


def window(left: int) -> Case:
    return replace(sliding_window(SEQLEN, left), name=f"window {left}")


MASKS = [
    one(MaskType.CAUSAL, SEQLEN, name="causal"),
    documents("2 x 2048", [2048] * 2),
    documents("4 x 1024", [1024] * 4),
    documents("16 x 256", [256] * 16),
    documents("128 x 32", [32] * 128),
    documents("one long, many short", [2048] + [64] * 32),
    documents("lognormal 200", lognormal_lengths(200, 1.3)),
    documents("lognormal 1000", lognormal_lengths(1000, 1.0)),
    window(128),
    window(512),
    window(1024),
]


def dense(case: Case, dtype: torch.dtype, inputs: tuple[Tensor, ...], scale: float) -> list:
    """Closures for the forward and the backward of dense-mask SDPA, and for its results."""
    q, k, v, dout = (x.transpose(0, 1)[None].detach() for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    mask = torch.where(case.slices().to_dense(), 0.0, -torch.inf).to(dtype)
    if len(case.rows) == 1 and case.rows[0][-1] == MaskType.CAUSAL:
        mask = None

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] > k.shape[1]
        )

    out = attend()

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def results() -> list[Tensor]:
        return [x[0].transpose(0, 1) for x in (out.detach(), *backward())]

    return [forward, backward, results]


def ours(case: Case, dtype: torch.dtype, inputs: tuple[Tensor, ...]) -> list:
    """Closures for the plan, the forward and the backward of the CPU kernel, and for its results."""
    kernel, slices, problem = CpuKernel(), case.slices(), case.problem(dtype)
    q, k, v, dout = inputs
    plan = kernel.plan(slices, problem)
    out, lse = kernel.forward(q, k, v, slices, plan, problem)

    def make_plan() -> list[Tensor]:
        return kernel.plan(slices, problem)

    def forward() -> tuple[Tensor, ...]:
        return kernel.forward(q, k, v, slices, plan, problem)

    def backward() -> tuple[Tensor, ...]:
        return kernel.backward(Grads(dout, None), Saved(q, k, v, out, lse), slices, plan, problem)

    def results() -> list[Tensor]:
        return [out, *backward()]

    return [make_plan, forward, backward, results]


def in_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each function; they run one after the other in every repeat, the first of which warms up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def measure(case: Case, dtype: torch.dtype, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of both sides, once their results agree."""
    inputs = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in case.inputs(dtype)[:4])
    dense_forward, dense_backward, dense_results = dense(
        case, dtype, inputs, case.problem(dtype).softmax_scale
    )
    plan, forward, backward, results = ours(case, dtype, inputs)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for actual, expected in zip(results(), dense_results(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    functions = {
        "dense_forward_ms": dense_forward,
        "forward_ms": forward,
        "dense_backward_ms": dense_backward,
        "backward_ms": backward,
        "plan_ms": plan,
    }
    return in_turns(functions, repeats)


HEADER = """\
| mask | density | heads | dtype | dense fwd ms | fwd ms | ratio | dense bwd ms | bwd ms | ratio | plan ms |
|---|---|---|---|---|---|---|---|---|---|---|"""


def line(row: dict) -> str:
    """Median times; a ratio is that of the medians, and in brackets that of the fastest runs."""
    times = row["times"]

    def ms(name: str) -> str:
        return f"{statistics.median(times[name]):.1f}"

    def ratio(dense: str, ours: str) -> str:
        median = statistics.median(times[dense]) / statistics.median(times[ours])
        return f"{median:.1f} ({min(times[dense]) / min(times[ours]):.1f})"

    return (
        f"| {row['mask']} | {row['density']:.3f} | {row['nheads_q']}:{row['nheads_kv']} | {row['dtype']} "
        f"| {ms('dense_forward_ms')} | {ms('forward_ms')} | {ratio('dense_forward_ms', 'forward_ms')} "
        f"| {ms('dense_backward_ms')} | {ms('backward_ms')} | {ratio('dense_backward_ms', 'backward_ms')} "
        f"| {statistics.median(times['plan_ms']):.2f} |"
    )


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    fields = dict(
        re.findall(r"^(.+?)\s*: (.*)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else []
    )
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    family = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{fields['model name']}, {family}"


def settings(args: argparse.Namespace) -> dict:
    environment = {
        name: os.environ[name]
        for name in ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")
        if name in os.environ
    }
    prefix = [f"{name}={value}" for name, value in environment.items()]
    return {
        "command": shlex.join([*prefix, "python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": args.threads,
        "passes": args.passes,
        "repeats": args.repeats,
        "head_dim": HEADS[0].head_dim,
        "seqlen": SEQLEN,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
    }


def write(folder: Path, about: dict, rows: list[dict]) -> None:
    """All times as JSON and the table as Markdown, named after the CPU and the date."""
    slug = re.sub(r"[^a-z0-9]+", "-", about["cpu"].lower()).strip("-")
    stem = folder / f"cpu_kernel_{slug}_{about['date']}"
    stem.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}) + "\n")
    lines = [f"- {name}: {value}" for name, value in about.items()]
    text = ["# The CPU kernel and dense-mask SDPA", "", *lines, "", HEADER, *map(line, rows)]
    stem.with_suffix(".md").write_text("\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="masks whose name contains this")
    parser.add_argument("--out", type=Path, help="folder for the results as .json and .md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    about = settings(args)
    cells = [
        (replace(case, heads=heads), dtype)
        for case in MASKS
        if args.only in case.name
        for heads in HEADS
        for dtype in DTYPES
    ]
    rows = [
        {
            "mask": case.name,
            "nheads_q": case.heads.nheads_q,
            "nheads_kv": case.heads.nheads_kv,
            "dtype": str(dtype).removeprefix("torch."),
            "density": case.slices().area() / SEQLEN**2,
            "times": {},
        }
        for case, dtype in cells
    ]
    for number in range(args.passes):
        print(f"pass {number + 1} of {args.passes}, load average {os.getloadavg()[0]:.1f}")
        print(HEADER)
        for (case, dtype), row in zip(cells, rows, strict=True):
            for name, times in measure(case, dtype, args.repeats).items():
                row["times"].setdefault(name, []).extend(times)
            print(line(row), flush=True)
    about["load_average_after"] = os.getloadavg()[0]
    if args.out:
        write(args.out, about, rows)


if __name__ == "__main__":
    main()
