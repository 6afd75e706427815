"""Attention across ranks: every rank holds some rows of q, k and v, and keys travel to the queries that see them.

    forward     for each stage: start the next cast; attend, merged with the stages before
                or one call, which begins with local keys while the others travel
    backward    for each stage: start the next cast; gradients; send dk and dv home while the next stage runs;
                what a kernel does before it needs keys and after it has dk and dv runs beside both
                or one call, which works on local keys while the others travel, and while gradients do

Keys and values are cast again in the backward rather than kept. One op per attention: communication lives inside
it, because a graph compiler does not reorder communication it does not know. Partial results merge and add up in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.agreement import require_agreement
from magi_compile.dtensor.execution import DeviceStage, Execution, MergedStage, unpack
from magi_compile.dtensor.planning.rank_plan import PlanTensors
from magi_compile.dtensor.sharding import register_rules
from magi_compile.dtensor.transport.collectives import (
    Collective,
    KernelSignals,
    PendingReduce,
    Route,
)
from magi_compile.dtensor.transport.collectives import select as select_collective
from magi_compile.kernels.base import BackwardOutput, ForwardOutput, Grads, Saved
from magi_compile.kernels.merge import sum_partials
from magi_compile.kernels.overlap import EarlyKernel, KeyTensors, PhasedKernel, SavedQueries
from magi_compile.kernels.select import problem_of, select
from magi_compile.ops.define import define, define_differentiable, gradients
from magi_compile.ops.dtensors import PACKED, are_distributed, shards_of, wrapped, wrapped_lse
from magi_compile.ops.scale import Scaled
from magi_compile.ops.validation import check_options, check_qkv


def forward(q: Tensor, k: Tensor, v: Tensor, execution: Execution) -> ForwardOutput:
    """This rank's rows of the attention; all ranks of the group call it together."""
    plan, kernel, problem, collective, group, _ = execution
    if plan.merged is not None:
        return _forward_merged(q, k, v, plan.merged, execution)
    wide = torch.promote_types(q.dtype, torch.float32)
    last = max((i for i, stage in enumerate(plan.forward) if not stage.is_empty), default=-1)
    result: ForwardOutput | None = None
    casts = collective.casts((k, v), _routes(plan.forward), group)
    cast = next(casts, None)  # the first one starts
    for i, stage in enumerate(plan.forward):
        keys: Sequence[Tensor] = (k, v)
        if stage.route is not None:
            assert cast is not None
            keys = cast.wait()
            cast = next(casts, None)  # the next one travels while this stage is computed
        if stage.is_empty:
            continue
        k_stage, v_stage = keys
        result = kernel.forward(
            *(q, k_stage, v_stage, stage.slices, stage.kernel_plan(kernel, problem), problem),
            prior=result,
            out_dtype=q.dtype if i == last else wide,
        )
    if result is not None:
        return result
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    return ForwardOutput(out, q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32))


def _forward_merged(
    q: Tensor, k: Tensor, v: Tensor, stage: MergedStage, execution: Execution
) -> ForwardOutput:
    """Attention over local and remote keys in one call, which begins with the local ones if the kernel can."""
    _, kernel, problem, collective, group, _ = execution
    # What can fail does so before rows are on their way.
    early_plan = stage.early_plan(kernel, problem)
    both = stage.side_by_side if early_plan is None else None
    kernel_plan = both.kernel_plan(kernel, problem) if both else []
    casts = collective.casts((k, v), [stage.route], group)
    cast = next(casts)
    if both is None:
        assert isinstance(kernel, EarlyKernel)
        steps = kernel.early_forward(
            q, (k, v), cast.buffers, early_plan, problem, free_sms=cast.sms
        )
        steps.begin()
        with steps.beside():
            cast.wait()
            steps.main()
        result = steps.finish()
    else:
        k_all, v_all = (torch.cat(pair) for pair in zip((k, v), cast.wait(), strict=True))
        result = kernel.forward(q, k_all, v_all, both.slices, kernel_plan, problem)
    assert next(casts, None) is None
    return result


