"""The Hopper backward kernels against their peers, on six masks.

    python benchmarks/attention_backward.py --output benchmarks/results/backward_h200_2026-11-21

Masks, peers, inputs and timing are those of `attention_forward.py`; the time is that of dq, dk and dv from saved results
of the forward, all helper kernels included. A contender is timed only if its gradients agree with fp64 attention for the
last key-value head, over the part of the sequence that fits. FLOPs are 10 * area * nheads_q * head_dim for all. Extra
memory is what a call allocates at its peak beyond the three gradients. `--defines FFA_STAGES=2` adds our kernel with
other macros than `heuristics.py` gives it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import attention_forward as forward
import record
import torch
import torch._functorch.config
from attention_forward import (
    MASKS,
    ROUNDS,
    interleaved_medians,
    make_slices,
    to_markdown,
)
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, Grads, Kernel, Saved
from magi_compile.kernels.sm90 import CudaKernel
from magi_compile.kernels.sm90.backward import launch as cuda_backward
from magi_compile.kernels.triton import TritonKernel
from magi_compile.masks.slices import AttnSlices

Backward = Callable[[], tuple[Tensor, Tensor, Tensor]]  # dq, dk, dv, [seqlen, heads, head_dim]


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def of_kernel(kernel: Kernel, inputs: Inputs, slices: AttnSlices) -> Backward:
    q, k, v, dout = inputs
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
    slices = slices.to("cuda")
    plan = kernel.plan(slices, problem)
    out, lse = kernel.forward(q, k, v, slices, plan, problem)
    return lambda: kernel.backward(
        Grads(dout, None), Saved(q, k, v, out, lse), slices, plan, problem
    )


def magi(inputs: Inputs, mask: str, slices: AttnSlices, **defines: str) -> Backward:
    """Our kernel, with macros of the main one changed."""
    run = of_kernel(CudaKernel(), inputs, slices)
    if not defines:
        return run
    variants = cuda_backward.backward_variants

    def with_defines(problem: AttnProblem, deterministic: bool, has_far_tiles: bool) -> tuple:
        before, main, after = variants(problem, deterministic, has_far_tiles)
        changed = tuple({**dict(main.defines), **defines}.items())
        return before, replace(main, defines=changed), after

    of_defines = functools.cache(cuda_backward._prepared.__wrapped__)

    def run_changed() -> tuple[Tensor, ...]:
        with (
            mock.patch.object(cuda_backward, "backward_variants", with_defines),
            mock.patch.object(cuda_backward, "_prepared", of_defines),
        ):
            return run()

    return run_changed


def magi_deterministic(inputs: Inputs, mask: str, slices: AttnSlices) -> Backward:
    run = of_kernel(CudaKernel(), inputs, slices)

    def run_in_order() -> tuple[Tensor, ...]:
        torch.use_deterministic_algorithms(True)
        try:
            return run()
        finally:
            torch.use_deterministic_algorithms(False)

    return run_in_order


def triton(inputs: Inputs, mask: str, slices: AttnSlices) -> Backward:
    return of_kernel(TritonKernel(), inputs, slices)


def of_peer(name: str, inputs: Inputs, mask: str, slices: AttnSlices) -> Backward | None:
    """The autograd of a contender of `attention_forward.py`."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    attend = forward.CONTENDERS[name](forward.Inputs(*leaves), mask, slices)
    if attend is None:
        return None
    out = attend()
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


PEERS = ("cudnn", "flex", "flex_flash", "fa4", "cudnn_flex")
CONTENDERS = {
    "magi": magi,
    "magi_deterministic": magi_deterministic,
    "triton": triton,
    **{name: functools.partial(of_peer, name) for name in PEERS},
}


def exact_gradients(inputs: Inputs, slices: AttnSlices) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the last key-value head, and of the query heads that share it, in fp64."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    q, dout = inputs.q[:, -group:].double(), inputs.dout[:, -group:].double()
    k, v = inputs.k[:, -1].double(), inputs.v[:, -1].double()
    visible = slices.to("cuda").to_dense()
    scale = q.shape[2] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(group):
        p = (q[:, head] @ k.T * scale).masked_fill_(~visible, -torch.inf).softmax(1)
        dp = dout[:, head] @ v.T
        dv += p.T @ dout[:, head]
        dscores = p * (dp - (p * dp).sum(1, keepdim=True)) * scale
        dq[:, head] = dscores @ k
        dk += dscores.T @ q[:, head]
    return dq, dk, dv


