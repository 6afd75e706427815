"""Attention as it is written down: scores, mask, softmax, product. Memory grows with the square of the length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Contender, Layout, memory_refusal
from magi_bench.workloads.workload import Inputs, Workload


class Naive(Contender):
    name = "naive"
    label = "naive PyTorch"
    levels = ("kernel", "sparse")
    devices = ("cuda", "cpu")
    dtypes = ("bfloat16", "float16", "float32")
    layout = Layout.HEADS_FIRST

    def supports(self, workload: Workload, device: str) -> list[str]:
        cell = workload.cell
        width = getattr(torch, cell.dtype).itemsize
        # Scores, their softmax and two gradients of the same shape.
        needed = 4 * cell.nheads_q * cell.seqlen**2 * width
        return memory_refusal(needed, "the scores", device)

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        cell = workload.cell
        hidden = ~dense_mask(workload, inputs.q.device)
        group, scale = cell.nheads_q // cell.nheads_kv, cell.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            scores = (q * scale) @ k.mT
            return scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v

        return attend


def dense_mask(workload: Workload, device: torch.device) -> Tensor:
    """True where a row sees a key: `[seqlen, seqlen]`, or `[nheads_q, seqlen, seqlen]` of a sparse cell."""
    if not workload.block_map:
        return workload.slices.to(device).to_dense()
    return workload.blocks.to_dense(device)
