"""The kernels' arguments for a score program: its source, and the tensors and numbers that it reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.sm90.runtime.structs import Pointer
from magi_compile.kernels.sm90.scores.source import MOST_POSITIONS, ScoreSource, score_source
from magi_compile.plan.tiles import Walk
from magi_compile.score.program import ScoreCall

_MOST_ELEMENTS = 2**31 - 1  # of a captured tensor: places in it are int32


class TableGradients(NamedTuple):
    """Gradients of captured tensors as calls are prepared for them.

    Attributes:
        source: of the program, with gradients.
        sums: for each look-up that has a gradient, which of the tensors behind those of the call it is added to.
        num_tiles: of the q walk.
    """

    source: ScoreSource
    sums: tuple[int, ...]
    num_tiles: int


class ScoreArguments(NamedTuple):
    """A score program as calls are prepared for it: all but the addresses of tensors.

    Attributes:
        source: of the program.
        queries: how many rows of the packed queries a sequence has, and how many heads of an entry of the batch are
            sequences of their own, or 1.
        keys: the same of keys.
        words: what the source reads; a `Pointer` leads into a tensor behind those of the call, counted from the end.
        gradients: those of captured tensors, if any are wanted.
    """

    source: ScoreSource
    queries: tuple[int, int]
    keys: tuple[int, int]
    words: tuple[int | Pointer, ...]
    gradients: TableGradients | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The field `score` of the parameters."""
        return {
            "queries": _sequences(self.queries),
            "keys": _sequences(self.keys),
            "words": [*self.words, 0],
        }


def _sequences(of: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("length", "heads"), of, strict=True))


def source_of(score: ScoreCall, problem: AttnProblem, wanted: tuple[int, ...] = ()) -> ScoreSource:
    """The source of a score program as kernels for `problem` have it; with gradients of the captured tensors that are
    `wanted`."""
    return score_source(
        score.program.text,
        tuple(table.dtype for table in score.tables),
        tuple(table.dim() for table in score.tables),
        has_short_sequences=max(score.seqlen_q, score.seqlen_k) <= MOST_POSITIONS,
        may_shift=problem.softmax_scale > 0,
        wanted=wanted,
    )


def score_arguments(
    score: ScoreCall,
    problem: AttnProblem,
    total_q: int,
    total_k: int,
    q_walk: Walk | None = None,
) -> tuple[ScoreArguments, list[Tensor]]:
    """The arguments of the kernels, and the captured tensors that they read, contiguous.

    Args:
        score: the program and what it is run on.
        problem: what to compute.
        total_q: rows of the packed queries.
        total_k: rows of the packed keys.
        q_walk: that of the plan, over which gradients add up; None in a forward.

    Returns:
        The arguments, and the tensors in the order in which the source reads them; behind the sums of gradients and the
        q walk, if gradients are wanted.

    Raises:
        NotImplementedError: a captured tensor has 2**31 elements or more.
    """
    tables = [table.detach().contiguous() for table in score.tables]
    source = source_of(score, problem)
    used = [tables[number] for number in source.tables]
    words: list[int | Pointer] = []
    for i, table in enumerate(used):
        if table.numel() > _MOST_ELEMENTS:
            raise NotImplementedError(
                "a score_mod must capture tensors of fewer than 2**31 elements in kernel 'hopper', "
                f"got {list(table.shape)}; "
                "the triton kernel takes it"
            )
        # Of a tensor without elements nothing is read.
        address = Pointer(i - len(used)) if table.numel() else 0
        words += [address, *table.shape, *table.stride()]
    words += [int(symbol) % 2**64 for symbol in score.symbols]
    seqlen_q, seqlen_k = max(1, score.seqlen_q), max(1, score.seqlen_k)
    sequences_q, sequences_k = total_q // seqlen_q, total_k // seqlen_k
    heads_k = max(1, score.nheads * sequences_k // max(1, sequences_q))
    found = ScoreArguments(
        source, (seqlen_q, score.nheads), (seqlen_k, heads_k), tuple(words[: source.num_words])
    )
    read = [x if x.numel() else torch.zeros_like(x) for x in used]
    if q_walk is None or not score.sums:
        return found, read
    numbers = tuple(score.sums)
    with_gradients = source_of(score, problem, numbers)
    behind = [*score.sums.values(), *q_walk, *read]
    gradients = TableGradients(
        with_gradients,
        tuple(numbers.index(number) - len(behind) for number in with_gradients.sums),
        q_walk.tiles.shape[0],
    )
    return found._replace(gradients=gradients), behind
