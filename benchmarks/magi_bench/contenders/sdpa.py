"""`scaled_dot_product_attention` with one backend at a time: is_causal where that is the mask, a dense mask elsewhere;
and scores, mask, softmax and product."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from magi_bench.contenders.base import Attend, Kernel, Layout, memory_refusal
from magi_bench.workloads.derive import Window, window_of
from magi_bench.workloads.workload import Inputs, Workload

# Beyond it dense masks cost minutes and tell nothing new.
MAX_MASK_BYTES = 2**30
FULL, CAUSAL = Window(None, None), Window(None, 0)


class _Sdpa(Kernel):
    backend: SDPBackend
    layout = Layout.HEADS_FIRST
    repeats_heads = False

    def supports(self, workload: Workload, device: str) -> list[str]:
        if window_of(workload.slices) in (FULL, CAUSAL):
            return []
        needed = workload.case.seqlen**2 * getattr(torch, workload.case.dtype).itemsize
        if needed <= MAX_MASK_BYTES:
            return []
        limit = f"more than {MAX_MASK_BYTES / 2**30:.0f} GiB"
        return [f"needs a dense mask of {needed / 2**30:.0f} GiB, {limit}"]

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        case, window = workload.case, window_of(workload.slices)
        mask = None
        if window not in (FULL, CAUSAL):
            # Additive, as backends convert boolean masks at every call.
            visible = dense_mask(workload, inputs.q.device)
            mask = torch.zeros(visible.shape, dtype=inputs.q.dtype, device=inputs.q.device)
            mask.masked_fill_(~visible, float("-inf"))
        group = case.nheads_q // case.nheads_kv

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.repeats_heads and group > 1:
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(
                    q, k, v, mask, is_causal=window == CAUSAL, enable_gqa=not self.repeats_heads
                )

        return attend


class CudnnSdpa(_Sdpa):
    name = "cudnn"
    label = "cuDNN SDPA"
    backend = SDPBackend.CUDNN_ATTENTION

    def supports(self, workload: Workload, device: str) -> list[str]:
        reasons = super().supports(workload, device)
        if torch.backends.cudnn.version() is None:
            reasons.append("this PyTorch has no cuDNN")
        return reasons


class MemoryEfficientSdpa(_Sdpa):
    name = "mem-efficient"
    label = "SDPA, memory-efficient"
    backend = SDPBackend.EFFICIENT_ATTENTION
    dtypes = ("bfloat16", "float16", "float32")
    repeats_heads = True


class CpuFlashSdpa(_Sdpa):
    """The kernel that PyTorch chooses on a CPU."""

    name = "flash-cpu"
    label = "SDPA, flash (CPU)"
    backend = SDPBackend.FLASH_ATTENTION
    devices = ("cpu",)
    dtypes = ("bfloat16", "float16", "float32")


class MathSdpa(_Sdpa):
    name = "math"
    label = "SDPA, math"
    backend = SDPBackend.MATH
    devices = ("cuda", "cpu")
    dtypes = ("bfloat16", "float16", "float32")

    def supports(self, workload: Workload, device: str) -> list[str]:
        case = workload.case
        # Scores, their softmax and two gradients, in fp32 at most.
        scores = 4 * case.nheads_q * case.seqlen**2 * 4
        return [*super().supports(workload, device), *memory_refusal(scores, device)]


class Naive(Kernel):
    """Attention as it is written down. Memory grows with the square of the length."""

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
        return memory_refusal(needed, device)

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
