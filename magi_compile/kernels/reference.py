"""The one oracle: attention over slices as dense fp64 arithmetic, written to be read.

    scores = softmax_scale * q @ k.T            (then softcap * tanh(scores / softcap) where there is a softcap)
    lse    = logsumexp(scores where visible)
    p      = exp(scores - lse) where visible
    out    = p @ v

One key-value head at a time, so memory is O(qhead_per_kvhead * seqlen_q * seqlen_k).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, BackwardOutput, ForwardOutput, Grads, Saved
from magi_compile.kernels.merge import merge_prior
from magi_compile.kernels.plan import Plan
from magi_compile.masks.slices import AttnSlices
from magi_compile.score.program import ScoreCall


class AttentionResults(NamedTuple):
    """Forward and backward of one attention."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact_forward(
    q: Tensor, k: Tensor, v: Tensor, slices: AttnSlices, softmax_scale: float, softcap: float = 0.0
) -> ForwardOutput:
    """Forward in fp64: out `[seqlen_q, nheads_q, head_dim_v]` and lse `[nheads_q, seqlen_q]`, of q, k and v of any
    floating dtype, `[seqlen, nheads, head_dim]`. `slices` are on the device of `q`; a `softcap` of 0.0 is none."""
    visible = slices.to_dense()
    out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float64)
    for kv_head, q_heads in _head_groups(q, k):
        scores, _ = _scores(q[:, q_heads], k[:, kv_head], visible, softmax_scale, softcap)
        lse[q_heads] = torch.logsumexp(scores, -1)
        p = _probabilities(scores, lse[q_heads])
        out[:, q_heads] = torch.einsum("gqk,kd->qgd", p, v[:, kv_head].double())
    return ForwardOutput(out, lse)


def exact_max_scores(
    q: Tensor, k: Tensor, slices: AttnSlices, softmax_scale: float, softcap: float = 0.0
) -> Tensor:
    """The largest score of each row, as the softmax takes it: fp64 `[nheads_q, seqlen_q]`, -inf in rows that see
    nothing. Arguments as those of `exact_forward`."""
    visible = slices.to_dense()
    largest = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    if k.shape[0] == 0:
        return largest
    for kv_head, q_heads in _head_groups(q, k):
        scores, _ = _scores(q[:, q_heads], k[:, kv_head], visible, softmax_scale, softcap)
        largest[q_heads] = scores.amax(-1)
    return largest