def largest_relative_error(run: Backward, exact: tuple[Tensor, ...]) -> float:
    errors = []
    for actual, expected in zip(run(), exact, strict=True):
        heads = expected.shape[1] if expected.dim() == 3 else 1
        last = actual[:, -heads:].double().view(expected.shape)
        errors.append(float((last - expected).norm() / expected.norm()))
    return max(errors)


def random_inputs(seqlen: int, heads: tuple[int, int], head_dim: int) -> Inputs:
    torch.manual_seed(0)
    nheads_q, nheads_kv = heads
    shapes = [(seqlen, n, head_dim) for n in (nheads_q, nheads_kv, nheads_kv, nheads_q)]
    return Inputs(*(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes))


def extra_mib(run: Backward) -> int:
    """What a call allocates at its peak beyond its results."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = sum(grad.nbytes for grad in run())
    return round((torch.cuda.max_memory_allocated() - before - results) / 2**20)


def measure(
    mask: str,
    seqlen: int,
    heads: tuple[int, int],
    head_dim: int,
    contenders: dict[str, Callable[..., Backward | None]],
    gate: int,
) -> dict:
    """One row. Dense fp64 scores need memory, so longer sequences are checked at length `gate`."""
    checked = min(seqlen, gate)
    small, small_slices = random_inputs(checked, heads, head_dim), make_slices(mask, checked)
    exact = exact_gradients(small, small_slices)
    inputs, slices = random_inputs(seqlen, heads, head_dim), make_slices(mask, seqlen)
    runs, failures = {}, {}
    for name, contender in contenders.items():
        try:
            run = contender(small, mask, small_slices)
            if run is None:
                continue
            error = largest_relative_error(run, exact)
            run = contender(inputs, mask, slices)
            run()
        except Exception as reason:  # a contender may lack its package, or fail on a mask
            failures[name] = f"{type(reason).__name__}: {reason}"[:300]
            continue
        if error > 1e-2:
            failures[name] = f"wrong: relative error {error:.2e}"
        else:
            runs[name] = run
    assert "magi" in runs, failures["magi"]
    flops = 10 * slices.area() * heads[0] * head_dim
    milliseconds = interleaved_medians(runs)
    return {
        "mask": mask,
        "seqlen": seqlen,
        "heads": f"{heads[0]}:{heads[1]}",
        "head_dim": head_dim,
        "ms": {name: round(ms, 4) for name, ms in milliseconds.items()},
        "tflops": {name: round(flops / ms / 1e9) for name, ms in milliseconds.items()},
        "extra_mib": {name: extra_mib(run) for name, run in runs.items()},
        "failures": failures,
    }


def memory_table(rows: list[dict], names: list[str]) -> str:
    header = ["heads", "head_dim", "mask", "seqlen", *names]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        cells = [row[key] for key in header[:4]] + [
            row["extra_mib"].get(name, "-") for name in names
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def tables(context: dict, rows: list[dict], names: list[str]) -> str:
    speed = to_markdown(context, rows, names).replace("forward", "backward", 1)
    return speed + "\nExtra memory of a call, MiB:\n\n" + memory_table(rows, names)


def defines_argument(text: str) -> tuple[str, dict[str, str]]:
    return f"magi {text}", dict(item.split("=") for item in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write: adds .json and .md")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2**n * 1024 for n in range(7)])
    parser.add_argument("--heads", type=record.heads_argument, nargs="+", default=[(64, 8)])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--defines", type=defines_argument, nargs="+", default=[])
    parser.add_argument("--gate", type=int, default=2048, help="longest sequence that is checked")
    args = parser.parse_args()
    contenders = {name: CONTENDERS[name] for name in args.contenders}
    contenders |= {name: functools.partial(magi, **defines) for name, defines in args.defines}
    torch._functorch.config.donated_buffer = False  # so that one forward serves many backwards
    context = record.context(
        inputs="bf16, standard normal; documents log-normal, at most a quarter of the sequence",
        timing=f"median of {ROUNDS} rounds, contenders in random turns; GPU time of back-to-back calls",
    )
    rows = []
    for heads in args.heads:
        for head_dim in args.head_dims:
            for mask in args.masks:
                for seqlen in args.seqlens:
                    torch._dynamo.reset()
                    row = measure(mask, seqlen, heads, head_dim, contenders, args.gate)
                    rows.append(row)
                    print(heads, head_dim, mask, seqlen, row["tflops"], row["failures"], flush=True)
                    record.write(
                        args.output, context, rows, tables(context, rows, list(contenders))
                    )


if __name__ == "__main__":
    main()
