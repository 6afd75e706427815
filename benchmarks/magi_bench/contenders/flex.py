"""PyTorch's compiled `flex_attention`, with its Triton and its FLASH (flash-attn-4) backend.

The BlockMask comes from the slices, block by block, so that no S x S mask is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from magi_bench.cases import Case
from magi_bench.contenders.base import Attend, Kernel, Layout
from magi_bench.contenders.magi import causal, lists_of_heads
from magi_bench.workloads.derive import block_areas
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile import _compat
from magi_compile.masks.evaluation.block_lists import counts_and_order

BLOCK = 128
NO_BACKWARD = "FlexAttention has no backward on a CPU"


def no_backward(case: Case, device: str) -> list[str]:
    """The refusal of FlexAttention's backward on a device; none if it has one, or needs none."""
    return [NO_BACKWARD] if device == "cpu" and case.which == "fwdbwd" else []


class FlexTriton(Kernel):
    name = "flex"
    label = "FlexAttention (Triton)"
    levels: tuple[str, ...] = ("kernel", "sparse")
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    layout = Layout.HEADS_FIRST
    compiles_slowly = True
    backend: str | None = None
    listed = BLOCK  # lists of blocks of multiples of this size say all; by those of 64 it finds no kernel
    _compiled_for: Workload | None = None

    @cached_property
    def _attend(self) -> Callable[..., Tensor]:
        _compat.allow_repeated_backward()
        return torch.compile(flex_attention, dynamic=False)

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        if workload is not self._compiled_for:
            torch.compiler.reset()  # one graph a workload, without a limit on how many
            self._compiled_for = workload
        block_mask = None
        if workload.case.mask != "full":
            block_mask = make_block_mask(workload, inputs.q.device, self.listed)
        options = {
            "enable_gqa": True,
            "kernel_options": {"BACKEND": self.backend} if self.backend else None,
        }
        return lambda q, k, v: self._attend(q, k, v, block_mask=block_mask, **options)


class MagiFlex(FlexTriton):
    """The same call with `backend="magi"`: lists, plan and host included."""

    name = "magi-flex"
    label = "flex_attention on magi_compile"
    levels = ("sparse",)
    dtypes = ("bfloat16", "float16")
    is_ours = True
    listed = 64

    @cached_property
    def _attend(self) -> Callable[..., Tensor]:
        _compat.allow_repeated_backward()
        options: dict[str, Any] = {"magi.strict": True}
        return torch.compile(flex_attention, dynamic=False, backend="magi", options=options)


class FlexFlash(FlexTriton):
    name = "flex-flash"
    label = "FlexAttention (FLASH)"
    levels: tuple[str, ...] = ("kernel",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    backend = "FLASH"
    module = "flash_attn.cute"


def make_block_mask(workload: Workload, device: torch.device, listed: int = BLOCK) -> BlockMask:
    """Blocks that are full, and blocks in which `mask_mod` decides; the lists alone where blocks are uniform, of
    multiples of `listed`."""
    case = workload.case
    if workload.block_map and workload.blocks.is_uniform and case.block % listed == 0:
        counts, indices = lists_of_heads(workload, device)
        return BlockMask.from_kv_blocks(
            *(counts, indices),
            BLOCK_SIZE=case.block,
            mask_mod=causal if workload.blocks.is_causal else None,
            seq_lengths=(case.seqlen, case.seqlen),
        )
    if workload.block_map:
        areas = workload.blocks.areas(BLOCK).repeat_interleave(workload.blocks.group, 0).to(device)
    else:
        areas = block_areas(workload.slices, BLOCK, device)[None]
    full = areas == BLOCK**2  # not the ragged blocks at the end, as in `create_block_mask`
    return BlockMask.from_kv_blocks(
        *counts_and_order(((areas > 0) & ~full)[None]),
        *counts_and_order(full[None]),
        BLOCK_SIZE=BLOCK,
        mask_mod=workload.mask_mod,
        seq_lengths=(case.seqlen, case.seqlen),
    )
