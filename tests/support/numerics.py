"""The rule of correctness: the error against the fp64 oracle, compared with that of plain PyTorch.

A kernel may be at most twice as far from the truth as plain PyTorch in the same dtype, plus one rounding step, in
the largest error and in the root mean square. The rounding step is one of the result's dtype on the largest result
plus one of fp32 on the largest sum of absolute terms, because exact results near 0 can be differences of large terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, Grads, Kernel, Saved
from magi_compile.kernels.reference import (
    AttentionResults,
    exact_backward,
    exact_forward,
    plain_attention,
)
from magi_compile.masks.slices import AttnSlices
from tests.support.cases import AttentionInputs


def run_kernel(
    kernel: Kernel,
    inputs: AttentionInputs,
    slices: AttnSlices,
    problem: AttnProblem,
    with_dlse: bool = True,
) -> AttentionResults:
    """Plan, forward and backward of `kernel`; the backward sees `inputs.dlse` only if `with_dlse`."""
    q, k, v, dout, dlse = inputs
    plan = kernel.plan(slices, problem)
    out, lse = kernel.forward(q, k, v, slices, plan, problem)
    grads, saved = Grads(dout, dlse if with_dlse else None), Saved(q, k, v, out, lse)
    return AttentionResults(out, lse, *kernel.backward(grads, saved, slices, plan, problem))


def assert_attention_close(
    actual: Sequence[Tensor | None],
    inputs: AttentionInputs,
    slices: AttnSlices,
    problem: AttnProblem,
    with_dlse: bool = True,
) -> None:
    """Hold `actual` to the rule of this module, and its dtypes and shapes to the kernel interface.

    Args:
        actual: what a kernel computed from `inputs`, in the order of `AttentionResults`. What is None, or missing
            at the end, is not checked: `(out, lse)` is a forward alone.
        inputs: as given to the kernel.
        slices: the mask.
        problem: heads, scale and soft-cap.
        with_dlse: whether `inputs.dlse` is the gradient of lse, or that is 0.

    Raises:
        AssertionError: with every result that is off, by how much, and where.
    """
    q, k, v, dout, dlse = inputs
    dlse = dlse if with_dlse else torch.zeros_like(dlse)
    scale, softcap = problem.softmax_scale, problem.softcap
    forward = exact_forward(q, k, v, slices, scale, softcap)
    backward = exact_backward(Grads(dout, dlse), Saved(q, k, v, *forward), slices, scale, softcap)
    exact = AttentionResults(*forward, *backward)
    plain = plain_attention(q, k, v, dout, dlse, slices, problem)
    terms = _largest_terms(q, k, v, dout, dlse, forward.lse, slices, problem)
    dtypes = (q.dtype, torch.float32, q.dtype, k.dtype, v.dtype)
    columns = zip(AttentionResults._fields, actual, exact, plain, terms, dtypes, strict=False)
    checked = [_failure(name, x, *rest) for name, x, *rest in columns if x is not None]
    failures = [failure for failure in checked if failure is not None]
    if failures:
        raise AssertionError("\n".join(failures))


def _largest_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    exact_lse: Tensor,
    slices: AttnSlices,
    problem: AttnProblem,
) -> AttentionResults:
    """The oracle's formulas with every term made positive: what sums in fp32 are rounded at. Itself in fp32."""
    scale, group = problem.softmax_scale, problem.qhead_per_kvhead
    visible = slices.to_dense()
    q, dout, dlse = q.float(), dout.float().abs(), dlse.abs()
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v.abs()))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    q, k = q.abs(), k.abs()
    score_terms = torch.einsum("qhd,khd->hqk", q, k).mul_(scale).masked_fill_(~visible, 0.0)
    lse = score_terms.amax(-1) if visible.numel() else exact_lse
    p = scores.sub_(exact_lse.float()[..., None]).exp_().masked_fill_(~visible, 0.0)
    dp = torch.einsum("qhd,khd->hqk", dout, v)
    dscores = dp.add_((p * dp).sum(-1, keepdim=True)).add_(dlse[..., None]).mul_(p).mul_(scale)
    # A rounded score moves p, so the terms of out and of the gradients carry the size of the scores too.
    amplified = score_terms.add_(1)
    p, dscores = p.mul_(amplified), dscores.mul_(amplified)
    out = torch.einsum("hqk,khd->qhd", p, v)
    dq = torch.einsum("hqk,khd->qhd", dscores, k)
    dk = _sum_groups(torch.einsum("hqk,qhd->khd", dscores, q), group)
    dv = _sum_groups(torch.einsum("hqk,qhd->khd", p, dout), group)
    return AttentionResults(out, lse, dq, dk, dv)


def _sum_groups(x: Tensor, group: int) -> Tensor:
    return x.unflatten(1, (-1, group)).sum(2)


def _failure(
    name: str, actual: Tensor, exact: Tensor, plain: Tensor, terms: Tensor, dtype: torch.dtype
) -> str | None:
    """The reason why `actual` is not close to `exact`, in one line, or None."""
    if actual.shape != exact.shape or actual.dtype != dtype:
        return f"{name}: {actual.dtype} {list(actual.shape)}, expected {dtype} {list(exact.shape)}"
    if not actual.numel():
        return None
    nothing = exact == -math.inf
    wrong = (actual == -math.inf) != nothing
    wrong |= ~nothing & ~actual.isfinite()
    if wrong.any():
        where = _first(wrong)
        return (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values are wrongly finite or not finite, "
            f"first {name}{where} = {actual[where].item():.6g}, expected {exact[where].item():.6g}"
        )
    actual, exact, plain = (x.double().masked_fill(nothing, 0.0) for x in (actual, exact, plain))
    error, plain_error = (actual - exact).abs(), (plain - exact).abs()
    for norm, size in (("largest", _largest), ("root mean square", _root_mean_square)):
        step = torch.finfo(dtype).eps * size(exact) + torch.finfo(torch.float32).eps * size(terms)
        allowed = 2 * size(plain_error) + step
        if size(error) > allowed:
            where = _first(error == error.max())
            return (
                f"{name}: {norm} error {size(error):.3g} > {allowed:.3g} "
                f"(plain PyTorch {size(plain_error):.3g}, rounding step {step:.3g}), "
                f"worst {name}{where} = {actual[where].item():.6g}, expected {exact[where].item():.6g}"
            )
    return None


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
