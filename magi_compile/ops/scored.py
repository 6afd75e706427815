"""The ops of attention whose scores a score program changes (`score/program.py`), beside those of `library.py`.

magi::scored_attention   attention over slices -> (out, lse), differentiable, by captured tensors too: becomes, where it is called,
magi::scored_fwd         its values
magi::scored_bwd         its gradients -> (dq, dk, dv, those of the captured tensors that are asked for)
magi::scored_attention_with_max_scores, magi::scored_fwd_with_max_scores   the same -> (out, lse, max_scores)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import raise_pending
from magi_compile.kernels.base import (
    AttnProblem,
    Grads,
    Saved,
    in_output_layout,
    new_max_scores,
    output_like,
)
from magi_compile.kernels.scored import ScoredKernel
from magi_compile.masks import AttnSlices
from magi_compile.ops.define import (
    define,
    define_differentiable,
    define_of_entries,
    gradients,
)
from magi_compile.ops.library import chosen_for, plan_of, slices_of
from magi_compile.ops.sharding import register_rules
from magi_compile.ops.validation import check_op, check_op_gradients
from magi_compile.score.program import ScoreCall, ScoreProgram

_lib = torch.library.Library("magi", "FRAGMENT")


class _Prepared(NamedTuple):
    """What forward and backward hand to the kernel."""

    kernel: ScoredKernel
    problem: AttnProblem
    slices: AttnSlices | None
    plan: list[Tensor]
    score: ScoreCall


def _prepared(
    qkv: tuple[Tensor, Tensor, Tensor],
    tables: list[Tensor] | None,
    *options: Any,
    has_max_scores: bool = False,
) -> _Prepared:
    """`options` are those of `_OPTIONS`, in their order."""
    slices, plan, symbols, program, lengths, softmax_scale, kernel = options
    q, k, v = qkv
    heads = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    chosen, problem = chosen_for(
        *(q.device, q.dtype, heads, softmax_scale, 0.0, kernel or None),
        has_bits=len(slices) > 3,
        has_score=True,
        has_max_scores=has_max_scores,
    )
    assert isinstance(chosen, ScoredKernel)
    of_lists = slices_of(slices, q.shape[0], k.shape[0])
    walked = chosen.unpack(plan or plan_of(chosen, of_lists, problem))
    score = ScoreCall(ScoreProgram.parse(program), tables or [], symbols or [], *lengths)
    return _Prepared(chosen, problem, of_lists, walked, score)


def _scored_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    *rest: Any,
    max_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    raise_pending()
    check_op(q, k, v)
    kernel, problem, slices, plan, score = _prepared(
        (q, k, v), tables, *rest, has_max_scores=max_scores is not None
    )
    out, lse = kernel.scored_forward(q, k, v, slices, plan, problem, score, max_scores=max_scores)
    return in_output_layout(q, out), lse


def _scored_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    check_op(q, k, v)
    total_q, nheads_q, _ = q.shape
    return output_like(q, v.shape[2]), q.new_empty(nheads_q, total_q, dtype=torch.float32)


def _scored_fwd_with_max_scores(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    max_scores = new_max_scores(q)
    return *_scored_fwd(q, *rest, max_scores=max_scores), max_scores


def _scored_fwd_with_max_scores_fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = _scored_fwd_fake(q, *rest)
    return out, lse, torch.empty_like(lse)


def _scored_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: list[Tensor] | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    raise_pending()
    check_op_gradients(dout, dlse, q, k, v, out, lse)
    *options, wanted, deterministic = rest
    tables, wanted = tables or [], wanted or []
    kernel, problem, slices, plan, score = _prepared((q, k, v), tables, *options)
    grads, saved = Grads(dout, dlse), Saved(q, k, v, out, lse)
    (dq, dk, dv), of_tables = kernel.scored_backward(
        grads, saved, slices, plan, problem, score, wanted, deterministic=deterministic
    )
    rounded = [
        grad.to(tables[number].dtype) for number, grad in zip(wanted, of_tables, strict=True)
    ]
    return dq, dk, dv, rounded


def _scored_bwd_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: list[Tensor],
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    wanted = rest[-2]
    of_tables = [tables[number].new_empty(tables[number].shape) for number in wanted]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_tables


# `lengths` are seqlen_q and seqlen_k of a batch entry, and how many heads of queries are batch entries of their own, or 1.
_OPTIONS = (
    "Tensor[] slices, Tensor[] plan, SymInt[] symbols, str program, SymInt[] lengths, "
    "float softmax_scale, str kernel"
)
_ARGUMENTS = f"(Tensor q, Tensor k, Tensor v, Tensor[] tables, {_OPTIONS})"
_FWD = f"{_ARGUMENTS} -> (Tensor, Tensor)"
_FWD_WITH_MAX_SCORES = f"{_ARGUMENTS} -> (Tensor, Tensor, Tensor)"
define(_lib, f"scored_fwd{_FWD}", _scored_fwd, _scored_fwd_fake)
define(
    _lib,
    f"scored_fwd_with_max_scores{_FWD_WITH_MAX_SCORES}",
    _scored_fwd_with_max_scores,
    _scored_fwd_with_max_scores_fake,
)
_BWD = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] tables, "
    f"{_OPTIONS}, int[] wanted, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor[])"
)
define(_lib, f"scored_bwd{_BWD}", _scored_bwd, _scored_bwd_fake)
define_of_entries(_lib, f"scored_bwd_of_entries{_BWD}", torch.ops.magi.scored_bwd.default)


def _gradients_as_one_tuple(*arguments: Any) -> tuple[Tensor, ...]:
    ops = torch.ops.magi
    op = ops.scored_bwd if arguments[0].dim() == 3 else ops.scored_bwd_of_entries
    *qkv, of_tables = op.default(*arguments)
    return (*qkv, *of_tables)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        num_tables: int,
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        tables, (slices, plan, *options) = list(rest[:num_tables]), rest[num_tables:]
        ctx.options, ctx.num_tables, ctx.num_slices = options, num_tables, len(slices)
        out, lse, *max_scores = values(q, k, v, tables, slices, plan, *options)
        ctx.save_for_backward(q, k, v, out, lse, *tables, *slices, *plan)
        ctx.mark_non_differentiable(*max_scores)
        ctx.set_materialize_grads(False)
        return out, lse, *max_scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse, *rest = ctx.saved_tensors
        tables, rest = rest[: ctx.num_tables], rest[ctx.num_tables :]
        slices, plan = rest[: ctx.num_slices], rest[ctx.num_slices :]
        none = [None] * (2 + len(ctx.options))  # of what follows the tables
        if dout is None and dlse is None:
            return (None, None, None, None, None, *[None] * len(tables), *none)
        if dout is None:
            dout = torch.zeros_like(out)
        can_have = ScoreProgram.parse(ctx.options[1]).differentiable_tables
        wanted = [i for i in can_have if ctx.needs_input_grad[5 + i]]
        deterministic = torch.are_deterministic_algorithms_enabled()
        dq, dk, dv, *found = gradients(
            _gradients_as_one_tuple,
            *(dout, dlse, q, k, v, out, lse, tables, slices, plan, *ctx.options),
            *(wanted, deterministic),
        )
        of_tables = dict(zip(wanted, found, strict=True))
        return (None, dq, dk, dv, None, *map(of_tables.get, range(len(tables))), *none)


define_differentiable(
    *(_lib, f"scored_attention{_FWD}", torch.ops.magi.scored_fwd.default, _Attention),
    register_rules,
    takes_tables=True,
)
define_differentiable(
    *(_lib, f"scored_attention_with_max_scores{_FWD_WITH_MAX_SCORES}"),
    torch.ops.magi.scored_fwd_with_max_scores.default,
    *(_Attention, register_rules),
    takes_tables=True,
)
