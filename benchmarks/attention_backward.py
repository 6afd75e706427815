"""The Hopper backward kernels against cuDNN's SDPA, compiled FlexAttention and our Triton kernel, on six masks.

    python benchmarks/attention_backward.py --output benchmarks/results/backward_h200_2026-11-21

Masks, inputs and timing are those of `attention_forward.py`; the time is that of dq, dk and dv from saved results of
the forward, all helper kernels included. A contender is timed only if its gradients agree with fp64 attention for the
last key-value head, over the part of the sequence that fits. FLOPs are 10 * area * nheads_q * head_dim for all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F
from attention_forward import (
    MASKS,
    ROUNDS,
    gpu_state,
    heads_argument,
    interleaved_medians,
    make_mask_mod,
    make_slices,
    to_markdown,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from magi_compile.kernels.base import AttnProblem, Kernel
from magi_compile.kernels.cuda import CudaKernel
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
    return lambda: kernel.backward(dout, None, q, k, v, out, lse, slices, plan, problem)


def magi(inputs: Inputs, mask: str, slices: AttnSlices) -> Backward:
    return of_kernel(CudaKernel(), inputs, slices)


def triton(inputs: Inputs, mask: str, slices: AttnSlices) -> Backward:
    return of_kernel(TritonKernel(), inputs, slices)


def of_autograd(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> Backward:
    leaves = [x.transpose(0, 1)[None].detach().requires_grad_() for x in inputs[:3]]
    dout = inputs.dout.transpose(0, 1)[None]
    out = attend(*leaves)

    def run() -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return tuple(grad[0].transpose(0, 1) for grad in grads)

    return run


def cudnn(inputs: Inputs, mask: str, slices: AttnSlices) -> Backward | None:
    if mask not in ("full", "causal"):
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=mask == "causal", enable_gqa=True
            )

    return of_autograd(attend, inputs)


def flex(inputs: Inputs, mask: str, slices: AttnSlices) -> Backward:
    seqlen = len(inputs.q)
    mask_mod = make_mask_mod(mask, seqlen)
    block_mask = None
    if mask_mod:
        block_mask = create_block_mask(
            mask_mod, None, None, seqlen, seqlen, device="cuda", _compile=True
        )
    attend = torch.compile(flex_attention, dynamic=False)
    return of_autograd(
        lambda q, k, v: attend(q, k, v, block_mask=block_mask, enable_gqa=True), inputs
    )


CONTENDERS = {"magi": magi, "cudnn": cudnn, "flex": flex, "triton": triton}


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


def measure(
    mask: str, seqlen: int, heads: tuple[int, int], head_dim: int, names: list[str], gate: int
) -> dict:
    """One row. Dense fp64 scores need memory, so longer sequences are checked at length `gate`."""
    checked = min(seqlen, gate)
    small = random_inputs(checked, heads, head_dim)
    exact = exact_gradients(small, make_slices(mask, checked))
    inputs, slices = random_inputs(seqlen, heads, head_dim), make_slices(mask, seqlen)
    runs = {}
    for name in names:
        run = CONTENDERS[name](small, mask, make_slices(mask, checked))
        if run is None:
            continue
        error = largest_relative_error(run, exact)
        assert error < 1e-2, f"{name} is wrong on {mask} {checked}: relative error {error:.2e}"
        runs[name] = CONTENDERS[name](inputs, mask, slices)
    flops = 10 * slices.area() * heads[0] * head_dim
    milliseconds = interleaved_medians(runs)
    return {
        "mask": mask,
        "seqlen": seqlen,
        "heads": f"{heads[0]}:{heads[1]}",
        "head_dim": head_dim,
        "ms": {name: round(ms, 4) for name, ms in milliseconds.items()},
        "tflops": {name: round(flops / ms / 1e9) for name, ms in milliseconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write: adds .json and .md")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--heads", type=heads_argument, nargs="+", default=[(64, 8)])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--gate", type=int, default=2048, help="longest sequence that is checked")
    args = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # so that one forward serves many backwards
    context = {
        "gpu": gpu_state(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "inputs": "bf16, standard normal; documents log-normal, at most a quarter of the sequence",
        "timing": f"median of {ROUNDS} rounds, contenders in turns; GPU time of back-to-back calls",
    }
    rows = []
    for heads in args.heads:
        for head_dim in args.head_dims:
            for mask in args.masks:
                for seqlen in args.seqlens:
                    torch._dynamo.reset()
                    row = measure(mask, seqlen, heads, head_dim, args.contenders, args.gate)
                    rows.append(row)
                    print(heads, head_dim, mask, seqlen, row["tflops"], flush=True)
    if args.output:
        record = {"context": context, "rows": rows}
        markdown = to_markdown(context, rows, args.contenders).replace("forward", "backward", 1)
        args.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        args.output.with_suffix(".md").write_text(markdown)


if __name__ == "__main__":
    main()
