"""The Hopper forward kernel against its peers, on six masks.

    python benchmarks/attention_forward.py --output benchmarks/results/forward_h200_2026-11-21

All contenders of a row get the same random inputs and mask, and are timed in turns: one round measures each of them
once, in an order of its own because the card is at its power limit and remembers who ran before, over several
back-to-back calls queued behind a spinning kernel, so that launch overhead on the host does not count. A contender is
timed only if it agrees with fp64 attention on sampled rows. FLOPs are 4 * area * nheads_q * head_dim for all; the
median over the rounds is reported.

    python benchmarks/attention_forward.py --contenders magi cudnn --configs block_cols=64,k_stages=4

also times our kernel in other shapes than its own, in the same turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import record
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import forward_config
from magi_compile.kernels.sm90.forward.launch import forward
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType
from magi_compile.plan.tiles import build_tile_plan

WINDOW = 1024
BLOCK = 1024
MASKS = (
    "full",
    "causal",
    "varlen_full",
    "varlen_causal",
    "window_causal",
    "varlen_block_causal",
)
ROUNDS = 9
SPIN_CYCLES = 500_000
MIN_MS_PER_ROUND = 1.0


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def documents(seqlen: int) -> list[int]:
    """Lengths drawn log-normal around an eighth of the sequence, at most a quarter of it each."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := seqlen - sum(lengths)) > 0:
        drawn = math.exp(torch.randn((), generator=generator).item()) * seqlen / 8
        lengths.append(max(1, min(round(drawn), seqlen // 4, left)))
    return lengths


def starts(seqlen: int) -> list[int]:
    cu_seqlens = [0]
    for length in documents(seqlen):
        cu_seqlens.append(cu_seqlens[-1] + length)
    return cu_seqlens


def make_slices(mask: str, seqlen: int) -> AttnSlices:
    if mask == "full":
        return AttnSlices.full(seqlen)
    if mask == "causal":
        return AttnSlices.causal(seqlen)
    if mask == "window_causal":
        return AttnSlices.sliding_window(seqlen, None, (WINDOW - 1, 0))
    cu_seqlens = starts(seqlen)
    if mask == "varlen_block_causal":
        rows = []
        for begin, end in itertools.pairwise(cu_seqlens):
            for q_begin in range(begin, end, BLOCK):
                q_end = min(q_begin + BLOCK, end)
                rows.append(AttnSlice((q_begin, q_end), (begin, q_end), MaskType.FULL))
        return AttnSlices.from_slices(rows, seqlen, seqlen)
    return AttnSlices.from_cu_seqlens(cu_seqlens, causal=mask == "varlen_causal")


def make_mask_mod(mask: str, seqlen: int) -> Callable[..., Tensor] | None:
    cu_seqlens = torch.tensor(starts(seqlen), device="cuda")
    document = torch.bucketize(torch.arange(seqlen, device="cuda"), cu_seqlens[1:], right=True)
    position = torch.arange(seqlen, device="cuda") - cu_seqlens[document]

    def causal(b, h, q, k):
        return q >= k

    def window_causal(b, h, q, k):
        return (q >= k) & (q - k < WINDOW)

    def varlen_full(b, h, q, k):
        return document[q] == document[k]

    def varlen_causal(b, h, q, k):
        return (document[q] == document[k]) & (q >= k)

    def varlen_block_causal(b, h, q, k):
        return (document[q] == document[k]) & (position[q] // BLOCK >= position[k] // BLOCK)

    mods = (causal, window_causal, varlen_full, varlen_causal, varlen_block_causal)
    return {mod.__name__: mod for mod in mods}.get(mask)


def magi(inputs: Inputs, mask: str, slices: AttnSlices, **changes: int) -> Callable[[], Tensor]:
    """Our kernel, with `changes` to its shape."""
    q, k, v = inputs
    head_dim = q.shape[2]
    problem = AttnProblem(
        device_type="cuda",
        device_arch=torch.cuda.get_device_capability(),
        dtype=q.dtype,
        nheads_q=q.shape[1],
        nheads_kv=k.shape[1],
        head_dim=head_dim,
        head_dim_v=head_dim,
        softmax_scale=head_dim**-0.5,
    )
    config = replace(forward_config(problem), **changes)
    rows, cols = config.tile_rows, config.block_cols
    plan = build_tile_plan(
        slices, q_tile_rows=rows, q_block_cols=cols, k_tile_rows=rows, k_block_cols=cols
    )
    walk = [x.cuda() for x in plan[:3]]
    return lambda: forward(q, k, v, *walk, problem, config=config).out


def cudnn(inputs: Inputs, mask: str, slices: AttnSlices) -> Callable[[], Tensor] | None:
    if mask not in ("full", "causal"):
        return None
    q, k, v = (x.transpose(0, 1)[None] for x in inputs)

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=mask == "causal", enable_gqa=True
            )
        return out[0].transpose(0, 1)

    return run


def flex(
    inputs: Inputs, mask: str, slices: AttnSlices, options: dict | None = None
) -> Callable[[], Tensor]:
    q, k, v = (x.transpose(0, 1)[None] for x in inputs)
    seqlen = q.shape[2]
    mask_mod = make_mask_mod(mask, seqlen)
    block_mask = None
    if mask_mod:
        block_mask = create_block_mask(mask_mod, None, None, seqlen, seqlen, device="cuda")
    attend = torch.compile(flex_attention, dynamic=False)
    arguments = {"block_mask": block_mask, "enable_gqa": True, "kernel_options": options}
    return lambda: attend(q, k, v, **arguments)[0].transpose(0, 1)


def flex_flash(inputs: Inputs, mask: str, slices: AttnSlices) -> Callable[[], Tensor]:
    return flex(inputs, mask, slices, {"BACKEND": "FLASH"})


def fa4(inputs: Inputs, mask: str, slices: AttnSlices) -> Callable[[], Tensor] | None:
    """flash-attn-4, by its own functions; it has no block-causal mask."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def first(result: Tensor | tuple) -> Tensor:
        return result[0] if isinstance(result, tuple) else result

    if mask.startswith("varlen"):
        if mask == "varlen_block_causal":
            return None
        lengths = starts(len(inputs.q))
        cu_seqlens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        longest = max(end - begin for begin, end in itertools.pairwise(lengths))
        options = {"causal": mask == "varlen_causal"}
        for side in "qk":
            options |= {f"cu_seqlens_{side}": cu_seqlens, f"max_seqlen_{side}": longest}
        return lambda: first(flash_attn_varlen_func(*inputs, **options))
    window = (WINDOW - 1, 0) if mask == "window_causal" else (None, None)
    batched = [x[None] for x in inputs]
    return lambda: first(flash_attn_func(*batched, causal=mask == "causal", window_size=window))[0]


def cudnn_flex(inputs: Inputs, mask: str, slices: AttnSlices) -> Callable[[], Tensor]:
    """cudnn.flex_attention, which takes the visible keys of a row as `[0, F0)` and `[F1, F2)`."""
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    row = torch.arange(len(inputs.q), dtype=torch.int32)
    bounds = torch.zeros(1, 3, len(row), dtype=torch.int32)
    for (q_begin, q_end), (k_begin, k_end), mask_type in slices:
        rows = row[q_begin:q_end]
        bounds[0, 1, q_begin:q_end] = k_begin + (rows - q_begin if mask_type & 2 else 0)
        bounds[0, 2, q_begin:q_end] = k_end - (q_end - 1 - rows if mask_type & 1 else 0)
    batched = [x[None] for x in inputs]
    plan = create_mask_plan(bounds.cuda(), *batched)
    return lambda: flex_attn_func(*batched, mask_plan=plan)[0]


CONTENDERS = {
    "magi": magi,
    "cudnn": cudnn,
    "flex": flex,
    "flex_flash": flex_flash,
    "fa4": fa4,
    "cudnn_flex": cudnn_flex,
}


def relative_error(out: Tensor, inputs: Inputs, slices: AttnSlices) -> float:
    """Of 64 random rows and the last head, against fp64."""
    q, k, v = (x[:, -1].double() for x in inputs)
    rows = torch.randperm(len(q), generator=torch.Generator().manual_seed(0))[:64].tolist()
    exact = []
    for row in rows:
        visible = torch.zeros(len(k), dtype=torch.bool, device=k.device)
        for item in slices.restrict_q(row, row + 1):
            visible[slice(*item.k_range)] = True
        scores = (k @ q[row]) * q.shape[1] ** -0.5
        exact.append(scores.masked_fill(~visible, -torch.inf).softmax(0) @ v)
    expected = torch.stack(exact)
    return float((out[rows, -1].double() - expected).norm() / expected.norm())


def interleaved_medians(
    runs: dict[str, Callable[[], Tensor]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Milliseconds of GPU time a call."""
    calls = {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        calls[name] = max(1, math.ceil(MIN_MS_PER_ROUND / elapsed_ms(run, 2)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            times[name].append(elapsed_ms(runs[name], calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def elapsed_ms(run: Callable[[], Tensor], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES * calls)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def measure(
    mask: str,
    seqlen: int,
    heads: tuple[int, int],
    head_dim: int,
    contenders: dict[str, Callable[..., Callable[[], Tensor] | None]],
    rounds: int,
) -> dict:
    torch.manual_seed(0)
    slices = make_slices(mask, seqlen)
    shapes = [(seqlen, n, head_dim) for n in (heads[0], heads[1], heads[1])]
    inputs = Inputs(*(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes))
    runs, failures = {}, {}
    for name, contender in contenders.items():
        try:
            run = contender(inputs, mask, slices)
            error = relative_error(run(), inputs, slices) if run else 0.0
        except Exception as reason:  # a contender may lack its package, or fail on a mask
            failures[name] = f"{type(reason).__name__}: {reason}"[:300]
            continue
        if error > 1e-2:
            failures[name] = f"wrong: relative error {error:.2e}"
        elif run:
            runs[name] = run
    assert "magi" in runs, failures["magi"]
    flops = 4 * slices.area() * heads[0] * head_dim
    milliseconds = interleaved_medians(runs, rounds)
    return {
        "mask": mask,
        "seqlen": seqlen,
        "heads": f"{heads[0]}:{heads[1]}",
        "head_dim": head_dim,
        "ms": {name: round(ms, 4) for name, ms in milliseconds.items()},
        "tflops": {name: round(flops / ms / 1e9) for name, ms in milliseconds.items()},
        "failures": failures,
    }


def to_markdown(context: dict, rows: list[dict], names: list[str]) -> str:
    lines = ["# Attention forward, TFLOP/s", ""]
    lines += [f"- {name}: {value}" for name, value in context.items()]
    header = ["heads", "head_dim", "mask", "seqlen", *names, "magi / best other"]
    lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        tflops, ms = row["tflops"], row["ms"]
        others = [value for name, value in ms.items() if name != "magi"]
        ratio = f"{min(others) / ms['magi']:.3f}" if others and "magi" in ms else "-"
        cells = [row["heads"], row["head_dim"], row["mask"], row["seqlen"]]
        cells += [tflops.get(name, "-") for name in names]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, ratio]) + " |")
    return "\n".join(lines) + "\n"


def config_argument(text: str) -> tuple[str, dict[str, int]]:
    changes = (item.partition("=") for item in text.split(","))
    return f"magi {text}", {name: int(value) for name, _, value in changes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write: adds .json and .md")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2**n * 1024 for n in range(7)])
    parser.add_argument("--heads", type=record.heads_argument, nargs="+", default=[(64, 8)])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--configs", type=config_argument, nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    contenders = {name: CONTENDERS[name] for name in args.contenders}
    contenders |= {name: functools.partial(magi, **changes) for name, changes in args.configs}
    context = record.context(
        inputs="bf16, standard normal; documents log-normal, at most a quarter of the sequence",
        timing=f"median of {args.rounds} rounds, contenders in random turns; GPU time of back-to-back calls",
    )
    rows = []
    for heads in args.heads:
        for head_dim in args.head_dims:
            for mask in args.masks:
                for seqlen in args.seqlens:
                    torch._dynamo.reset()
                    row = measure(mask, seqlen, heads, head_dim, contenders, args.rounds)
                    rows.append(row)
                    print(heads, head_dim, mask, seqlen, row["tflops"], row["failures"], flush=True)
                    table = to_markdown(context, rows, list(contenders))
                    record.write(args.output, context, rows, table)


if __name__ == "__main__":
    main()
