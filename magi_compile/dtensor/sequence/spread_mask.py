"""Masks of a whole sequence that carry the plan by which its tokens are spread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magi_compile.masks import AttnSlices
from magi_compile.masks.arguments import check_flag
from magi_compile.ops.attention import AttnOutput
from magi_compile.ops.aux_request import asks_for_max_scores, returned
from magi_compile.ops.define import define
from magi_compile.ops.validation import check_mapping, check_options

if TYPE_CHECKING:
    from magi_compile.dtensor.sequence.sequence_plan import SequencePlan


class SpreadSlices(AttnSlices):
    """The mask of a whole sequence whose tokens are spread by `plan`."""

    plan: SequencePlan
    digest: Tensor


class SpreadMask:
    """The mask_mod of a BlockMask for tokens that are spread by `plan`: it stands for the whole mask,
    and is never evaluated."""

    def __init__(self, plan: SequencePlan):
        self.plan = plan
        self.digest = plan.meta[:1].clone()

    def __call__(self, *_: Any) -> Tensor:
        raise RuntimeError(
            "this BlockMask is for tokens that are spread over ranks; call attention inside "
            "`with context_parallel(mesh, mask=plan)`, magi_compile.flex_attention, or plan.attention(q, k, v)"
        )

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any,
        block_mask: Any,
        scale: float | None,
        enable_gqa: bool,
        return_lse: bool,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
        around: Tensor | None = None,
    ) -> Any:
        """`magi_compile.flex_attention` over all ranks, with a BlockMask that has this mask_mod; `around`: see
        `attend_by`."""
        check_mapping("kernel_options", kernel_options)
        check_options("scale", scale)
        check_groups(query, key, enable_gqa)
        with_max = asks_for_max_scores(return_lse, return_aux)
        if score_mod is not None and not callable(score_mod):
            raise TypeError(f"`score_mod` must be a function or None, got {score_mod!r}")
        given = (query, key, value, scale, 0.0, score_mod)
        found = attend_by(self, around, *given, return_max_scores=with_max)
        return returned(*found, return_lse=return_lse, return_aux=return_aux)


# Dynamo compares objects that it finds in two places once, when it traces. So that a graph does not go on with the mask
# of another plan, each place has a tensor of its own with the plan's digest, and an op holds them against each other
# when the graph runs.


def _plan_of_block(meta: Tensor, own: Tensor, around: Tensor) -> Tensor:
    if not bool((own == around).any()):
        raise ValueError(
            "attention inside context_parallel must have the mask of that context_parallel, got the `block_mask` or "
            "the `slices` of another plan; use those of `with context_parallel(...) as plan`"
        )
    return meta.clone()


_lib = torch.library.Library("magi", "FRAGMENT")
define(
    _lib,
    "plan_of_block(Tensor meta, Tensor own, Tensor around) -> Tensor",
    _plan_of_block,
    lambda meta, own, around: torch.empty_like(meta),
)


def attend_by(
    mask: SpreadMask | SpreadSlices,
    around: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
    return_max_scores: bool = False,
) -> AttnOutput:
    """Attention of this rank's rows over all ranks, by a mask and its plan.

    Args:
        mask: what attention is called with.
        around: int64 `[plans]`, the digests of the plans of the block around the call, one of which the mask must have;
            None where there is no block, or one without plans.
        q: as in `SequencePlan.attend`, like k and v.
        k: of this rank.
        v: of this rank.
        *options: those of `SequencePlan.attend` behind `meta`.
        return_max_scores: whether `max_scores` is computed.

    Returns:
        That of `SequencePlan.attend`.

    Raises:
        ValueError: the mask has the plan of another block; what `SequencePlan.attend` raises.
    """
    plan = mask.plan
    around = plan.meta[:1] if around is None else around
    meta = torch.ops.magi.plan_of_block(plan.meta, mask.digest, around)
    return plan.attend(q, k, v, meta, *options, return_max_scores=return_max_scores)


def check_groups(query: Tensor, key: Tensor, enable_gqa: Any) -> None:
    """Raises where queries and keys `[B, H, seqlen, D]` differ in their heads without `enable_gqa`, as FlexAttention
    does."""
    check_flag("enable_gqa", enable_gqa)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"`key` must have the heads of `query`, {query.shape[1]}, got {key.shape[1]}; "
            "set enable_gqa=True for grouped queries"
        )
