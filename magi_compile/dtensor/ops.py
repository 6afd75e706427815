"""The custom ops of attention across ranks: schemas, implementations, fakes, autograd.

magi::cp_attention   attention over the keys of all ranks -> (out, lse, max_scores), differentiable: becomes,
                     where it is called,
magi::cp_ffa_fwd     its values
magi::cp_ffa_bwd     its gradients -> (dq, dk, dv, those of captured tensors)

Communication lives inside an op, because a graph compiler does not reorder communication that it does not know. The
plan says the mask, with blocks of bits and masks of each batch entry and head; a score program is an argument, as in
`magi::attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.agreement import Agreement, require_agreement
from magi_compile.dtensor.arguments import BackwardOptions, Options
from magi_compile.dtensor.backward import backward
from magi_compile.dtensor.entries import (
    PLAIN,
    Packing,
    packed,
    packed_rows,
    unpacked,
    unpacked_rows,
)
from magi_compile.dtensor.execution import DevicePlan, Execution, Scoring, unpack
from magi_compile.dtensor.forward import forward
from magi_compile.dtensor.sharding import register_rules
from magi_compile.dtensor.transport.collectives import select as select_collective
from magi_compile.dtensor.watch import watched
from magi_compile.kernels.base import AttnProblem, Grads, Kernel, Saved, new_max_scores
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.select import problem_of, select
from magi_compile.ops.define import define, define_differentiable, gradients
from magi_compile.ops.library import gradients_of_tables, new_sums, split_sums, wanted_tables
from magi_compile.ops.scale import Scaled
from magi_compile.score.program import ScoreProgram


@lru_cache(maxsize=1024)
def _select_kernel(
    problem: AttnProblem, name: str | None, needs: ScoreNeeds | None, is_deterministic: bool
) -> Kernel:
    """The kernel: refusals depend on these alone, and a call is too short to ask for them each time. A slower one will
    do, because a rank has no FlexAttention to stay on."""
    return select(problem, name, needs, may_be_slower=True).kernel


_lib = torch.library.Library("magi", "FRAGMENT")


def _execution(
    options: Options,
    scaled: Scaled,
    k: Tensor,
    v: Tensor,
    wanted: Sequence[int] = (),
    *,
    is_backward: bool = False,
) -> Execution:
    """The execution for this rank's rows; all ranks of the group ask together."""
    q, scale = scaled.q, scaled.softmax_scale
    group = _compat.resolve_process_group(options.group_name)
    plan = unpack(options.meta, options.data)
    # Before anything else, because what fails on one rank alone leaves the others waiting.
    numbers = (options.softmax_scale, options.softcap, options.collective, options.batch_entries)
    call = Agreement.of(plan, q, k, v, *numbers, options.score)
    require_agreement(
        *(call, plan.rank, group, options.reduce_group_name, q.device), is_backward=is_backward
    )
    problem = problem_of(q, k, v, scale, options.softcap)
    if options.return_max_scores:
        problem = replace(problem, has_max_scores=True)
    packing = PLAIN
    if options.score or not plan.is_exact:
        packing = _packing(options, plan, q, k)
        problem = replace(
            problem,
            nheads_q=q.shape[1] // packing.queries,
            nheads_kv=k.shape[1] // packing.keys,
            has_bits=plan.bits is not None,
            has_score=bool(options.score),
        )
    scoring, needs = _scoring(options, wanted) if options.score else (None, None)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    chosen = _select_kernel(problem, options.kernel or None, needs, is_deterministic)
    moving = select_collective(options.collective, group, q.device)
    reduce_group = _compat.resolve_process_group(options.reduce_group_name)
    return Execution(plan, chosen, problem, moving, group, reduce_group, packing, scoring)


def _packing(options: Options, plan: DevicePlan, q: Tensor, k: Tensor) -> Packing:
    batch = options.batch_entries
    heads = q.shape[1] // batch, k.shape[1] // batch
    return Packing.of(
        plan.entries, batch, heads, options.share or (), has_score=bool(options.score)
    )


def _scoring(options: Options, wanted: Sequence[int]) -> tuple[Scoring, ScoreNeeds]:
    """The score program, and what a kernel has to know of it."""
    program, tables = ScoreProgram.parse(options.score), options.tables or ()
    scoring = Scoring(program, tables, options.symbols or (), options.places or (-1, -1))
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    return scoring, ScoreNeeds(program, dtypes, ranks, bool(wanted))


