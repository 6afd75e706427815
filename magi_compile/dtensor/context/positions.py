"""Checks that a model inside of `context_parallel` has not counted the positions of its tokens by itself.

A model that is given no positions takes 0, 1, 2, ... for the tokens that it sees, which are those of one rank. That is
another model of the sequence, and no shape tells. Every rank counts then, so the ranks ask each other: positions that
are given are 0, 1, 2, ... on every rank only where each rank has one document of its own, and no key travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.call.execution import routes_of, unpack
from magi_compile.dtensor.sequence.spread_mask import SpreadMask
from magi_compile.ops.define import define

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Of a group, in training and in evaluation, that are asked on a GPU, because the host waits for the answer.
FIRST_CALLS = 16

_asked: WeakKeyDictionary[dist.ProcessGroup, list[int]] = WeakKeyDictionary()


def is_over_ranks(mask: Any) -> bool:
    """True if a mask is the BlockMask of a plan."""
    return isinstance(getattr(mask, "mask_mod", None), SpreadMask)


def with_given_positions(block_mask: Any, positions: Tensor, is_training: bool) -> BlockMask:
    """`block_mask` of a plan, or in a graph one like it so that the graph asks, for attention in which this rank's
    tokens have `positions`, int `[1 or B, rows]`; others are returned as they are. All ranks call it together, once in
    each forward. Raises ValueError, on every rank, if the positions are those of a model that has counted them by
    itself."""
    mask_mod = block_mask.mask_mod
    if not isinstance(mask_mod, SpreadMask):
        return block_mask
    plan = mask_mod.plan
    digest = torch.ops.magi.given_positions(
        plan.meta, plan.data, positions, is_training, plan.group_name
    )
    if not torch.compiler.is_compiling():
        return block_mask
    asked = SpreadMask(plan)
    asked.digest = digest
    return type(block_mask).from_kv_blocks(
        *(block_mask.kv_num_blocks, block_mask.kv_indices),
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=asked,
        seq_lengths=block_mask.seq_lengths,
    )


def _given_positions(
    meta: Tensor, data: Tensor, positions: Tensor, is_training: bool, group_name: str
) -> Tensor:
    group = _compat.resolve_process_group(group_name)
    if _is_asked(group, is_training, positions):
        rows = positions.shape[1]
        is_counted = (positions == torch.arange(rows, device=positions.device)).all()
        plan = unpack(meta, data)
        is_cut = bool(routes_of(plan.forward)) or plan.head_ranks > 1
        travels = torch.full_like(is_counted, is_cut)
        mine = torch.stack([is_counted, travels]).long()
        every = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(every, mine, group)
        counted, travel = torch.stack(every).T.tolist()
        if all(counted) and any(travel):
            raise ValueError(
                f"`position_ids` must be given inside context_parallel, got 0 to {rows - 1} on every rank, as a model "
                "counts the tokens of its rank by itself; pass the positions of the whole sequence in `buffers`, and "
                "to the model as `position_ids`"
            )
    return meta[:1].clone()


def _is_asked(group: dist.ProcessGroup, is_training: bool, positions: Tensor) -> bool:
    """The ranks of one call in the same order, so they ask together."""
    if not positions.is_cuda:
        return True
    if _compat.is_capturing():
        return False
    asked = _asked.setdefault(group, [0, 0])
    asked[is_training] += 1
    return asked[is_training] <= FIRST_CALLS


_lib = torch.library.Library("magi", "FRAGMENT")
define(
    _lib,
    "given_positions(Tensor meta, Tensor data, Tensor positions, bool is_training, str group_name) -> Tensor",
    _given_positions,
    lambda meta, *_: torch.empty_like(meta[:1]),
)
