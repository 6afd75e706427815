"""The arguments of the ops of attention across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """The arguments of the ops behind their tensors, in the order of their schemas. A forward has no `wanted`, and a
    backward has it in the place of `return_max_scores`."""

    meta: Tensor  # of the plan
    data: Tensor  # of the plan
    softmax_scale: float
    softcap: float  # 0.0 for none
    kernel: str  # "" where the op is to choose
    collective: str  # "auto" where the op is to choose
    group_name: str  # of the ranks
    reduce_group_name: str  # of the same ranks, for gradients
    batch_entries: int = 1  # among the heads
    tables: Sequence[Tensor] | None = None  # that the score program captures
    symbols: Sequence[int] | None = None  # likewise
    score: str = ""  # the text of the score program
    places: Sequence[int] | None = None  # see `Scoring`; empty without a score program
    share: Sequence[int] | None = None  # see `Packing.of`
    return_max_scores: bool = False
    wanted: Sequence[int] = ()  # the numbers of the captured tensors whose gradients are asked for

    @classmethod
    def of_backward(cls, *given: Any) -> Options:
        """The arguments of a backward, of which the last ones may be left out."""
        options = cls(*given)
        wanted: Any = options.return_max_scores
        return options._replace(return_max_scores=False, wanted=wanted or ())