def backward(grads: Grads, saved: Saved, execution: Execution) -> BackwardOutput:
    """Gradients of this rank's rows of q, k and v; all ranks of the group call it together.

    Every stage is given the whole row's out and lse, so its share of each gradient is exact and shares add up.
    """
    plan, kernel, problem, collective, group, reduce_group = execution
    q, k, v, out, lse = saved
    queries = SavedQueries(q, out, lse)
    home = _WayHome(k, v, collective, reduce_group)
    if (
        isinstance(kernel, EarlyKernel)
        and plan.backward_is_early
        and kernel.backward_may_be_early()
    ):
        signals = collective.signals(group, q.device)
        if signals is not None:
            dq = _backward_early(grads, saved, execution, signals, home)
            return BackwardOutput(dq, *home.sums())
    dq_shares: list[Tensor] = []
    casts = collective.casts((k, v), _routes(plan.backward), group)
    cast = next(casts, None)  # the first one starts
    for stage in plan.backward:
        keys: Sequence[Tensor] = (k, v)
        route, steps = stage.route, None
        kernel_plan = [] if stage.is_empty else stage.kernel_plan(kernel, problem)
        if route is not None:
            if isinstance(kernel, PhasedKernel) and not stage.is_empty:
                steps = kernel.phased_backward(grads, queries, stage.slices, kernel_plan, problem)
                steps.begin()  # what needs no keys, while they travel
            assert cast is not None
            keys = cast.wait()
            cast = next(casts, None)  # the next one travels while this stage is computed
        if stage.is_empty:
            dk, dv = (torch.zeros_like(x) for x in keys)
            home.send(route, dk, dv)
        elif route is not None and steps is not None:
            dk, dv = home.room(route, keys)
            steps.main(KeyTensors(keys[0], keys[1], dk, dv))
            home.send(route, dk, dv)  # while dq is completed, and during the next stage
            dq_shares.append(steps.finish())
        else:
            of_stage = Saved(q, keys[0], keys[1], out, lse)
            dq, dk, dv = kernel.backward(grads, of_stage, stage.slices, kernel_plan, problem)
            home.send(route, dk, dv)
            dq_shares.append(dq)
    # Before the wait for the last reduce, because it hides a little of it.
    dq = sum_partials(dq_shares) if dq_shares else torch.zeros_like(q)
    return BackwardOutput(dq, *home.sums())


def _backward_early(
    grads: Grads, saved: Saved, execution: Execution, signals: KernelSignals, home: _WayHome
) -> Tensor:
    """Gradients of the only stage, in which keys of this rank and of others lie side by side; dq."""
    plan, kernel, problem, collective, group, _ = execution
    assert isinstance(kernel, EarlyKernel)
    q, k, v, out, lse = saved
    (stage,) = plan.backward
    route = stage.route
    assert route is not None
    # What can fail does so before rows are on their way.
    early_plan = stage.early_backward_plan(kernel, problem, group.rank())
    casts = collective.casts((k, v), [route], group, signals)
    cast = next(casts)
    keys = KeyTensors(*cast.buffers, *home.room(route, cast.buffers))
    queries = SavedQueries(q, out, lse)
    steps = kernel.early_backward(grads, queries, signals.addresses, early_plan, problem)
    steps.begin()
    steps.main(keys)  # local keys, and remote ones if they arrive meanwhile
    cast.wait()
    steps.main(keys)  # what is left
    # Another stream then waits for what the kernel says, which is enqueued by now, even if streams share a queue.
    home.send(route, keys.dk, keys.dv, signals)
    dq = steps.finish()
    assert next(casts, None) is None
    return dq


