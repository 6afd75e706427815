"""FlashAttention 2 in PyTorch, packed, by the ATen operators that `varlen_attn` is made of, and the packages 3 and 4:
documents and windows; 4 also block-sparse masks."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Kernel, Layout
from magi_bench.workloads import derive
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.masks.evaluation.block_lists import counts_and_order


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
        return [] if derive.packing_of(workload.slices) else ["takes documents and windows only"]

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        found = derive.packing_of(workload.slices)
        assert found is not None
        cu_seqlens, longest, window = found.cu_seqlens, found.longest, derive.Window(*found[2:])
        if cu_seqlens is None:
            cu_seqlens = torch.tensor([0, workload.case.seqlen], dtype=torch.int32)
        cu_seqlens = cu_seqlens.to(inputs.q.device)
        return lambda q, k, v: _Flash.apply(q, k, v, cu_seqlens, longest, window)


class _FlashAttention(Kernel):
    unlimited: int | None = -1

    def supports(self, workload: Workload, device: str) -> list[str]:
        return [] if derive.packing_of(workload.slices) else ["takes documents and windows only"]

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        assert self.module is not None
        package = importlib.import_module(self.module)
        found = derive.packing_of(workload.slices)
        assert found is not None
        causal = found[2:] == (None, 0)
        if found.cu_seqlens is not None:
            options: dict[str, Any] = {"causal": causal}
            for side in "qk":
                options[f"cu_seqlens_{side}"] = found.cu_seqlens.to(inputs.q.device)
                options[f"max_seqlen_{side}"] = found.longest
            return lambda q, k, v: _first(package.flash_attn_varlen_func(q, k, v, **options))
        sides = tuple(self.unlimited if causal or side is None else side for side in found[2:])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            batched = (x[None] for x in (q, k, v))
            return _first(package.flash_attn_func(*batched, causal=causal, window_size=sides))[0]

        return attend


class FlashAttention3(_FlashAttention):
    name = "fa3"
    label = "FlashAttention 3"
    module = "flash_attn_interface"
    distributions = ("flash-attn-3",)


class FlashAttention4(_FlashAttention):
    name = "fa4"
    label = "FlashAttention 4"
    module = "flash_attn.cute"
    distributions = ("flash-attn-4", "nvidia-cutlass-dsl")
    unlimited = None


class FlashAttention4Blocks(Kernel):
    """flash-attn-4 with lists of blocks, those on the diagonal with a mask_mod where they are causal; its Hopper tiles
    have 128 rows and keys."""

    name = "fa4-blocks"
    label = "FlashAttention 4, block lists"
    levels = ("sparse",)
    layout = Layout.BATCHED
    BLOCK = 128
    module = FlashAttention4.module
    distributions = FlashAttention4.distributions

    def supports(self, workload: Workload, device: str) -> list[str]:
        blocks = workload.block_map
        if blocks and blocks.is_uniform and blocks.q_sizes[0] == self.BLOCK:
            return []
        return [f"takes uniform blocks of {self.BLOCK}"]

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        blocks = workload.blocks
        visible = blocks.visible.to(inputs.q.device).repeat_interleave(blocks.group, 0)[None]
        num_q, num_k = visible.shape[2:]
        is_partial = torch.eye(num_q, num_k, dtype=torch.bool, device=visible.device)
        is_partial &= torch.tensor(blocks.is_causal, device=visible.device)

        def lists(visible: Tensor) -> BlockSparseTensorsTorch:
            return BlockSparseTensorsTorch(
                *counts_and_order(visible & is_partial),
                *counts_and_order(visible & ~is_partial),
                block_size=(self.BLOCK, self.BLOCK),
            )

        options: dict[str, Any] = {
            "block_sparse_tensors": lists(visible),
            "block_sparse_tensors_bwd": lists(visible.mT),
        }
        if blocks.is_causal:
            options["mask_mod"] = _causal()
        return lambda q, k, v: _first(flash_attn_func(q, k, v, **options))


@cache
def _causal() -> Any:
    """The mask_mod of a causal mask, as flash-attn-4 compiles it."""
    from cutlass import cute

    @cute.jit
    def causal(b, h, q, kv, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return kv <= q

    return causal


def _first(result: Tensor | tuple) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
