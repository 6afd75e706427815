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

from collections.abc import Hashable
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.call import ahead
from magi_compile.dtensor.call.arguments import Options
from magi_compile.dtensor.call.asked import Asked
from magi_compile.dtensor.call.backward import backward
from magi_compile.dtensor.call.entries import packed, packed_rows, unpacked, unpacked_rows
from magi_compile.dtensor.call.execution import DevicePlan, Execution, Prepared, Scoring, unpack
from magi_compile.dtensor.call.forward import forward
from magi_compile.dtensor.call.sharding import register_rules
from magi_compile.dtensor.ranks.agreement import Agreement, require_agreement
from magi_compile.dtensor.ranks.watch import watched
from magi_compile.dtensor.transport.collectives import select as select_collective
from magi_compile.kernels.base import Grads, Saved, in_output_layout, new_max_scores, output_like
from magi_compile.ops.define import define, define_differentiable, gradients
from magi_compile.ops.library import gradients_of_tables, new_sums, split_sums, wanted_tables
from magi_compile.ops.scale import Scaled, scale_of_kernel
from magi_compile.score.program import ScoreProgram

_lib = torch.library.Library("magi", "FRAGMENT")
_MOST_KINDS = 64  # of calls that are kept with a plan


class _KnownCall(NamedTuple):
    """The parts that all calls of a kind by a plan have in common."""

    agreement: Agreement  # what the ranks must have in common
    prepared: Prepared  # how it runs
    group: ref[dist.ProcessGroup]  # the ranks, for which that is


def _execution(
    options: Options, scaled: Scaled, k: Tensor, v: Tensor, *, is_backward: bool = False
) -> Execution:
    """The execution for this rank's rows; all ranks of the group ask together. What follows from the plan, the shapes
    and the options is found out in the first call of its kind."""
    q = scaled.q
    group = reduce_group = _compat.resolve_process_group(options.group_name)
    plan = unpack(options.meta, options.data)
    key = _kind_of(options, q, k, v, is_backward=is_backward)
    known = plan.calls.get(key)
    call = Agreement.of(plan, q, k, v, options) if known is None else known.agreement
    # Before anything else, because what fails on one rank alone leaves the others waiting.
    names = options.group_name, options.reduce_group_name
    require_agreement(call, plan.rank, group, names[1], q.device, is_backward=is_backward)
    if known is None or known.group() is not group:
        if not is_backward:
            _check_rows(plan, q, k)
            _begin_ahead(plan, options, scaled, k, v)
        asked = Asked.of(options, scaled.softmax_scale, (q, k, v), is_backward=is_backward)
        kernel, problem, packing = asked.choice(plan.entries, plan.bits is not None)
        part = _part_of(plan, options)
        name, has_legs = options.collective, part.relayed[is_backward]
        moving = select_collective(name, group, q.device, has_legs=has_legs)
        prepared = Prepared(part, kernel, problem, moving, packing)
        if len(plan.calls) >= _MOST_KINDS:
            plan.calls.clear()
        known = plan.calls[key] = _KnownCall(call, prepared, ref(group))
    if names[0] != names[1]:
        reduce_group = _compat.resolve_process_group(names[1])
    scoring = _scoring(options, plan) if options.score else None
    return Execution(known.prepared, group, reduce_group, scoring)


