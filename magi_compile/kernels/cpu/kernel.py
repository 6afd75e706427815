"""The CPU kernel: PyTorch's own CPU flash attention, one call for each piece of the mask.

The op returns lse, so the partial results of a row merge; its backward is exact with the out and lse of the whole
row, so the pieces of a gradient add up. Inside, tensors are `[nheads_kv, qhead_per_kvhead, seqlen, head_dim]`, keys
and values expanded over the group without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from magi_compile import _compat
from magi_compile.kernels.base import (
    AttnProblem,
    BackwardOutput,
    ForwardOutput,
    Grads,
    Saved,
    output_like,
)
from magi_compile.kernels.cpu.pieces import Piece, PieceMask, cut, has_scores, plan_pieces
from magi_compile.kernels.cpu.scores import Partial, ScoredTiles, attention_of_scores
from magi_compile.kernels.merge import merge_partials, merge_prior
from magi_compile.kernels.plan import Plan, other_kernel
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.masks.slices import AttnSlices
from magi_compile.score.program import ScoreCall

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Where scores exist in memory (`has_scores`): at most so many at a time, for each head.
MAX_SCORE_ROWS, MAX_SCORE_KEYS = 256, 4096


class CpuKernel:
    """Any head_dim and head_dim_v, grouped heads, soft-cap, score programs; fp32, bf16, fp16."""

    name = "cpu"
    plans_in_graph = False
    needs_slices = False
    prepares_calls = False

    def refusals(self, problem: AttnProblem) -> list[str]:
        reasons = []
        if problem.device_type != "cpu":
            reasons.append(f"needs tensors on the CPU, got {problem.device_type}")
        if problem.dtype not in DTYPES:
            dtype = str(problem.dtype).removeprefix("torch.")
            reasons.append(f"needs float32, bfloat16 or float16, got {dtype}")
        return reasons

    def notes(self, problem: AttnProblem) -> list[str]:
        return []

    def plan(self, slices: AttnSlices, problem: AttnProblem) -> Plan:
        return Plan(pieces=plan_pieces(slices))

    def plan_key(self, problem: AttnProblem) -> Hashable:
        return None

    def score_refusals(self, problem: AttnProblem, needs: ScoreNeeds) -> list[str]:
        return []

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
        attend: Callable[..., Partial]
        if score is not None:
            attend = ScoredTiles(score, problem).forward
        else:
            of_piece = _forward_scores if has_scores(problem) else _forward_flash
            attend = partial(of_piece, problem=problem)
        assert (max_scores is not None) == problem.has_max_scores
        pieces = _pieces(plan, problem)
        bits = None if slices is None else slices.bits
        merges = not all(piece.is_first for piece in pieces)
        dtype = torch.float32 if merges or has_scores(problem) else q.dtype
        total_q, nheads_q, _ = q.shape
        out = output_like(q, problem.head_dim_v, dtype).zero_()
        lse = q.new_full((nheads_q, total_q), -torch.inf, dtype=torch.float32)

        width = max(problem.head_dim, problem.head_dim_v)
        q_heads, k_heads, v_heads = (_by_head(_widen(x, width), problem) for x in (q, k, v))
        out_heads, lse_heads = _by_head(out, problem), _rows_by_head(lse, problem)
        max_heads = None if max_scores is None else _rows_by_head(max_scores, problem)
        for piece in pieces:
            rows, keys = piece.rows, piece.keys
            mask = PieceMask.of(piece, bits, problem, q.dtype)
            partial_out, partial_lse, partial_max = attend(
                q_heads[:, :, rows], k_heads[:, :, keys], v_heads[:, :, keys], mask
            )
            if max_heads is not None:
                assert partial_max is not None
                max_heads[:, :, rows] = torch.maximum(max_heads[:, :, rows], partial_max)
            partial_out = partial_out[..., : problem.head_dim_v]
            if piece.has_bits:
                assert mask.added is not None
                sees_nothing = (mask.added == -torch.inf).all(-1)
                partial_out = partial_out.masked_fill(sees_nothing[:, None], 0.0)
                partial_lse = partial_lse.masked_fill(sees_nothing, -torch.inf)
            if not piece.is_first:
                partial_out, partial_lse = merge_partials(
                    (out_heads[:, :, rows], partial_out), (lse_heads[:, :, rows], partial_lse)
                )
            out_heads[:, :, rows] = partial_out
            lse_heads[:, :, rows] = partial_lse
        return merge_prior(ForwardOutput(out, lse), prior, out_dtype or q.dtype)

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
        attend: Callable[..., tuple[Tensor, Tensor, Tensor]]
        if score is not None:
            attend = ScoredTiles(score, problem).backward
        else:
            of_piece = _backward_softcap if problem.softcap else _backward_flash
            attend = partial(of_piece, problem=problem)
        (dout, dlse), (q, k, v, out, lse) = grads, saved
        # In fp32 whatever the dtype: pieces then add up in fp32, and PyTorch's fp32 backward is the faster one too.
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device="cpu") for x in (q, k, v))
        width = max(problem.head_dim, problem.head_dim_v)
        if dlse is not None:
            # The op computes delta = sum(dout * out) itself and needs delta - dlse: one more column, of 1 in dout
            # and of -dlse in out, and of 0 in q, k and v, where it changes nothing.
            dout = torch.cat([_widen(dout.float(), width), torch.ones_like(dout[..., :1])], -1)
            out = torch.cat([_widen(out.float(), width), -dlse.T[..., None]], -1)
            width += 1
        dout_heads, q_heads, k_heads, v_heads, out_heads = (
            _by_head(_widen(x.float(), width), problem) for x in (dout, q, k, v, out)
        )
        dq_heads = _by_head(dq, problem)
        dk_heads, dv_heads = dk.transpose(0, 1), dv.transpose(0, 1)
        bits = None if slices is None else slices.bits
        if bits is not None:  # a row that sees nothing may be among those of a piece
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        lse_heads = _rows_by_head(lse, problem)
        for piece in _pieces(plan, problem):
            rows, keys = piece.rows, piece.keys
            dq_partial, dk_partial, dv_partial = attend(
                dout_heads[:, :, rows],
                Saved(
                    q_heads[:, :, rows],
                    k_heads[:, :, keys],
                    v_heads[:, :, keys],
                    out_heads[:, :, rows],
                    lse_heads[:, :, rows],
                ),
                PieceMask.of(piece, bits, problem, torch.float32),
            )
            dq_heads[:, :, rows].add_(dq_partial[..., : problem.head_dim])
            dk_heads[:, keys].add_(_sum_group(dk_partial[..., : problem.head_dim]))
            dv_heads[:, keys].add_(_sum_group(dv_partial[..., : problem.head_dim_v]))
        return BackwardOutput(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def _pieces(plan: Plan, problem: AttnProblem) -> list[Piece]:
    if plan.pieces is None:
        raise other_kernel(CpuKernel.name)
    pieces = [Piece(*row) for row in plan.pieces.tolist()]
    if has_scores(problem):
        return [tile for piece in pieces for tile in _cut_scores(piece)]
    return pieces


def _cut_scores(piece: Piece) -> Iterable[Piece]:
    return [piece] if piece.has_bits else cut(piece, MAX_SCORE_ROWS, MAX_SCORE_KEYS)


def _widen(x: Tensor, width: int) -> Tensor:
    """`x` with zeros behind its last dimension up to `width`, and a stride of 1 along it."""
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_head(x: Tensor, problem: AttnProblem) -> Tensor:
    """`[total, nheads, d]` as `[nheads_kv, qhead_per_kvhead, total, d]`, without a copy."""
    group = problem.qhead_per_kvhead
    if x.shape[1] == problem.nheads_q:
        return x.unflatten(1, (problem.nheads_kv, group)).permute(1, 2, 0, 3)
    return x.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1)


def _rows_by_head(x: Tensor, problem: AttnProblem) -> Tensor:
    """`[nheads_q, total_q]` as `[nheads_kv, qhead_per_kvhead, total_q]`, without a copy."""
    return x.unflatten(0, (problem.nheads_kv, problem.qhead_per_kvhead))


def _sum_group(x: Tensor) -> Tensor:
    return x.squeeze(1) if x.shape[1] == 1 else x.sum(1)


def _forward_flash(
    q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, problem: AttnProblem
) -> Partial:
    scale = problem.softmax_scale
    return Partial(*_compat.cpu_flash_forward(q, k, v, mask.added, mask.is_causal, scale))


def _backward_flash(
    dout: Tensor, saved: Saved, mask: PieceMask, problem: AttnProblem
) -> tuple[Tensor, Tensor, Tensor]:
    return _compat.cpu_flash_backward(
        dout, saved, mask.added, mask.is_causal, problem.softmax_scale
    )


def _forward_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, problem: AttnProblem
) -> Partial:
    q, k = q.float(), k.float()
    if problem.softcap:
        scores, _ = _capped_scores(q, k, mask, problem)
    else:
        scores = _masked(q @ k.mT * problem.softmax_scale, mask)
    return attention_of_scores(scores, v, problem)


def _backward_softcap(
    dout: Tensor, saved: Saved, mask: PieceMask, problem: AttnProblem
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    scores, dcap = _capped_scores(q, k, mask, problem)
    p = torch.exp(scores - lse[..., None])
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = p * (dout @ v.mT - delta) * dcap * problem.softmax_scale
    return dscores @ k, dscores.mT @ q, p.mT @ dout


def _capped_scores(
    q: Tensor, k: Tensor, mask: PieceMask, problem: AttnProblem
) -> tuple[Tensor, Tensor]:
    """Scores with the soft-cap and the mask, and their derivative by the scores before the cap."""
    tanh = torch.tanh(q @ k.mT * (problem.softmax_scale / problem.softcap))
    return _masked(problem.softcap * tanh, mask), 1 - tanh.square()


def _masked(scores: Tensor, mask: PieceMask) -> Tensor:
    return scores if mask.added is None else scores + mask.added
