"""Video Sparse Attention of fastvideo-kernel: blocks of 64, ThunderKittens on Hopper, or Triton."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Layout, UniformBlocks
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.masks.evaluation.block_lists import counts_and_order

BLOCK = 64


class Vsa(UniformBlocks):
    name = "vsa"
    label = "VSA"
    sizes = (BLOCK,)
    layout = Layout.HEADS_FIRST

    module = "fastvideo_kernel.block_sparse_attn"
    distributions = ("fastvideo-kernel",)
    uses_triton = False

    def available(self) -> str | None:
        # The package chooses by this variable. A worker has one contender, but inherits what another one has set.
        os.environ["FASTVIDEO_VSA_TRITON"] = str(int(self.uses_triton))
        if (reason := super().available()) or self.uses_triton:
            return reason
        from fastvideo_kernel.block_sparse_attn import _get_sm90_ops

        is_there = all(op is not None for op in _get_sm90_ops())
        return (
            None
            if is_there
            else "its CUDA kernel cannot be loaded; the package would take Triton's"
        )

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        from fastvideo_kernel.block_sparse_attn import block_sparse_attn_from_indices

        count, index = counts_and_order(workload.blocks.visible.to(inputs.q.device)[None])
        sizes = torch.full((index.shape[-1],), BLOCK, dtype=torch.int32, device=inputs.q.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return block_sparse_attn_from_indices(q, k, v, index, count, sizes)[0]

        return attend


class VsaTriton(Vsa):
    name = "vsa-triton"
    label = "VSA (Triton)"
    compiles_slowly = True
    uses_triton = True
