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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.agreement import Agreement, require_agreement
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
from magi_compile.kernels.select import ScoreNeeds, problem_of, select
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


class _Options(NamedTuple):
    """The arguments of both ops behind their tensors, in the order of the forward's schema.

    Attributes:
        meta: of the plan.
        data: of the plan.
        softmax_scale: factor of the scores.
        softcap: 0.0 for none.
        kernel: its name; "" where the op is to choose.
        collective: how rows move, "auto" where the op is to choose.
        group_name: of the ranks.
        reduce_group_name: of the same ranks, for gradients.
        batch_entries: how many are among the heads.
        return_max_scores: whether the largest score of each row is asked for; no argument of the backward.
        tables: the tensors that the score program captures.
        symbols: the ints that it captures.
        score: the text of the score program; "" for none.
        places: see `Scoring`; empty without a score program.
        share: see `Packing.of`.
        wanted: the numbers of the captured tensors whose gradients are asked for; no argument of the forward.
    """

    meta: Tensor
    data: Tensor
    softmax_scale: float
    softcap: float
    kernel: str
    collective: str
    group_name: str
    reduce_group_name: str
    batch_entries: int = 1
    return_max_scores: bool = False
    tables: Sequence[Tensor] | None = None
    symbols: Sequence[int] | None = None
    score: str = ""
    places: Sequence[int] | None = None
    share: Sequence[int] | None = None
    wanted: Sequence[int] | None = None

    @classmethod
    def of_backward(cls, *arguments: Any) -> _Options:
        """Those of a backward with a score program or a share."""
        given = (*arguments[:_MAX_SCORES], False, *arguments[_MAX_SCORES:])
        return cls(*given)

    def execution(
        self, scaled: Scaled, k: Tensor, v: Tensor, *, is_backward: bool = False
    ) -> Execution:
        """The execution for this rank's rows; all ranks of the group ask together."""
        q, scale = scaled.q, scaled.softmax_scale
        group = _compat.resolve_process_group(self.group_name)
        plan = unpack(self.meta, self.data)
        # Before anything else, because what fails on one rank alone leaves the others waiting.
        options = (self.softmax_scale, self.softcap, self.collective, self.batch_entries)
        call = Agreement.of(plan, q, k, v, *options, self.score)
        require_agreement(
            *(call, plan.rank, group, self.reduce_group_name, q.device), is_backward=is_backward
        )
        problem = problem_of(q, k, v, scale, self.softcap)
        if self.return_max_scores:
            problem = replace(problem, has_max_scores=True)
        packing = PLAIN
        if self.score or not plan.is_exact:
            packing = self._packing(plan, q, k)
            problem = replace(
                problem,
                nheads_q=q.shape[1] // packing.queries,
                nheads_kv=k.shape[1] // packing.keys,
                has_bits=plan.bits is not None,
                has_score=bool(self.score),
            )
        scoring, needs = self._scoring() if self.score else (None, None)
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        chosen = _select_kernel(problem, self.kernel or None, needs, is_deterministic)
        moving = select_collective(self.collective, group, q.device)
        reduce_group = _compat.resolve_process_group(self.reduce_group_name)
        return Execution(plan, chosen, problem, moving, group, reduce_group, packing, scoring)

    def _packing(self, plan: DevicePlan, q: Tensor, k: Tensor) -> Packing:
        batch = self.batch_entries
        heads = q.shape[1] // batch, k.shape[1] // batch
        return Packing.of(plan.entries, batch, heads, self.share or (), has_score=bool(self.score))

    def _scoring(self) -> tuple[Scoring, ScoreNeeds]:
        """The score program, and what a kernel has to know of it."""
        program, tables = ScoreProgram.parse(self.score), self.tables or ()
        scoring = Scoring(program, tables, self.symbols or (), self.places or (-1, -1))
        dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
        return scoring, ScoreNeeds(program, dtypes, ranks, bool(self.wanted))


_MAX_SCORES = _Options._fields.index("return_max_scores")


def _cp_ffa_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = _Options(*rest)
    scaled = _scaled(q, options) if options.score else Scaled.of(q, options.softmax_scale)
    execution = options.execution(scaled, k, v)
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


def _scaled(q: Tensor, options: _Options) -> Scaled:
    """A score program tells the sign of a score: the scale stays with it."""
    return Scaled(q, options.softmax_scale, 1.0)


def _cp_ffa_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    rows = (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32)
    return out, lse, lse.new_empty(rows if _Options(*rest).return_max_scores else 0)


def _cp_ffa_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, *others = rest
    options = _Options.of_backward(*others) if len(others) > _MAX_SCORES else _Options(*others)
    scaled = _scaled(q, options) if options.score else Scaled.of(q, options.softmax_scale)
    execution = options.execution(scaled, k, v, is_backward=True)
    queries, packing = scaled.q, execution.packing
    if execution.scoring is None:
        sums = q.new_empty(0, dtype=torch.float32)
    else:
        tables, wanted = options.tables or (), options.wanted or ()
        sums = new_sums(tables, wanted, q)
        parts = dict(zip(wanted, split_sums(sums, tables, wanted), strict=True))
        execution = execution._replace(scoring=execution.scoring._replace(sums=parts))
    if packing is not PLAIN:
        dout, queries, out = (packed(x, packing.queries) for x in (dout, queries, out))
        lse = packed_rows(lse, packing.queries)
        dlse = None if dlse is None else packed_rows(dlse, packing.queries)
    with watched(execution.group, q.device, is_backward=True):
        dq, dk, dv = backward(Grads(dout, dlse), Saved(queries, k, v, out, lse), execution)
    if packing is not PLAIN:
        dq = unpacked(dq, packing.queries).contiguous()
    return scaled.gradient(dq), dk, dv, sums


def _cp_ffa_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, *others = rest
    sums = q.new_empty(0, dtype=torch.float32)
    if len(others) > _MAX_SCORES:
        options = _Options.of_backward(*others)
        sums = new_sums(options.tables or (), options.wanted or (), q)
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
        meta, data, *others = rest
        out, lse, max_scores = torch.ops.magi.cp_ffa_fwd.default(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse, meta, data, *tables)
        # Those of the backward, but for the tensors.
        at = _MAX_SCORES - 2
        ctx.options, ctx.more = others[:at], others[at + 2 :]
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
        op, arguments = torch.ops.magi.cp_ffa_bwd.default, (dout, dlse, q, k, v, out, lse)
        options: list[Any] = [meta, data, *ctx.options]
        wanted: list[int] = []
        if ctx.more:  # behind the captured tensors
            symbols, score, places, share = (*ctx.more, None, "", None, None)[:4]
            wanted = wanted_tables(score, ctx.needs_input_grad[4:])
            options += [tables, symbols, score, places, share, wanted]
        dq, dk, dv, sums = gradients(op, *arguments, *options)
        return (None, dq, dk, dv, *gradients_of_tables(sums, tables, wanted))


_TABLES = _Options._fields.index("tables")


def _tables_of(*rest: Any) -> Sequence[Tensor]:
    return rest[_TABLES] or () if len(rest) > _TABLES else ()


define_differentiable(
    *(_lib, f"cp_attention{_FWD}", torch.ops.magi.cp_ffa_fwd.default),
    *(_AttentionOverRanks, register_rules),
    tables_of=_tables_of,
)
