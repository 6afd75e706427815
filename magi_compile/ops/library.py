"""The custom ops of attention: schemas, implementations, fakes, autograd. Functional, with fresh outputs.

magi::plan         slices -> how the chosen kernel walks them; nothing where that is found out in each call (`plans_in_graph`)
magi::plan_with_bits   the same of slices with bit blocks
magi::attention    attention over slices -> (out, lse), differentiable: becomes, where it is called,
magi::ffa_fwd      its values
magi::ffa_bwd      its gradients -> (dq, dk, dv)
magi::attention_with_max_scores   the same -> (out, lse, max_scores): becomes
magi::ffa_fwd_with_max_scores     its values; its gradients are those of `magi::ffa_bwd`
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile._checks import raise_pending
from magi_compile._kept import Made, Memo
from magi_compile.kernels.base import (
    AttnProblem,
    Grads,
    Kernel,
    Saved,
    in_output_layout,
    new_max_scores,
    output_like,
)
from magi_compile.kernels.select import problem_on, select
from magi_compile.masks import AttnSlices
from magi_compile.ops.define import (
    define,
    define_differentiable,
    define_of_entries,
    gradients,
)
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher
from magi_compile.ops.scale import Scaled
from magi_compile.ops.sharding import register_rules
from magi_compile.ops.validation import check_op, check_op_gradients

_lib = torch.library.Library("magi", "DEF")


# plan


class Chosen(NamedTuple):
    """The kernel that runs a call, and its problem."""

    kernel: Kernel
    problem: AttnProblem


@lru_cache(maxsize=1024)
def chosen_for(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    softmax_scale: float,
    softcap: float,
    kernel: str | None,
    has_bits: bool = False,
    has_score: bool = False,
    has_max_scores: bool = False,
) -> Chosen:
    """The kernel and the problem for such tensors, cached: a call is too short to choose each time."""
    problem = problem_on(device, dtype, heads, softmax_scale, softcap)
    problem = replace(
        problem, has_bits=has_bits, has_score=has_score, has_max_scores=has_max_scores
    )
    return Chosen(select(problem, kernel).kernel, problem)


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
    softcap: float,
    kernel: str,
    bits: Tensor | None = None,
    has_score: bool = False,
) -> list[Tensor]:
    heads = (nheads_q, nheads_kv, head_dim, head_dim_v)
    has_bits = bits is not None
    device = q_ranges.device
    chosen, problem = chosen_for(
        device, dtype, heads, 1.0, softcap, kernel or None, has_bits, has_score
    )
    if not chosen.plans_in_graph:
        return []
    slices = AttnSlices.unchecked(q_ranges, k_ranges, mask_types, total_q, total_k, bits)
    return chosen.pack(chosen.plan(slices, problem))


_PLAN = (
    "Tensor q_ranges, Tensor k_ranges, Tensor mask_types, SymInt total_q, SymInt total_k, "
    "ScalarType dtype, int nheads_q, int nheads_kv, int head_dim, int head_dim_v, float softcap, str kernel"
)
# Shapes depend on shapes alone, so the plan of fake slices is the fake plan.
define_repeatable(_lib, f"plan({_PLAN}) -> Tensor[]", _plan, _plan)
define_repeatable(_lib, f"plan_with_bits({_PLAN}, Tensor bits) -> Tensor[]", _plan, _plan)


def _plan_for_scores(*arguments: Any) -> list[Tensor]:
    return _plan(*list[Any]([*arguments, True]))


# Of attention with a score program.
define(
    _lib,
    f"plan_for_scores({_PLAN}, Tensor? bits) -> Tensor[]",
    _plan_for_scores,
    _plan_for_scores,
)

# Plans of slices on a CPU, by what the slices are: comparing them costs little there.
_by_content: OrderedDict[Hashable, list[Tensor]] = OrderedDict()
_MOST_BY_CONTENT = 32


def plan_of(kernel: Kernel, slices: AttnSlices | None, problem: AttnProblem) -> list[Tensor]:
    """The plan of a call that brings none, packed."""
    if slices is None:
        raise ValueError("`slices` and `plan` must not both be empty")
    lists = (slices.q_ranges, slices.k_ranges, slices.mask_types)
    # A call may be the first in inference mode and the next one not, to which tensors of that mode are of no use.
    with torch.inference_mode(False):
        if slices.device.type != "cpu":
            return kernel.pack(kernel.plan(slices, problem))
        totals = slices.seqlen_q, slices.seqlen_k
        key = (kernel.name, kernel.plan_key(problem), totals, *map(_bytes_of, lists))
        if key not in _by_content:
            slices.check_bounds()  # somebody may have written to them, uncounted or in front of a compiled graph
            _by_content[key] = kernel.pack(kernel.plan(slices, problem))
        _by_content.move_to_end(key)
        if len(_by_content) > _MOST_BY_CONTENT:
            _by_content.popitem(last=False)
        return _by_content[key]


def _bytes_of(x: Tensor) -> bytes:
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


# Plans of slices, as long as those live: shared by all layers.
_plans: Memo[list[Tensor]] = Memo(256, lambda plan: plan)


def plan_of_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices,
    softcap: float,
    kernel: str,
    *,
    has_score: bool = False,
) -> list[Tensor]:
    """The plan that a call of `magi::attention` or `magi::scored_attention` takes along: forward and backward then walk the same one.

    In a graph it is a value of the graph, and made again whenever that runs, like all of a CUDA graph. In eager code it is kept
    until somebody writes to the slices; what is written to tensors of inference mode nobody counts.
    """
    lists = (slices.q_ranges, slices.k_ranges, slices.mask_types)
    has_bits = slices.bits is not None
    totals, heads = (q.shape[0], k.shape[0]), (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    if torch.compiler.is_compiling() or _compat.is_traced(q):
        if has_score:
            arguments = (*lists, *totals, q.dtype, *heads, softcap, kernel, slices.bits)
            return torch.ops.magi.plan_for_scores(*arguments)
        if slices.bits is not None:
            arguments = (*lists, *totals, q.dtype, *heads, softcap, kernel, slices.bits)
            return torch.ops.magi.plan_with_bits(*arguments)
        return torch.ops.magi.plan(*lists, *totals, q.dtype, *heads, softcap, kernel)
    chosen, problem = chosen_for(
        q.device, q.dtype, heads, 1.0, softcap, kernel or None, has_bits, has_score
    )

    def make() -> Made:
        slices.check_writes()
        return Made(plan_of(chosen, slices, problem), slices.tensors())

    return _plans.get((slices,), (chosen.name, chosen.plan_key(problem)), make, q.device)


# ffa_fwd, ffa_bwd: no autograd of their own, and so called from compiled graphs without a detour through it


def slices_of(lists: list[Tensor], total_q: int, total_k: int) -> AttnSlices | None:
    """Slices as an op takes them: three tensors and their bit blocks, if they may have some, or none where a plan says all."""
    if not lists:
        return None
    q_ranges, k_ranges, mask_types, *bits = lists
    return AttnSlices.unchecked(q_ranges, k_ranges, mask_types, total_q, total_k, *bits)


def _ffa_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: list[Tensor],
    plan: list[Tensor],
    softmax_scale: float,
    softcap: float,
    kernel: str,
    *,
    max_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    raise_pending()
    check_op(q, k, v)
    total_q, nheads_q, head_dim = q.shape
    total_k, nheads_kv, head_dim_v = v.shape
    heads = (nheads_q, nheads_kv, head_dim, head_dim_v)
    scaled = Scaled.of(q, softmax_scale)
    scale = scaled.softmax_scale
    chosen, problem = chosen_for(
        *(q.device, q.dtype, heads, scale, softcap, kernel or None),
        has_bits=len(slices) > 3,
        has_max_scores=max_scores is not None,
    )
    of_lists = slices_of(slices, total_q, total_k)
    walked = chosen.unpack(plan or plan_of(chosen, of_lists, problem))
    if chosen.prepares_calls:
        hand_over_to_launcher()
    out, lse = chosen.forward(scaled.q, k, v, of_lists, walked, problem, max_scores=max_scores)
    return in_output_layout(q, out), lse


def _ffa_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: list[Tensor],
    plan: list[Tensor],
    softmax_scale: float,
    softcap: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    check_op(q, k, v)
    total_q, nheads_q, _ = q.shape
    out = output_like(q, v.shape[2])
    return out, q.new_empty(nheads_q, total_q, dtype=torch.float32)


def _ffa_fwd_with_max_scores(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    max_scores = new_max_scores(arguments[0])
    out, lse = _ffa_fwd(*arguments, max_scores=max_scores)
    return out, lse, max_scores


def _ffa_fwd_with_max_scores_fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = _ffa_fwd_fake(q, *rest)
    return out, lse, torch.empty_like(lse)


def _ffa_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slices: list[Tensor],
    plan: list[Tensor],
    softmax_scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    raise_pending()
    check_op_gradients(dout, dlse, q, k, v, out, lse)
    total_q, nheads_q, head_dim = q.shape
    total_k, nheads_kv, head_dim_v = v.shape
    heads = (nheads_q, nheads_kv, head_dim, head_dim_v)
    scaled = Scaled.of(q, softmax_scale)
    scale = scaled.softmax_scale
    has_bits = len(slices) > 3
    chosen, problem = chosen_for(q.device, q.dtype, heads, scale, softcap, kernel or None, has_bits)
    of_lists = slices_of(slices, total_q, total_k)
    walked = chosen.unpack(plan or plan_of(chosen, of_lists, problem))
    grads, saved = Grads(dout, dlse), Saved(scaled.q, k, v, out, lse)
    dq, dk, dv = chosen.backward(
        grads, saved, of_lists, walked, problem, deterministic=deterministic
    )
    return scaled.gradient(dq), dk, dv


def _ffa_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_FFA_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor[] slices, Tensor[] plan, "
    "float softmax_scale, float softcap, str kernel)"
)
_FFA_FWD = f"{_FFA_ARGUMENTS} -> (Tensor, Tensor)"
_FFA_FWD_WITH_MAX_SCORES = f"{_FFA_ARGUMENTS} -> (Tensor, Tensor, Tensor)"
define_repeatable(_lib, f"ffa_fwd{_FFA_FWD}", _ffa_fwd, _ffa_fwd_fake)
# Not repeated by the launcher: of training with QK-clip, where the GPU has more to do than the host.
define(
    _lib,
    f"ffa_fwd_with_max_scores{_FFA_FWD_WITH_MAX_SCORES}",
    _ffa_fwd_with_max_scores,
    _ffa_fwd_with_max_scores_fake,
)
_FFA_BWD = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] slices, Tensor[] plan, "
    "float softmax_scale, float softcap, str kernel, "
    "bool deterministic) -> (Tensor, Tensor, Tensor)"
)
define_repeatable(_lib, f"ffa_bwd{_FFA_BWD}", _ffa_bwd, _ffa_bwd_fake)
define_of_entries(_lib, f"ffa_bwd_of_entries{_FFA_BWD}", torch.ops.magi.ffa_bwd.default)


# attention: what is differentiable, made of the two


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        slices, plan, *ctx.options = rest
        ctx.num_slices = len(slices)
        out, lse, *max_scores = values(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse, *slices, *plan)
        ctx.mark_non_differentiable(*max_scores)  # nor are those of FlexAttention
        ctx.set_materialize_grads(False)
        return out, lse, *max_scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse, *rest = ctx.saved_tensors
        slices, plan = rest[: ctx.num_slices], rest[ctx.num_slices :]
        no_grads = (None,) * 5
        if dout is None and dlse is None:
            return (None, None, None, None, *no_grads)
        if dout is None:
            dout = torch.zeros_like(out)
        # In a compiled graph that of the compilation: Dynamo compiles again where it changes.
        deterministic = torch.are_deterministic_algorithms_enabled()
        arguments = (dout, dlse, q, k, v, out, lse, slices, plan, *ctx.options, deterministic)
        ops = torch.ops.magi
        op = ops.ffa_bwd if out.dim() == 3 else ops.ffa_bwd_of_entries
        return (None, *gradients(op.default, *arguments), *no_grads)


define_differentiable(
    *(_lib, f"attention{_FFA_FWD}", torch.ops.magi.ffa_fwd.default, _Attention, register_rules)
)
define_differentiable(
    *(_lib, f"attention_with_max_scores{_FFA_FWD_WITH_MAX_SCORES}"),
    torch.ops.magi.ffa_fwd_with_max_scores.default,
    *(_Attention, register_rules),
)
