"""Attention as it is written down: scores, mask, softmax, product. Memory grows with the square of the length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Kernel, Layout, memory_refusal
from magi_bench.workloads.workload import Inputs, Workload


class Naive(Kernel):
    name = "naive"
    label = "naive PyTorch"
    levels = ("kernel", "sparse")
    devices = ("cuda", "cpu")
    dtypes = ("bfloat16", "float16", "float32")
    layout = Layout.HEADS_FIRST

    def supports(self, workload: Workload, device: str) -> list[str]:
        case = workload.case
        width = getattr(torch, case.dtype).itemsize
        # Scores, their softmax and two gradients of the same shape.
        needed = 4 * case.nheads_q * case.seqlen**2 * width
        return memory_refusal(needed, "the scores", device)

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        case = workload.case
        hidden = ~dense_mask(workload, inputs.q.device)
        group, scale = case.nheads_q // case.nheads_kv, case.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            scores = (q * scale) @ k.mT
            return scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v

        return attend


def dense_mask(workload: Workload, device: torch.device) -> Tensor:
    """True where a row sees a key: `[seqlen, seqlen]`, or `[nheads_q, seqlen, seqlen]` of a sparse case."""
    if not workload.block_map:
        return workload.slices.to(device).to_dense()
    return workload.blocks.to_dense(device)