def _kind_of(options: Options, q: Tensor, k: Tensor, v: Tensor, *, is_backward: bool) -> Hashable:
    """The key, beside a plan, of how a call runs."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    # The numbers and names that both passes have in front.
    numbers = (options[2:9], is_backward, deterministic, options.return_max_scores)
    shapes = (q.dtype, q.shape, k.shape, v.shape)
    if not options.score and not options.share:
        return (*numbers, *shapes)
    tables = tuple([(x.dtype, x.dim()) for x in options.tables or ()])
    of_score = (options.score, tables, tuple(options.wanted), tuple(options.share or ()))
    return (*numbers, *shapes, *of_score)


def _part_of(plan: DevicePlan, options: Options) -> DevicePlan:
    """The plan of the batch entries that this rank has a share of."""
    return plan.of_share(options.share[0], options.batch_entries) if options.share else plan


def _check_rows(plan: DevicePlan, q: Tensor, k: Tensor) -> None:
    for name, x, number, what, where in (
        ("q", q, plan.rows, "rows", "dispatch"),
        ("k", k, plan.key_rows, "keys", "dispatch.keys"),
    ):
        if x.shape[0] != number:
            raise ValueError(
                f"`{name}` must have the {number} {what} of the plan, got {x.shape[0]}; take those of "
                f"RankPlan.{where}.positions(rank), padding included"
            )


def _begin_ahead(plan: DevicePlan, options: Options, scaled: Scaled, k: Tensor, v: Tensor) -> None:
    """Begins to compile the kernels of a forward, and where tensors need gradients those of its backward: those of
    graphs do not say so, and have begun it already."""
    qkv, scale = (scaled.q, k, v), scaled.softmax_scale
    ahead.begin_plan(plan, k.device)
    ahead.begin_call(Asked.of(options, scale, qkv))
    of_tables = [x.requires_grad for x in options.tables or ()]
    if any((*of_tables, *(x.requires_grad for x in qkv))):
        wanted = wanted_tables(options.score, of_tables)
        back = options._replace(wanted=wanted, return_max_scores=False)
        ahead.begin_call(Asked.of(back, scale, qkv, is_backward=True))


def _begin_traced(
    options: Options, qkv: tuple[Tensor, Tensor, Tensor], *, is_backward: bool = False
) -> None:
    """Begins to compile what a call of fake tensors will launch."""
    if not _compat.is_in_use(qkv[0].device):
        return
    scale = scale_of_kernel(options.softmax_scale, options.score)
    with suppress(Exception):  # of sizes that nobody knows yet
        ahead.begin_call(Asked.of(options, scale, qkv, is_backward=is_backward))


def _scoring(options: Options, plan: DevicePlan) -> Scoring:
    """The score program with its tensors."""
    program, tables = ScoreProgram.parse(options.score), options.tables or ()
    return Scoring(
        _part_of(plan, options), program, tables, options.symbols or (), options.places or (-1, -1)
    )


def _cp_ffa_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(*rest)
    scaled = Scaled.of(q, options.softmax_scale, options.score)
    execution = _execution(options, scaled, k, v)
    entries = execution.prepared.entries
    queries = scaled.q if entries == 1 else packed(scaled.q, entries)
    if (apart := execution.prepared.apart) > 1:
        k, v = packed(k, apart), packed(v, apart)
    max_scores = new_max_scores(queries) if options.return_max_scores else None
    with watched(execution.group, q.device, is_backward=False):
        out, lse = forward(queries, k, v, execution, max_scores)
    if max_scores is None:
        max_scores = lse.new_empty(0)
    elif entries > 1:
        max_scores = unpacked_rows(max_scores, entries)
    if entries > 1:
        out, lse = unpacked(out, entries), unpacked_rows(lse, entries)
    return in_output_layout(q, out), lse, max_scores


def _cp_ffa_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(*rest)
    _begin_traced(options, (q, k, v))
    rows = (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32)
    return output_like(q, v.shape[2]), lse, lse.new_empty(rows if options.return_max_scores else 0)


def _cp_ffa_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, *others = rest
    options = Options.of_backward(*others)
    scaled = Scaled.of(q, options.softmax_scale, options.score)
    tables, wanted = options.tables or (), options.wanted
    execution = _execution(options, scaled, k, v, is_backward=True)
    queries, entries = scaled.q, execution.prepared.entries
    sums = new_sums(tables, wanted, q)
    if execution.scoring is not None:
        parts = dict(zip(wanted, split_sums(sums, tables, wanted), strict=True))
        execution = execution._replace(scoring=execution.scoring._replace(sums=parts))
    if entries > 1:
        dout, queries, out = (packed(x, entries) for x in (dout, queries, out))
        lse = packed_rows(lse, entries)
        dlse = None if dlse is None else packed_rows(dlse, entries)
    if (apart := execution.prepared.apart) > 1:
        k, v = packed(k, apart), packed(v, apart)
    with watched(execution.group, q.device, execution.reduce_group, is_backward=True):
        dq, dk, dv = backward(Grads(dout, dlse), Saved(queries, k, v, out, lse), execution)
    if entries > 1:
        dq = unpacked(dq, entries).contiguous()
    if apart > 1:
        dk, dv = (unpacked(x, apart).contiguous() for x in (dk, dv))
    return scaled.gradient(dq), dk, dv, sums


def _cp_ffa_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options.of_backward(*rest[2:])
    _begin_traced(options, (q, k, v), is_backward=True)
    sums = new_sums(options.tables or (), options.wanted, q)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sums


_OPTIONS = (
    "Tensor meta, Tensor data, float softmax_scale, float softcap, str kernel, str collective, str group_name, "
    "str reduce_group_name, SymInt batch_entries=1, Tensor[]? tables=None, SymInt[]? symbols=None, str score='', "
    "int[]? places=None, SymInt[]? share=None"
)
_FWD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool return_max_scores=False) -> (Tensor, Tensor, Tensor)"
define(_lib, f"cp_ffa_fwd{_FWD}", _cp_ffa_fwd, _cp_ffa_fwd_fake)
define(
    _lib,
    "cp_ffa_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, int[] wanted=[]) -> (Tensor, Tensor, Tensor, Tensor)",
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
        ctx.numbers = rest[2:_TABLES]
        # Of a call that has no more than these, no more is kept, because each costs time.
        ctx.others = None
        if tables or options.score or options.share:
            ctx.others = (options.symbols, options.score, options.places, options.share)
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
        given = (dout, dlse, q, k, v, out, lse, meta, data, *ctx.numbers)
        op = torch.ops.magi.cp_ffa_bwd.default
        if ctx.others is None:
            dq, dk, dv, _ = gradients(op, *given)
            return None, dq, dk, dv
        symbols, score, places, share = ctx.others
        wanted = wanted_tables(score, ctx.needs_input_grad[4:])
        dq, dk, dv, sums = gradients(op, *given, tables, symbols, score, places, share, wanted)
        return (None, dq, dk, dv, *gradients_of_tables(sums, tables, wanted))


_TABLES = Options._fields.index("tables")  # in front are the arguments that every call has


define_differentiable(
    *(_lib, f"cp_attention{_FWD}", torch.ops.magi.cp_ffa_fwd.default),
    *(_AttentionOverRanks, register_rules),
    tables_at=_TABLES,
)
