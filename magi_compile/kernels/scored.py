"""The protocol of kernels that run score programs, beside `base.Kernel`."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.score.program import ScoreCall, ScoreProgram

_ATOMICS = (
    "accumulates gradients of captured tensors with atomics, which "
    "torch.use_deterministic_algorithms(True) forbids; detach these tensors, or use the cpu kernel"
)


def refusals_of_atomics() -> list[str]:
    """`ScoredKernel.score_refusals` of a kernel that adds up gradients of captured tensors by atomics."""
    return [_ATOMICS] if torch.are_deterministic_algorithms_enabled() else []


def refuse_atomics(score: ScoreCall | None, deterministic: bool | None) -> None:
    """Raises where gradients of captured tensors have to repeat bit for bit,
    which those that are added up by atomics do not."""
    if score is not None and score.sums and deterministic:
        raise NotImplementedError(f"the kernel {_ATOMICS}")


class ScoreNeeds(NamedTuple):
    """A score program, and what a kernel has to know of the tensors that it takes.

    Attributes:
        program: the program.
        dtypes: those of its tensors.
        ranks: their numbers of dimensions.
        wants_table_gradients: whether they need gradients.
    """

    program: ScoreProgram
    dtypes: tuple[torch.dtype, ...]
    ranks: tuple[int, ...]
    wants_table_gradients: bool


@runtime_checkable
class ScoredKernel(Protocol):
    """A kernel whose forward and backward take a score program."""

    def score_refusals(self, problem: AttnProblem, needs: ScoreNeeds) -> list[str]:
        """Every reason why this kernel cannot run the program for `problem`, and the gradients of captured tensors
        where these are wanted; empty when it can."""
        ...
