"""The custom ops of attention across ranks: schemas, implementations, fakes, autograd.

magi::cp_attention   attention over the keys of all ranks -> (out, lse, max_scores), differentiable: becomes,
                     where it is called,
magi::cp_ffa_fwd     its values
magi::cp_ffa_bwd     its gradients -> (dq, dk, dv)

Communication lives inside an op, because a graph compiler does not reorder communication that it does not know.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.agreement import Agreement, require_agreement
from magi_compile.dtensor.backward import backward
from magi_compile.dtensor.execution import Execution, unpack
from magi_compile.dtensor.forward import forward
from magi_compile.dtensor.sharding import register_rules
from magi_compile.dtensor.transport.collectives import select as select_collective
from magi_compile.kernels.base import Grads, Saved, new_max_scores
from magi_compile.kernels.select import problem_of, select
from magi_compile.ops.define import define, define_differentiable, gradients
from magi_compile.ops.scale import Scaled

# Refusals depend on the problem alone, and a call is too short to ask for them each time.
_select_kernel = lru_cache(maxsize=1024)(select)

_lib = torch.library.Library("magi", "FRAGMENT")


class _Options(NamedTuple):
    """The arguments of both ops behind their tensors, in the order of `_OPTIONS`."""

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

    def execution(
        self, scaled: Scaled, k: Tensor, v: Tensor, *, is_backward: bool = False
    ) -> Execution:
        """The execution for this rank's rows; all ranks of the group ask together."""
        q, scale = scaled.q, scaled.softmax_scale
        group = _compat.resolve_process_group(self.group_name)
        plan = unpack(self.meta, self.data)
        # Before anything else, because what fails on one rank alone leaves the others waiting.
        options = (self.softmax_scale, self.softcap, self.collective, self.batch_entries)
        call = Agreement.of(plan, q, k, v, *options)
        require_agreement(
            *(call, plan.rank, group, self.reduce_group_name, q.device), is_backward=is_backward
        )
        problem = problem_of(q, k, v, scale, self.softcap)
        if self.return_max_scores:
            problem = replace(problem, has_max_scores=True)
        chosen = _select_kernel(problem, self.kernel or None).kernel
        moving = select_collective(self.collective, group, q.device)
        reduce_group = _compat.resolve_process_group(self.reduce_group_name)
        return Execution(plan, chosen, problem, moving, group, reduce_group)


def _cp_ffa_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = _Options(*rest)
    scaled = Scaled.of(q, options.softmax_scale)
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
    max_scores = new_max_scores(q) if options.return_max_scores else None
    out, lse = forward(scaled.q, k, v, execution, max_scores)
    return out.contiguous(), lse, lse.new_empty(0) if max_scores is None else max_scores


def _cp_ffa_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    rows = (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32)
    return out, lse, lse.new_empty(rows if _Options(*rest).return_max_scores else 0)


def _cp_ffa_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, *others = rest
    options = _Options(*others)
    scaled = Scaled.of(q, options.softmax_scale)
    execution = options.execution(scaled, k, v, is_backward=True)
    dq, dk, dv = backward(Grads(dout, dlse), Saved(scaled.q, k, v, out, lse), execution)
    return scaled.gradient(dq), dk, dv


def _cp_ffa_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_OPTIONS = (
    "Tensor meta, Tensor data, float softmax_scale, float softcap, str kernel, str collective, str group_name, "
    "str reduce_group_name, SymInt batch_entries=1"
)
_FWD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool return_max_scores=False) -> (Tensor, Tensor, Tensor)"
define(_lib, f"cp_ffa_fwd{_FWD}", _cp_ffa_fwd, _cp_ffa_fwd_fake)
define(
    _lib,
    "cp_ffa_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _cp_ffa_bwd,
    _cp_ffa_bwd_fake,
)


# cp_attention: what is differentiable, made of these


class _AttentionOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rest: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        meta, data, *ctx.options = _Options(*rest)
        out, lse, max_scores = torch.ops.magi.cp_ffa_fwd.default(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse, meta, data)
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        return out, lse, max_scores

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        q, k, v, out, lse, meta, data = ctx.saved_tensors
        # Even without a gradient of its own a rank takes part, because the others wait for it.
        if dout is None:
            dout = torch.zeros_like(out)
        *options, _ = ctx.options  # all but return_max_scores
        arguments = (dout, dlse, q, k, v, out, lse, meta, data, *options)
        return (None, *gradients(torch.ops.magi.cp_ffa_bwd.default, *arguments))


define_differentiable(
    *(
        _lib,
        f"cp_attention{_FWD}",
        torch.ops.magi.cp_ffa_fwd.default,
        _AttentionOverRanks,
        register_rules,
    )
)
