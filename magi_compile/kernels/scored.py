"""The interface, beside `base.Kernel`, of a kernel that runs score programs: attention whose scores a score_mod
changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, BackwardOutput, ForwardOutput, Grads, Saved
from magi_compile.masks.slices import AttnSlices
from magi_compile.score.program import ScoreCall, ScoreProgram


class ScoredBackwardOutput(NamedTuple):
    """Gradients of attention with a score program."""

    qkv: BackwardOutput
    tables: list[Tensor]  # of the captured tensors that were asked for, fp32 or wider


_ATOMICS = (
    "accumulates gradients of captured tensors with atomics, which torch.use_deterministic_algorithms(True) forbids; detach these "
    "tensors, or use the cpu kernel"
)


def refusals_of_atomics() -> list[str]:
    """`ScoredKernel.table_refusals` of a kernel that adds up these gradients by atomics."""
    return [_ATOMICS] if torch.are_deterministic_algorithms_enabled() else []


def refuse_atomics(wanted: Sequence[int], deterministic: bool) -> None:
    """Raises where gradients of captured tensors have to repeat bit for bit, which those that are added up by atomics do not."""
    if wanted and deterministic:
        raise NotImplementedError(f"the kernel {_ATOMICS}")


@runtime_checkable
class ScoredKernel(Protocol):
    """The scores of a visible pair are `program(softmax_scale * q @ k, b, h, q, kv)`; results for masked pairs
    are ignored. A row whose scores are all -inf has out 0 and lse -inf, like one that sees nothing.
    """

    def table_refusals(
        self, program: ScoreProgram, dtypes: Sequence[torch.dtype], ranks: Sequence[int]
    ) -> list[str]:
        """Further reasons why the backward cannot compute gradients of captured tensors, beside those of
        `score_refusals`."""
        ...

    def score_refusals(
        self,
        problem: AttnProblem,
        program: ScoreProgram,
        dtypes: Sequence[torch.dtype],
        ranks: Sequence[int],
    ) -> list[str]:
        """Every reason why this kernel cannot run the program for `problem` with captured tensors of these dtypes and numbers of
        dimensions; empty when it can."""
        ...

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
        """As `Kernel.forward`; `max_scores` are those that the program gives."""
        ...

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
        """As `Kernel.backward`, with the gradients of the captured tensors whose numbers are `wanted`, added up in fp32 or wider."""
        ...
