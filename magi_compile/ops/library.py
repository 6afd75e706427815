"""The custom ops of attention: schemas, implementations, fakes, autograd. Functional, with fresh outputs.

magi::plan         slices -> how the chosen kernel walks them
magi::ffa_fwd      attention over slices -> (out, lse)
magi::ffa_bwd      its gradients -> (dq, dk, dv)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from magi_compile._checks import raise_pending
from magi_compile._compat import version_of
from magi_compile.kernels.base import AttnProblem, Kernel
from magi_compile.kernels.select import arch_of, select
from magi_compile.masks import AttnSlices
from magi_compile.ops.define import define

_lib = torch.library.Library("magi", "DEF")


# plan


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, softcap: float
) -> AttnProblem:
    """What packed `q`, `k`, `v` (real or fake) ask of a kernel."""
    return AttnProblem(
        device_type=q.device.type,
        device_arch=arch_of(q.device),
        dtype=q.dtype,
        nheads_q=q.shape[1],
        nheads_kv=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        softmax_scale=softmax_scale,
        softcap=softcap,
    )


# Refusals depend on the problem alone, and a call is too short to ask for them each time.
_select = lru_cache(maxsize=1024)(select)


def _plan(
    q_ranges: Tensor,
    k_ranges: Tensor,
    mask_types: Tensor,
    total_q: int,
    total_k: int,
    dtype: torch.dtype,
    nheads_q: int,
    nheads_kv: int,
    head_dim: int,
    head_dim_v: int,
    kernel: str,
) -> list[Tensor]:
    device = q_ranges.device
    problem = AttnProblem(
        device.type, arch_of(device), dtype, nheads_q, nheads_kv, head_dim, head_dim_v, 1.0
    )
    slices = AttnSlices(q_ranges, k_ranges, mask_types, total_q, total_k)
    return _select(problem, kernel).plan(slices, problem)


define(
    _lib,
    "plan(Tensor q_ranges, Tensor k_ranges, Tensor mask_types, SymInt total_q, SymInt total_k, "
    "ScalarType dtype, int nheads_q, int nheads_kv, int head_dim, int head_dim_v, str kernel) -> Tensor[]",
    _plan,
    _plan,  # shapes depend on shapes alone, so the plan of fake slices is the fake plan
)

# Plans of calls that bring none, by their slices: shared by all layers and by forward and backward.
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _plan_of(kernel: Kernel, slices: AttnSlices, problem: AttnProblem) -> list[Tensor]:
    version = tuple(map(version_of, (slices.q_ranges, slices.k_ranges, slices.mask_types)))
    key = (kernel.name, kernel.plan_key(problem), slices.seqlen_q, slices.seqlen_k, version)
    plans = _plans.setdefault(slices.q_ranges, {})
    if key not in plans:
        plans[key] = kernel.plan(slices, problem)
    return plans[key]


# ffa_fwd, ffa_bwd


def _ffa_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor,
    k_ranges: Tensor,
    mask_types: Tensor,
    plan: list[Tensor],
    softmax_scale: float,
    softcap: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    raise_pending()
    problem = problem_of(q, k, v, softmax_scale, softcap)
    chosen = _select(problem, kernel or None)
    slices = AttnSlices(q_ranges, k_ranges, mask_types, q.shape[0], k.shape[0])
    plan = plan or _plan_of(chosen, slices, problem)
    return chosen.forward(q, k, v, slices, plan, problem)


def _ffa_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor,
    k_ranges: Tensor,
    mask_types: Tensor,
    plan: list[Tensor],
    softmax_scale: float,
    softcap: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    total_q, nheads_q, _ = q.shape
    out = q.new_empty(total_q, nheads_q, v.shape[2])
    return out, q.new_empty(nheads_q, total_q, dtype=torch.float32)


def _ffa_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_ranges: Tensor,
    k_ranges: Tensor,
    mask_types: Tensor,
    plan: list[Tensor],
    softmax_scale: float,
    softcap: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    raise_pending()
    problem = problem_of(q, k, v, softmax_scale, softcap)
    chosen = _select(problem, kernel or None)
    slices = AttnSlices(q_ranges, k_ranges, mask_types, q.shape[0], k.shape[0])
    plan = plan or _plan_of(chosen, slices, problem)
    return chosen.backward(dout, dlse, q, k, v, out, lse, slices, plan, problem)


def _ffa_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


define(
    _lib,
    "ffa_fwd(Tensor q, Tensor k, Tensor v, Tensor q_ranges, Tensor k_ranges, Tensor mask_types, Tensor[] plan, "
    "float softmax_scale, float softcap, str kernel) -> (Tensor, Tensor)",
    _ffa_fwd,
    _ffa_fwd_fake,
)
define(
    _lib,
    "ffa_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor q_ranges, "
    "Tensor k_ranges, Tensor mask_types, Tensor[] plan, float softmax_scale, float softcap, str kernel) "
    "-> (Tensor, Tensor, Tensor)",
    _ffa_bwd,
    _ffa_bwd_fake,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_ranges, k_ranges, mask_types, plan, *ctx.options = inputs
    ctx.num_plan_tensors = len(plan)
    ctx.save_for_backward(q, k, v, *output, q_ranges, k_ranges, mask_types, *plan)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, q_ranges, k_ranges, mask_types, *plan = ctx.saved_tensors
    no_grads = (None, None, None, [None] * ctx.num_plan_tensors, None, None, None)
    if dout is None and dlse is None:
        return (None, None, None, *no_grads)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.magi.ffa_bwd(
        dout, dlse, q, k, v, out, lse, q_ranges, k_ranges, mask_types, plan, *ctx.options
    )
    return (*grads, *no_grads)


torch.library.register_autograd(
    "magi::ffa_fwd", _backward, setup_context=_save_for_backward, lib=_lib
)


def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("gradients of attention can not be differentiated again")


torch.library.register_autograd("magi::ffa_bwd", _refuse_second_derivative, lib=_lib)