class _WayHome:
    """dk and dv of a rank's rows `k` and `v`: what other ranks have of them arrives while the next stage is computed."""

    def __init__(self, k: Tensor, v: Tensor, collective: Collective, group: dist.ProcessGroup):
        self._like, self._collective, self._group = (k, v), collective, group
        self._sum: Sequence[Tensor] | None = None
        self._reducing: PendingReduce | None = None

    def room(self, route: Route, keys: Sequence[Tensor]) -> Sequence[Tensor]:
        """Where to write dk and dv of a stage with these keys and values."""
        if self._reducing is None:
            return self._collective.outbox(self._like, route, self._group)
        return [x.new_empty(x.shape) for x in keys]

    def send(
        self,
        route: Route | None,
        dk: Tensor,
        dv: Tensor,
        signals: KernelSignals | None = None,
    ) -> None:
        """dk and dv of a stage, on their way to the ranks whose rows they are; without a route those are this rank's."""
        if route is None:
            self._sum = (dk.contiguous(), dv.contiguous())
            return
        if self._reducing is not None:
            self._sum = self._add(torch.promote_types(dk.dtype, torch.float32))
        self._reducing = self._collective.start_reduce((dk, dv), route, self._group, signals)

    def sums(self) -> Sequence[Tensor]:
        """dk and dv of all stages."""
        if self._reducing is None:
            assert self._sum is not None
            return self._sum
        return self._add(self._like[0].dtype)

    def _add(self, dtype: torch.dtype) -> list[Tensor]:
        assert self._reducing is not None
        outs = [x.new_empty(x.shape, dtype=dtype) for x in self._like]
        self._reducing.write_sums(outs, self._sum)
        return outs


def _routes(stages: list[DeviceStage]) -> list[Route]:
    return [stage.route for stage in stages if stage.route is not None]


# The custom ops

# Refusals depend on the problem alone, and a call is too short to ask for them each time.
_select_kernel = lru_cache(maxsize=1024)(select)

_lib = torch.library.Library("magi", "FRAGMENT")


def _cp_ffa_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: Tensor,
    data: Tensor,
    softmax_scale: float,
    softcap: float,
    kernel: str,
    collective: str,
    group_name: str,
    reduce_group_name: str,
) -> tuple[Tensor, Tensor]:
    scaled = Scaled.of(q, softmax_scale)
    problem = problem_of(q, k, v, scaled.softmax_scale, softcap)
    chosen = _select_kernel(problem, kernel or None)
    group = _compat.resolve_process_group(group_name)
    plan = unpack(meta, data)
    require_agreement(plan, group, reduce_group_name, q.device)
    if q.shape[0] != plan.rows:
        raise ValueError(
            f"`q` must have the {plan.rows} rows of the plan, got {q.shape[0]}; "
            "take those of RankPlan.dispatch.positions(rank), padding included"
        )
    moving = select_collective(collective, group, q.device)
    reduce_group = _compat.resolve_process_group(reduce_group_name)
    execution = Execution(plan, chosen, problem, moving, group, reduce_group)
    out, lse = forward(scaled.q, k, v, execution)
    return out.contiguous(), lse


def _cp_ffa_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _cp_ffa_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    meta: Tensor,
    data: Tensor,
    softmax_scale: float,
    softcap: float,
    kernel: str,
    collective: str,
    group_name: str,
    reduce_group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = Scaled.of(q, softmax_scale)
    problem = problem_of(q, k, v, scaled.softmax_scale, softcap)
    chosen = _select_kernel(problem, kernel or None)
    group = _compat.resolve_process_group(group_name)
    plan = unpack(meta, data)
    moving = select_collective(collective, group, q.device)
    reduce_group = _compat.resolve_process_group(reduce_group_name)
    execution = Execution(plan, chosen, problem, moving, group, reduce_group)
    grads, saved = Grads(dout, dlse), Saved(scaled.q, k, v, out, lse)
    dq, dk, dv = backward(grads, saved, execution)
    return scaled.gradient(dq), dk, dv


def _cp_ffa_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_OPTIONS = (
    "Tensor meta, Tensor data, float softmax_scale, float softcap, str kernel, str collective, str group_name, "
    "str reduce_group_name"
)
_FWD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
define(_lib, f"cp_ffa_fwd{_FWD}", _cp_ffa_fwd, _cp_ffa_fwd_fake)
define(
    _lib,
    "cp_ffa_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _cp_ffa_bwd,
    _cp_ffa_bwd_fake,
)


# cp_attention: what is differentiable, made of the two


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        meta, data, *ctx.options = rest
        out, lse = torch.ops.magi.cp_ffa_fwd.default(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse, meta, data)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse, meta, data = ctx.saved_tensors
        # Even without a gradient of its own a rank takes part, because the others wait for it.
        if dout is None:
            dout = torch.zeros_like(out)
        arguments = (dout, dlse, q, k, v, out, lse, meta, data, *ctx.options)
        return (*gradients(torch.ops.magi.cp_ffa_bwd.default, *arguments), *[None] * 8)


