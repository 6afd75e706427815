"""cuDNN's block-sparse attention, by the kernels that cudnn-frontend compiles for Hopper: blocks of 64 and of 128."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Layout, UniformBlocks
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.masks.evaluation.block_lists import counts_and_order


class CudnnBlocks(UniformBlocks):
    name = "cudnn-blocks"
    label = "cuDNN, block lists"
    sizes = (64, 128)
    no_groups = "its backward has no grouped heads"
    layout = Layout.BATCHED
    compiles_slowly = True
    module = "cudnn.block_sparse_attention"
    distributions = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl")

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        count, index = counts_and_order(workload.blocks.visible.to(inputs.q.device)[None])
        lists = {"q2k_block_nums": count, "q2k_block_index": index, "layout": "bshd"}
        lists["sparse_block_size"] = workload.blocks.q_sizes[0]
        may_be_empty = bool((count == 0).any())
        return lambda q, k, v: _Attention.apply(lists, may_be_empty, q, k, v)


class _Attention(torch.autograd.Function):
    """Its forward and its backward, which the package does not join."""

    @staticmethod
    def forward(
        ctx: Any, lists: dict[str, Any], may_be_empty: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        result = block_sparse_attention_forward(
            q, k, v, **lists, allow_empty_block_nums=may_be_empty
        )
        out, lse = result["o_tensor"], result["lse_tensor"]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lists = lists
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        from cudnn.block_sparse_attention import block_sparse_attention_backward

        given = (dout.contiguous(), *ctx.saved_tensors)
        grads = block_sparse_attention_backward(*given, **ctx.lists)
        return None, None, grads["dq_tensor"], grads["dk_tensor"], grads["dv_tensor"]
