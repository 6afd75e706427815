"""The Triton kernel against compiled FlexAttention: forward and backward, causal and packed causal.

    python benchmarks/triton_kernel.py --output benchmarks/results/triton_h200_2026-11-21

Both get the same inputs and mask; a contender is timed only if it agrees with fp32 attention on a few heads. The
time is the median of `triton.testing.do_bench`, which empties L2 before every run. FLOPs are 4 * area * nheads_q *
head_dim forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import record
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench

from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.triton import TritonKernel
from magi_compile.masks.slices import AttnSlices

SEQLEN, NHEADS_Q, NHEADS_KV = 8192, 64, 8
DOCUMENTS = [0, 300, 1324, 1400, 3000, 3129, 5400, 6900, 8192]
MASKS = {"causal": [0, SEQLEN], "varlen_causal": DOCUMENTS}


class Contender(NamedTuple):
    """`forward()` gives out; `backward()` gives (dq, dk, dv) of the last forward. All `[T, H, D]`."""

    forward: Callable[[], Tensor]
    backward: Callable[[], tuple[Tensor, ...]]


def magi(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, slices: AttnSlices) -> Contender:
    kernel = TritonKernel()
    problem = AttnProblem(
        device_type="cuda",
        device_arch=torch.cuda.get_device_capability(),
        dtype=q.dtype,
        nheads_q=q.shape[1],
        nheads_kv=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        softmax_scale=q.shape[2] ** -0.5,
    )
    plan = kernel.plan(slices, problem)
    out, lse = kernel.forward(q, k, v, slices, plan, problem)
    return Contender(
        lambda: kernel.forward(q, k, v, slices, plan, problem).out,
        lambda: kernel.backward(Grads(dout, None), Saved(q, k, v, out, lse), slices, plan, problem),
    )


def flex(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, cu_seqlens: Tensor, max_autotune: bool
) -> Contender:
    document = torch.bucketize(torch.arange(SEQLEN, device=q.device), cu_seqlens[1:], right=True)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    block_mask = create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, device=q.device)
    attend = torch.compile(
        flex_attention, mode="max-autotune-no-cudagraphs" if max_autotune else None
    )
    leaves = [x.transpose(0, 1).contiguous().unsqueeze(0).requires_grad_() for x in (q, k, v)]
    grad = dout.transpose(0, 1).contiguous().unsqueeze(0)

    def forward() -> Tensor:
        return attend(*leaves, block_mask=block_mask, enable_gqa=True)

    out = forward()
    return Contender(
        lambda: forward().detach()[0].transpose(0, 1),
        lambda: tuple(
            x[0].transpose(0, 1) for x in torch.autograd.grad(out, leaves, grad, retain_graph=True)
        ),
    )


def disagreement(
    contender: Contender, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, slices: AttnSlices
) -> float:
    """Largest relative error of out, dq, dk, dv for the first key-value head, against fp32."""
    group = q.shape[1] // k.shape[1]
    leaves = [q[:, :group], k[:, :1], v[:, :1]]
    leaves = [x.detach().float().transpose(0, 1).requires_grad_() for x in leaves]
    scores = leaves[0] @ leaves[1].transpose(1, 2) * q.shape[2] ** -0.5
    p = scores.masked_fill(~slices.to_dense(), -torch.inf).softmax(-1)
    out = p @ leaves[2]
    grads = torch.autograd.grad(out, leaves, dout[:, :group].float().transpose(0, 1))
    exact = [x.transpose(0, 1) for x in (out.detach(), *grads)]
    actual = [contender.forward(), *contender.backward()]
    errors = [
        (a[:, : e.shape[1]].float() - e).norm() / e.norm()
        for a, e in zip(actual, exact, strict=True)
    ]
    return max(float(error) for error in errors)


def measure(mask: str, head_dim: int, max_autotune: bool) -> list[dict]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, dout = (
        torch.randn(SEQLEN, NHEADS_Q, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    k, v = (
        torch.randn(SEQLEN, NHEADS_KV, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    cu_seqlens = torch.tensor(MASKS[mask], dtype=torch.int32, device="cuda")
    slices = AttnSlices.from_cu_seqlens(cu_seqlens.cpu(), causal=True).to("cuda")
    contenders = {
        "magi triton": lambda: magi(q, k, v, dout, slices),
        "flex": lambda: flex(q, k, v, dout, cu_seqlens, max_autotune),
    }
    flops = 4 * slices.area() * NHEADS_Q * head_dim
    rows = []
    for name, make in contenders.items():
        contender = make()
        error = disagreement(contender, q, k, v, dout, slices)
        assert error < 1e-2, f"{name} is wrong on {mask}: relative error {error:.2e}"
        for direction, run, factor in (
            ("forward", contender.forward, 1.0),
            ("backward", contender.backward, 2.5),
        ):
            low, ms, high = do_bench(run, warmup=50, rep=200, quantiles=[0.2, 0.5, 0.8])
            row = {
                "mask": mask,
                "head_dim": head_dim,
                "contender": name,
                "direction": direction,
                "ms": round(ms, 3),
                "ms_20_80": [round(low, 3), round(high, 3)],
                "tflops": round(factor * flops / ms / 1e9),
                "relative_error": round(error, 5),
            }
            print(row, flush=True)
            rows.append(row)
    return rows


def to_markdown(context: dict, rows: list[dict]) -> str:
    lines = ["# The Triton kernel and compiled FlexAttention", ""]
    lines += [f"- {name}: {value}" for name, value in context.items()]
    lines += [
        "",
        "| mask | head_dim | direction | contender | ms | TFLOP/s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        "| {mask} | {head_dim} | {direction} | {contender} | {ms} | {tflops} |".format(**row)
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write: adds .json and .md")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--max-autotune", action="store_true", help="let Inductor tune flex")
    args = parser.parse_args()
    rows = [
        row
        for head_dim in args.head_dims
        for mask in MASKS
        for row in measure(mask, head_dim, args.max_autotune)
    ]
    context = record.context(
        shape=f"{SEQLEN} tokens, {NHEADS_Q}:{NHEADS_KV} heads, bf16",
        timing="median of do_bench, L2 emptied before each run",
    )
    record.write(args.output, context, rows, to_markdown(context, rows))


if __name__ == "__main__":
    main()
