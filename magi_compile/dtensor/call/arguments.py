"""The arguments of the ops of attention across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """The arguments of the forward behind its tensors, in the order of its schema.

    Attributes:
        meta: of the plan.
        data: of the plan.
        softmax_scale: factor of the scores.
        softcap: 0.0 for none.
        kernel: its name; "" where the op is to choose.
        collective: how rows move, "auto" where the op is to choose.
        group_name: of the ranks.
        reduce_group_name: of the same ranks, for gradients.
        batch_entries: how many are among the heads.
        return_max_scores: whether the largest score of each row is asked for.
        tables: the tensors that the score program captures.
        symbols: the ints that it captures.
        score: the text of the score program; "" for none.
        places: see `Scoring`; empty without a score program.
        share: see `Packing.of`.
    """

    meta: Tensor
    data: Tensor
    softmax_scale: float
    softcap: float
    kernel: str
    collective: str
    group_name: str
    reduce_group_name: str
    batch_entries: int = 1
    return_max_scores: bool = False
    tables: Sequence[Tensor] | None = None
    symbols: Sequence[int] | None = None
    score: str = ""
    places: Sequence[int] | None = None
    share: Sequence[int] | None = None


class BackwardOptions(NamedTuple):
    """The arguments of the backward behind its tensors, in the order of its schema; see `Options`.

    Attributes:
        wanted: the numbers of the captured tensors whose gradients are asked for.
    """

    meta: Tensor
    data: Tensor
    softmax_scale: float
    softcap: float
    kernel: str
    collective: str
    group_name: str
    reduce_group_name: str
    batch_entries: int = 1
    tables: Sequence[Tensor] | None = None
    symbols: Sequence[int] | None = None
    score: str = ""
    places: Sequence[int] | None = None
    share: Sequence[int] | None = None
    wanted: Sequence[int] = ()

    @property
    def return_max_scores(self) -> bool:
        """No backward has any."""
        return False