def exact_backward(
    grads: Grads,
    saved: Saved,
    slices: AttnSlices,
    softmax_scale: float,
    softcap: float = 0.0,
) -> BackwardOutput:
    """Backward in fp64, from the `out` and `lse` it is given, of any floating dtypes: those of a larger mask give its
    share of a sum. The other arguments are those of `exact_forward`."""
    (dout, dlse), (q, k, v, out, lse) = grads, saved
    visible = slices.to_dense()
    dq = torch.zeros_like(q, dtype=torch.float64)
    dk = torch.zeros_like(k, dtype=torch.float64)
    dv = torch.zeros_like(v, dtype=torch.float64)
    delta = torch.einsum("qhd,qhd->hq", dout.double(), out.double())
    if dlse is not None:
        # d lse / d scores = p, so lse's gradient enters the scores' like a constant of the row.
        delta = delta - dlse.double()
    for kv_head, q_heads in _head_groups(q, k):
        scores, dcap = _scores(q[:, q_heads], k[:, kv_head], visible, softmax_scale, softcap)
        p = _probabilities(scores, lse[q_heads].double())
        dout_heads = dout[:, q_heads].double()
        dp = torch.einsum("qgd,kd->gqk", dout_heads, v[:, kv_head].double())
        dscores = p * (dp - delta[q_heads, :, None]) * dcap * softmax_scale
        dq[:, q_heads] = torch.einsum("gqk,kd->qgd", dscores, k[:, kv_head].double())
        dk[:, kv_head] = torch.einsum("gqk,qgd->kd", dscores, q[:, q_heads].double())
        dv[:, kv_head] = torch.einsum("gqk,qgd->kd", p, dout_heads)
    return BackwardOutput(dq, dk, dv)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    slices: AttnSlices,
    problem: AttnProblem,
) -> AttentionResults:
    """Attention in a few operations of PyTorch and its autograd, in the dtype of `q`: the error that this dtype has
    anyway, by which tests and benchmarks judge that of a kernel. Arguments as those of `exact_forward` and
    `exact_backward`."""
    visible = slices.to_dense()
    sees_something = visible.any(-1)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    group = problem.qhead_per_kvhead
    k_heads, v_heads = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k_heads) * problem.softmax_scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    # Rows that see nothing get finite scores here and zeros below: a softmax over -inf alone has no gradient.
    scores = scores.masked_fill(~visible & sees_something[:, None], -math.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    lse = torch.logsumexp(scores.to(wide), -1).masked_fill(~sees_something, -math.inf)
    p = torch.softmax(scores, -1).masked_fill(~sees_something[:, None], 0.0)
    out = torch.einsum("hqk,khd->qhd", p, v_heads)
    dlse = dlse.masked_fill(~sees_something, 0.0)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    return AttentionResults(out.detach(), lse.detach(), dq, dk, dv)


class ReferenceKernel:
    """The oracle behind the kernel interface: any device, dtype and head size, as far as memory goes."""

    name = "reference"
    plans_in_graph = False
    needs_slices = True
    prepares_calls = False

    def refusals(self, problem: AttnProblem) -> list[str]:
        return []

    def notes(self, problem: AttnProblem) -> list[str]:
        return []

    def plan(self, slices: AttnSlices, problem: AttnProblem) -> Plan:
        return Plan()

    def plan_key(self, problem: AttnProblem) -> Hashable:
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: AttnSlices | None,
        plan: Plan,
        problem: AttnProblem,
        *,
        prior: ForwardOutput | None = None,
        out_dtype: torch.dtype | None = None,
        score: ScoreCall | None = None,
        max_scores: Tensor | None = None,
    ) -> ForwardOutput:
        assert slices is not None
        assert score is None
        assert (max_scores is not None) == problem.has_max_scores
        out, lse = exact_forward(q, k, v, slices, problem.softmax_scale, problem.softcap)
        if max_scores is not None:
            largest = exact_max_scores(q, k, slices, problem.softmax_scale, problem.softcap)
            torch.maximum(max_scores, largest.float(), out=max_scores)
        return merge_prior(ForwardOutput(out, lse.float()), prior, out_dtype or q.dtype)

    def backward(
        self,
        grads: Grads,
        saved: Saved,
        slices: AttnSlices | None,
        plan: Plan,
        problem: AttnProblem,
        *,
        score: ScoreCall | None = None,
        deterministic: bool | None = None,
    ) -> BackwardOutput:
        assert slices is not None
        assert score is None
        dq, dk, dv = exact_backward(grads, saved, slices, problem.softmax_scale, problem.softcap)
        q, k, v, *_ = saved
        return BackwardOutput(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def _head_groups(q: Tensor, k: Tensor) -> list[tuple[int, slice]]:
    """Each key-value head with the query heads that read it."""
    group = q.shape[1] // k.shape[1]
    return [(head, slice(head * group, (head + 1) * group)) for head in range(k.shape[1])]


def _scores(
    q: Tensor, k: Tensor, visible: Tensor, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor | float]:
    """Masked scores `[group, seqlen_q, seqlen_k]`, and their derivative by the scores before the cap."""
    scores = torch.einsum("qgd,kd->gqk", q.double(), k.double()) * softmax_scale
    dcap: Tensor | float = 1.0
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores, dcap = softcap * tanh, 1 - tanh.square()
    return scores.masked_fill(~visible, -torch.inf), dcap


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and 0 in rows that see nothing, where both are -inf."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
