"""magi::plan_lists: the block lists of a mask -> how a kernel walks them, packed; there are no slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class _ListCall(NamedTuple):
    """The arguments of the op."""

    block_lists: Sequence[Tensor]
    block_size: Sequence[int]
    batch: Any
    seqlen_q: Any
    seqlen_k: Any
    dtype: torch.dtype
    heads: Sequence[int]
    softcap: float
    kernel: str
    has_score: bool = False

    @property
    def lists(self) -> BlockLists:
        return BlockLists(*self.block_lists)

    @property
    def shape(self) -> ListShape:
        return shape_of_lists(self.lists, self.block_size, self.batch, self.seqlen_q, self.seqlen_k)

    def chosen(self) -> tuple[MappedKernel, AttnProblem]:
        """The kernel, and its problem."""
        device, heads = self.block_lists[0].device, tuple(self.heads)
        kernel, problem = chosen_for(
            *(device, self.dtype, heads, 1.0, self.softcap, self.kernel or None),  # type: ignore[arg-type]
            has_score=self.has_score,
            block_map=block_map_of(self.shape),
        )
        assert isinstance(kernel, MappedKernel)
        return kernel, problem


def _plan_lists(*arguments: Any) -> list[Tensor]:
    raise_pending()
    call = _ListCall(*arguments)
    kernel, problem = call.chosen()
    if call.block_lists[0].device.type == "cuda":
        hand_over_to_launcher()
    return pack(kernel.plan_lists(call.lists, call.shape, problem))


def _plan_lists_fake(*arguments: Any) -> list[Tensor]:
    call = _ListCall(*arguments)
    _, problem = call.chosen()
    return fake_plan_of_lists(call.lists, call.shape, problem)


define_repeatable(
    _lib,
    "plan_lists(Tensor[] block_lists, int[] block_size, SymInt batch, SymInt seqlen_q, SymInt seqlen_k, "
    "ScalarType dtype, int[] heads, float softcap, str kernel, bool has_score=False) -> Tensor[]",
    *(_plan_lists, _plan_lists_fake),
)