define_differentiable(
    *(_lib, f"cp_attention{_FWD}", torch.ops.magi.cp_ffa_fwd.default, _Attention, register_rules)
)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PlanTensors,
    group: dist.ProcessGroup | str | None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    kernel: str = "",
    collective: str = "auto",
    reduce_group: dist.ProcessGroup | str | None = None,
) -> ForwardOutput:
    """Attention over a sequence that is spread over the ranks of `group`; differentiable.

    All ranks call it together. Row i of the local tensors is the token `plan.dispatch.positions(rank)[i]`.

    Args:
        q: `[seqlen_local, nheads_q, head_dim]`, this rank's rows; or a DTensor of them, as are k and v then: see `SequencePlan.attention`.
        k: `[seqlen_local, nheads_kv, head_dim]`.
        v: `[seqlen_local, nheads_kv, head_dim_v]`, dtype of `k`.
        plan: `RankPlan.tensors(q.device)` of this rank.
        group: the ranks, or the name of their process group; None for the default group.
        softmax_scale: factor of the scores; `head_dim ** -0.5` by default.
        softcap: 0.0 for none.
        kernel: the only kernel to consider, by name; empty chooses.
        collective: how rows move, a name in `collectives.COLLECTIVES`; "auto" chooses.
        reduce_group: the same ranks again, for gradients on their way home: they wait for no cast in `group`, at the
            price of another communicator. None takes `group`.

    Returns:
        out `[seqlen_local, nheads_q, head_dim_v]` and lse `[nheads_q, seqlen_local]`.

    Raises:
        ValueError: if a tensor does not fit the others or the plan; on every rank, if the plans of the ranks do not fit
            each other or the group, which the first call with a plan finds out.
        TypeError: if an argument is of another kind.
        NotImplementedError: if no kernel or no collective can run this.
    """
    name = _name_of(group, "group")
    if are_distributed(q, k, v):
        shards = shards_of({"q": q, "k": k, "v": v}, PACKED, list(_ranks_of(name)))
        out, lse = context_parallel_attention(
            *(*shards[:3], plan, name),
            softmax_scale=softmax_scale,
            softcap=softcap,
            kernel=kernel,
            collective=collective,
            reduce_group=reduce_group,
        )
        return ForwardOutput(wrapped(out, shards), wrapped_lse(lse, shards, PACKED))
    _check(q, k, v, plan)
    if softmax_scale is None:
        softmax_scale = q.shape[2] ** -0.5
    check_options("softmax_scale", softmax_scale, softcap, kernel or None)
    names = [name, name if reduce_group is None else _name_of(reduce_group, "reduce_group")]
    out, lse = torch.ops.magi.cp_attention(
        q, k, v, plan.meta, plan.data, softmax_scale, softcap, kernel, collective, *names
    )
    return ForwardOutput(out, lse)


@torch.compiler.assume_constant_result
def _ranks_of(group_name: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(_compat.resolve_process_group(group_name)))


def _check(q: Tensor, k: Tensor, v: Tensor, plan: PlanTensors) -> None:
    check_qkv(q, k, v, "[seqlen_local, nheads, head_dim]")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"`k` must have the {q.shape[0]} rows of `q`, got {k.shape[0]}")
    if not isinstance(plan, PlanTensors):
        raise TypeError(
            f"`plan` must be PlanTensors, got {type(plan).__name__}; "
            "take those of this rank's plan, plan_rank(...).tensors(q.device)"
        )
    if plan.data.device != q.device:
        raise ValueError(
            f"`plan` must be on the device of `q`, {q.device}, got {plan.data.device}; "
            "take RankPlan.tensors(q.device)"
        )
    if plan.meta.device.type != "cpu":
        raise ValueError(f"`plan.meta` must stay on the CPU, got {plan.meta.device}")


def _name_of(group: Any, argument: str) -> str:
    """What ops call a process group; None is the default group, as in torch.distributed."""
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                f"`{argument}` must be a process group, got None, which means the default group, and there is none; "
                "call torch.distributed.init_process_group first"
            )
        return _compat.default_group_name()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"`{argument}` must be a process group of which this process is a member, its name, or None for the "
            f"default group, got {type(group).__name__}; a DeviceMesh has groups, mesh.get_group(dim)"
        )
    return group.group_name
