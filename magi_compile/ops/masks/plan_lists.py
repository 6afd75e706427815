"""magi::plan_lists: the block lists of a mask -> how a kernel walks them, packed; there are no slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from magi_compile._checks import raise_pending
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.mapped import MappedKernel, block_map_of, fake_plan_of_lists
from magi_compile.kernels.plan import pack
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.ops.library import chosen_for
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher
from magi_compile.plan.block_map import ListShape

_lib = torch.library.Library("magi", "FRAGMENT")


def shape_of_lists(
    lists: BlockLists, block_size: Sequence[int], batch: Any, seqlen_q: Any, seqlen_k: Any
) -> ListShape:
    """The sizes of a mask of `lists`, real or fake ones or nodes' values."""
    heads = max(int(num_blocks.shape[1]) for num_blocks, _ in lists.kinds)
    rows, keys = (int(size) for size in block_size)
    return ListShape(batch, heads, seqlen_q, seqlen_k, rows, keys)


def _chosen(
    lists: BlockLists,
    shape: ListShape,
    dtype: torch.dtype,
    heads: Sequence[int],
    rest: tuple[Any, ...],
) -> tuple[MappedKernel, AttnProblem]:
    softcap, kernel, has_score = rest
    kernel_of_call, problem = chosen_for(
        *(lists.kv_indices.device, dtype, tuple(heads), 1.0, softcap, kernel or None),
        has_score=has_score,
        block_map=block_map_of(shape),
    )
    assert isinstance(kernel_of_call, MappedKernel)
    return kernel_of_call, problem


def _plan_lists(
    block_lists: list[Tensor],
    block_size: Sequence[int],
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    dtype: torch.dtype,
    heads: Sequence[int],
    *rest: Any,
) -> list[Tensor]:
    raise_pending()
    lists = BlockLists(*block_lists)
    shape = shape_of_lists(lists, block_size, batch, seqlen_q, seqlen_k)
    kernel, problem = _chosen(lists, shape, dtype, heads, rest)
    if lists.kv_indices.device.type == "cuda":
        hand_over_to_launcher()
    return pack(kernel.plan_lists(lists, shape, problem))


def _plan_lists_fake(
    block_lists: list[Tensor],
    block_size: Sequence[int],
    batch: Any,
    seqlen_q: Any,
    seqlen_k: Any,
    dtype: torch.dtype,
    heads: Sequence[int],
    *rest: Any,
) -> list[Tensor]:
    lists = BlockLists(*block_lists)
    shape = shape_of_lists(lists, block_size, batch, seqlen_q, seqlen_k)
    _, problem = _chosen(lists, shape, dtype, heads, rest)
    return fake_plan_of_lists(lists, shape, problem)


define_repeatable(
    _lib,
    "plan_lists(Tensor[] block_lists, int[] block_size, SymInt batch, SymInt seqlen_q, SymInt seqlen_k, "
    "ScalarType dtype, int[] heads, float softcap, str kernel, bool has_score=False) -> Tensor[]",
    *(_plan_lists, _plan_lists_fake),
)
