"""Head dimensions that a kernel does not have, by one that it has: with columns of zeros behind those that are there.

Zeros in q and k add nothing to a score, those in v give zeros in out, which are cut off, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from magi_compile.kernels.base import (
    AttnProblem,
    BackwardOutput,
    ForwardOutput,
    Grads,
    Kernel,
    Saved,
)
from magi_compile.kernels.scored import ScoredBackwardOutput, ScoredKernel
from magi_compile.masks.slices import AttnSlices
from magi_compile.score.program import ScoreCall, ScoreProgram

MOST_COLUMNS = 1.5  # for each one that is asked for: more would cost more than a kernel for all head dimensions


class InnerKernel(Kernel, ScoredKernel, Protocol):
    """What `PaddedKernel` runs."""


class PaddedKernel:
    """A kernel for few head dimensions, equal for k and v, as one for those in between and for unequal ones; see `Kernel` and
    `ScoredKernel`."""

    def __init__(self, name: str, inner: InnerKernel, head_dims: Sequence[int]):
        self.name = name
        self.plans_in_graph = inner.plans_in_graph
        self.needs_slices = inner.needs_slices
        self.prepares_calls = False
        self._inner = inner
        self._head_dims = sorted(head_dims)

    def refusals(self, problem: AttnProblem) -> list[str]:
        asked = f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v}"
        padded = self._padded(problem)
        if padded is None:
            return [f"needs head dimensions up to {self._head_dims[-1]}, got {asked}"]
        reasons = self._inner.refusals(padded)
        if 2 * padded.head_dim > MOST_COLUMNS * (problem.head_dim + problem.head_dim_v):
            reasons.append(
                f"pads head dimensions to at most {MOST_COLUMNS} times, got {asked}, which would become "
                f"{padded.head_dim}"
            )
        return reasons

    def notes(self, problem: AttnProblem) -> list[str]:
        padded = self._as(problem)
        return [
            f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} run as {padded.head_dim}, with zeros",
            *self._inner.notes(padded),
        ]

    def plan(self, slices: AttnSlices, problem: AttnProblem) -> list[Tensor]:
        return self._inner.plan(slices, self._as(problem))

    def pack(self, plan: list[Tensor]) -> list[Tensor]:
        return self._inner.pack(plan)

    def unpack(self, packed: list[Tensor]) -> list[Tensor]:
        return self._inner.unpack(packed)

    def plan_key(self, problem: AttnProblem) -> Hashable:
        return self._inner.plan_key(self._as(problem))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: AttnSlices | None,
        plan: list[Tensor],
        problem: AttnProblem,
        *,
        prior: ForwardOutput | None = None,
        out_dtype: torch.dtype | None = None,
        max_scores: Tensor | None = None,
    ) -> ForwardOutput:
        padded = self._as(problem)
        q, k, v = (_pad(x, padded.head_dim) for x in (q, k, v))
        if prior is not None:
            prior = ForwardOutput(_pad(prior.out, padded.head_dim), prior.lse)
        out, lse = self._inner.forward(
            *(q, k, v, slices, plan, padded),
            prior=prior,
            out_dtype=out_dtype,
            max_scores=max_scores,
        )
        return ForwardOutput(_cut(out, problem.head_dim_v), lse)

    def backward(
        self,
        grads: Grads,
        saved: Saved,
        slices: AttnSlices | None,
        plan: list[Tensor],
        problem: AttnProblem,
        *,
        deterministic: bool | None = None,
    ) -> BackwardOutput:
        padded = self._as(problem)
        grads, saved = _pad_backward(grads, saved, padded.head_dim)
        given = (grads, saved, slices, plan, padded)
        qkv = self._inner.backward(*given, deterministic=deterministic)
        return _cut_grads(qkv, problem)

    def table_refusals(
        self, program: ScoreProgram, dtypes: Sequence[torch.dtype], ranks: Sequence[int]
    ) -> list[str]:
        return self._inner.table_refusals(program, dtypes, ranks)

    def score_refusals(
        self,
        problem: AttnProblem,
        program: ScoreProgram,
        dtypes: Sequence[torch.dtype],
        ranks: Sequence[int],
    ) -> list[str]:
        return self._inner.score_refusals(self._as(problem), program, dtypes, ranks)

    def scored_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: AttnSlices | None,
        plan: list[Tensor],
        problem: AttnProblem,
        score: ScoreCall,
        *,
        max_scores: Tensor | None = None,
    ) -> ForwardOutput:
        padded = self._as(problem)
        q, k, v = (_pad(x, padded.head_dim) for x in (q, k, v))
        out, lse = self._inner.scored_forward(
            *(q, k, v, slices, plan, padded, score), max_scores=max_scores
        )
        return ForwardOutput(_cut(out, problem.head_dim_v), lse)

    def scored_backward(
        self,
        grads: Grads,
        saved: Saved,
        slices: AttnSlices | None,
        plan: list[Tensor],
        problem: AttnProblem,
        score: ScoreCall,
        wanted: list[int],
        *,
        deterministic: bool,
    ) -> ScoredBackwardOutput:
        padded = self._as(problem)
        grads, saved = _pad_backward(grads, saved, padded.head_dim)
        given = (grads, saved, slices, plan, padded, score, wanted)
        qkv, tables = self._inner.scored_backward(*given, deterministic=deterministic)
        return ScoredBackwardOutput(_cut_grads(qkv, problem), tables)

    def _padded(self, problem: AttnProblem) -> AttnProblem | None:
        asked = max(problem.head_dim, problem.head_dim_v)
        found = next((head_dim for head_dim in self._head_dims if head_dim >= asked), None)
        return None if found is None else replace(problem, head_dim=found, head_dim_v=found)

    def _as(self, problem: AttnProblem) -> AttnProblem:
        padded = self._padded(problem)
        assert padded is not None, problem
        return padded


def _pad(x: Tensor, columns: int) -> Tensor:
    return pad(x, (0, columns - x.shape[-1])) if x.shape[-1] < columns else x


def _cut(x: Tensor, columns: int) -> Tensor:
    return x[..., :columns].contiguous()


def _pad_backward(grads: Grads, saved: Saved, columns: int) -> tuple[Grads, Saved]:
    dout = _pad(grads.dout, columns)
    *tensors, lse = saved
    q, k, v, out = (_pad(x, columns) for x in tensors)
    return Grads(dout, grads.dlse), Saved(q, k, v, out, lse)


def _cut_grads(grads: BackwardOutput, problem: AttnProblem) -> BackwardOutput:
    dq, dk, dv = grads
    return BackwardOutput(
        _cut(dq, problem.head_dim), _cut(dk, problem.head_dim), _cut(dv, problem.head_dim_v)
    )
