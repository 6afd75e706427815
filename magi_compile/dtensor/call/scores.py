"""score_mods across ranks: the score program of one device, at the positions of a rank's rows and of the keys that it
attends to.

A kernel numbers the rows that a rank holds and the keys of a stage from 0 on. So what becomes a program is

    score_mod(score, b, h, at_queries[q], at_keys[kv])

with two tensors that stand for positions: the op puts those of each stage in their place (`execution.Scoring`). In
eager code it is called with symbols, in a graph it is a part of FlexAttention (`lowering/across_ranks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.planning.rank_plan import PlanTensors
from magi_compile.functions.names import INDICES
from magi_compile.functions.record import check_takes
from magi_compile.lowering.across_ranks import REFUSAL, OverRanks, is_lowered
from magi_compile.masks.block_mask import one_block_mask
from magi_compile.ops.score_mod import ScoreMod, trace_score_mod
from magi_compile.score.program import UnsupportedScoreModError
from magi_compile.score.read import trace_score_program

_FLEX = _compat.flex_operator()


class ScoreOptions(NamedTuple):
    """The arguments of `magi::cp_attention` for a score_mod."""

    tables: list[Tensor]
    symbols: list[int]
    score: str
    places: list[int]


def read_score_mod(
    score_mod: Callable[..., Any], device: torch.device
) -> tuple[ScoreMod, ScoreOptions | None]:
    """The scale and the soft-cap of a score_mod of the indices of the whole sequence, or none of them and its program.
    Raises UnsupportedScoreModError, with a reason, if it is no pointwise function."""
    try:
        return trace_score_mod(score_mod), None
    except UnsupportedScoreModError:
        pass
    check_takes(score_mod, ("score", *INDICES), "score_mod")
    at_queries, at_keys = _stand_ins(device)
    program, tables = trace_score_program(_placed(score_mod, at_queries, at_keys), device)
    numbers = {id(x): i for i, x in enumerate(tables)}
    places = [numbers.get(id(x), -1) for x in (at_queries, at_keys)]
    return ScoreMod(), ScoreOptions(tables, [], program.text, places)


def _stand_ins(device: torch.device) -> tuple[Tensor, Tensor]:
    """For the positions of queries and of keys."""
    return (
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )


def _placed(
    score_mod: Callable[..., Any], at_queries: Tensor, at_keys: Tensor
) -> Callable[..., Any]:
    def placed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return score_mod(score, b, h, at_queries[q_idx], at_keys[kv_idx])

    return placed


class MaskOverRanks:
    """The mask_mod that names a plan in a graph."""

    def __init__(self, plan: OverRanks):
        self.plan = plan

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return torch.ops.magi.mask_over_ranks(b, h, q_idx, kv_idx, *self.plan)


def attention_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PlanTensors,
    softmax_scale: float,
    score_mod: Callable[..., Any],
    chosen: Sequence[str],
    batch_entries: int,
    share: list[int],
    *,
    return_max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The attention as a call of FlexAttention that the lowering replaces: packed tensors of this rank, a score_mod of
    the indices of the whole sequence, and names of kernel, collective, group and reduce_group; `share` as in
    `Packing.of`. Gives out, lse and, if they are asked for, the largest scores, as `magi::cp_attention` has them.

    Raises NotImplementedError if the graph is for a backend that does not lower FlexAttention.
    """
    if not is_lowered():
        raise NotImplementedError(REFUSAL)
    kernel, collective, group, reduce_group = chosen
    at_queries, at_keys = _stand_ins(q.device)
    where = (plan.meta, plan.data, at_queries, at_keys)
    named = OverRanks(*where, kernel, collective, group, reduce_group, share)
    mask = one_block_mask(MaskOverRanks(named), 1, q.shape[0], k.shape[0], q.device)
    by_entry = [
        x.unflatten(1, (batch_entries, x.shape[1] // batch_entries)).permute(1, 2, 0, 3)
        for x in (q, k, v)
    ]
    options = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": return_max_scores}
    placed = _placed(score_mod, at_queries, at_keys)
    out, *of_rows = _FLEX(*by_entry, placed, mask.as_tuple(), softmax_scale, options)
    number = 2 if return_max_scores else 1
    lse, *others = [x.flatten(0, 1) * math.log(2) for x in of_rows[:number]]  # in base 2
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse, others[0] if others else None