def _cp_ffa_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(*rest)
    scaled = _scaled(q, options)
    execution = _execution(options, scaled, k, v)
    plan = execution.plan
    if q.shape[0] != plan.rows:
        raise ValueError(
            f"`q` must have the {plan.rows} rows of the plan, got {q.shape[0]}; "
            "take those of RankPlan.dispatch.positions(rank), padding included"
        )
    if k.shape[0] != plan.key_rows:
        raise ValueError(
            f"`k` must have the {plan.key_rows} keys of the plan, got {k.shape[0]}; "
            "take those of RankPlan.dispatch.keys.positions(rank), padding included"
        )
    queries, packing = scaled.q, execution.packing
    if packing is not PLAIN:
        queries = packed(queries, packing.queries)
    max_scores = new_max_scores(queries) if options.return_max_scores else None
    with watched(execution.group, q.device, is_backward=False):
        out, lse = forward(queries, k, v, execution, max_scores)
    if max_scores is None:
        max_scores = lse.new_empty(0)
    elif packing is not PLAIN:
        max_scores = unpacked_rows(max_scores, packing.queries)
    if packing is not PLAIN:
        out, lse = unpacked(out, packing.queries), unpacked_rows(lse, packing.queries)
    return out.contiguous(), lse, max_scores


def _scaled(q: Tensor, options: Options | BackwardOptions) -> Scaled:
    if options.score:  # which tells the sign of a score: the scale stays with it
        return Scaled(q, options.softmax_scale, 1.0)
    return Scaled.of(q, options.softmax_scale)


def _cp_ffa_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    rows = (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32)
    return out, lse, lse.new_empty(rows if Options(*rest).return_max_scores else 0)


def _cp_ffa_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, *others = rest
    options = BackwardOptions(*others)
    scaled, tables, wanted = _scaled(q, options), options.tables or (), options.wanted
    execution = _execution(options.of_forward, scaled, k, v, wanted, is_backward=True)
    queries, packing = scaled.q, execution.packing
    sums = new_sums(tables, wanted, q)
    if execution.scoring is not None:
        parts = dict(zip(wanted, split_sums(sums, tables, wanted), strict=True))
        execution = execution._replace(scoring=execution.scoring._replace(sums=parts))
    if packing is not PLAIN:
        dout, queries, out = (packed(x, packing.queries) for x in (dout, queries, out))
        lse = packed_rows(lse, packing.queries)
        dlse = None if dlse is None else packed_rows(dlse, packing.queries)
    with watched(execution.group, q.device, execution.reduce_group, is_backward=True):
        dq, dk, dv = backward(Grads(dout, dlse), Saved(queries, k, v, out, lse), execution)
    if packing is not PLAIN:
        dq = unpacked(dq, packing.queries).contiguous()
    return scaled.gradient(dq), dk, dv, sums


def _cp_ffa_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, *others = rest
    options = BackwardOptions(*others)
    sums = new_sums(options.tables or (), options.wanted, q)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sums


_OPTIONS = (
    "Tensor meta, Tensor data, float softmax_scale, float softcap, str kernel, str collective, str group_name, "
    "str reduce_group_name, SymInt batch_entries=1"
)
_MORE_OPTIONS = "Tensor[]? tables=None, SymInt[]? symbols=None, str score='', int[]? places=None, SymInt[]? share=None"
_FWD = (
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool return_max_scores=False, {_MORE_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)"
)
define(_lib, f"cp_ffa_fwd{_FWD}", _cp_ffa_fwd, _cp_ffa_fwd_fake)
define(
    _lib,
    "cp_ffa_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, {_MORE_OPTIONS}, int[] wanted=[]) -> (Tensor, Tensor, Tensor, Tensor)",
    _cp_ffa_bwd,
    _cp_ffa_bwd_fake,
)


# cp_attention: what is differentiable, made of these


class _AttentionOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rest: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = Options(*rest)
        out, lse, max_scores = torch.ops.magi.cp_ffa_fwd.default(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse, options.meta, options.data, *tables)
        ctx.options = options._replace(meta=None, data=None, tables=None)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        return out, lse, max_scores

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        q, k, v, out, lse, meta, data, *tables = ctx.saved_tensors
        # Even without a gradient of its own a rank takes part, because the others wait for it.
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = wanted_tables(ctx.options.score, ctx.needs_input_grad[4:])
        options = ctx.options._replace(meta=meta, data=data, tables=tables)
        op, tensors = torch.ops.magi.cp_ffa_bwd.default, (dout, dlse, q, k, v, out, lse)
        dq, dk, dv, sums = gradients(op, *tensors, *BackwardOptions.of(options, wanted).short())
        return (None, dq, dk, dv, *gradients_of_tables(sums, tables, wanted))


_TABLES = Options._fields.index("tables")


def _tables_of(*rest: Any) -> Sequence[Tensor]:
    return rest[_TABLES] or () if len(rest) > _TABLES else ()


define_differentiable(
    *(_lib, f"cp_attention{_FWD}", torch.ops.magi.cp_ffa_fwd.default),
    *(_AttentionOverRanks, register_rules),
    tables_of=_tables_of,
)
