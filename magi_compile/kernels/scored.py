"""The protocol of kernels that run score programs, beside `base.Kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.score.program import ScoreCall, ScoreProgram

_ATOMICS = (
    "accumulates gradients of captured tensors with atomics, which "
    "torch.use_deterministic_algorithms(True) forbids; detach these "
    "tensors, or use the cpu kernel"
)


def refusals_of_atomics() -> list[str]:
    """`ScoredKernel.table_refusals` of a kernel that adds up these gradients by atomics."""
    return [_ATOMICS] if torch.are_deterministic_algorithms_enabled() else []


def refuse_atomics(score: ScoreCall | None, deterministic: bool | None) -> None:
    """Raises where gradients of captured tensors have to repeat bit for bit,
    which those that are added up by atomics do not."""
    if score is not None and score.sums and deterministic:
        raise NotImplementedError(f"the kernel {_ATOMICS}")


@runtime_checkable
class ScoredKernel(Protocol):
    """A kernel whose forward and backward take a score program."""

    def score_refusals(
        self,
        problem: AttnProblem,
        program: ScoreProgram,
        dtypes: Sequence[torch.dtype],
        ranks: Sequence[int],
    ) -> list[str]:
        """Every reason why this kernel cannot run the program for `problem` with captured tensors of these dtypes and
        numbers of dimensions; empty when it can."""
        ...

    def table_refusals(
        self, program: ScoreProgram, dtypes: Sequence[torch.dtype], ranks: Sequence[int]
    ) -> list[str]:
        """Further reasons why the backward cannot compute gradients of captured tensors, beside those of
        `score_refusals`."""
        ...
