"""FlashAttention 2 inside PyTorch, packed, by the ATen operators that `varlen_attn` is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Kernel
from magi_bench.workloads import derive
from magi_bench.workloads.workload import Inputs, Workload


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        window: derive.Window,
    ) -> Tensor:
        ctx.longest, ctx.is_causal = longest, window == derive.Window(None, 0)
        sides = (window.left, window.right)
        ctx.window = {} if ctx.is_causal else _window_arguments(*sides)
        lengths = (cu_seqlens, cu_seqlens, longest, longest)
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            *(q, k, v), *lengths, 0.0, ctx.is_causal, False, **ctx.window
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, rng_state, unused)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, k, v, out, lse, cu_seqlens, rng_state, unused = ctx.saved_tensors
        lengths = (cu_seqlens, cu_seqlens, ctx.longest, ctx.longest)
        random = (rng_state, unused)
        grads = torch.ops.aten._flash_attention_backward(
            *(dout, q, k, v, out, lse), *lengths, 0.0, ctx.is_causal, *random, **ctx.window
        )
        return (*grads, None, None, None)


def _window_arguments(left: int | None, right: int | None) -> dict[str, int]:
    return {
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
    }


class TorchFlash(Kernel):
    """PyTorch's own copy of FlashAttention 2."""

    name = "fa2"
    label = "FlashAttention 2 in PyTorch"

    def supports(self, workload: Workload, device: str) -> list[str]:
        return derive.needs_documents_or_window(workload.slices)

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        documents = derive.documents_of(workload.slices)
        if documents:
            window: derive.Window | None = derive.Window(None, 0 if documents.causal else None)
        else:
            documents = derive.Documents([0, workload.case.seqlen], False)
            window = derive.window_of(workload.slices)
        cu_seqlens = torch.tensor(documents.cu_seqlens, dtype=torch.int32, device=inputs.q.device)
        return lambda q, k, v: _Flash.apply(q, k, v, cu_seqlens, documents.longest, window)
