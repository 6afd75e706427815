"""Launches of attention with a score program (`device_scores.py`), with the code that `score_source.py` makes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.triton.score_source import ScoreFunctions, score_functions
from magi_compile.score.program import ScoreCall


class ScoreArguments(NamedTuple):
    """The arguments of the kernels for a score program.

    Attributes:
        functions: the generated ones.
        numbering: seqlen_q, seqlen_k and how many heads are batch entries.
        tables: the captured tensors, contiguous.
        sizes: of their dimensions, one behind the other.
        symbols: the captured ints.
    """

    functions: ScoreFunctions
    numbering: tuple[int, int, int]
    tables: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    symbols: tuple[int, ...]

    @classmethod
    def of(cls, score: ScoreCall, wanted: tuple[int, ...] = ()) -> ScoreArguments:
        dtypes = tuple(table.dtype for table in score.tables)
        ranks = tuple(table.dim() for table in score.tables)
        functions = score_functions(score.program.text, dtypes, ranks, wanted)
        tables = tuple(_as_memory(table) for table in score.tables)
        sizes = tuple(size for table in score.tables for size in table.shape)
        numbering = (max(1, score.seqlen_q), max(1, score.seqlen_k), score.nheads)
        return cls(functions, numbering, tables, sizes, tuple(score.symbols))

    def positional(self, some_tensor: Tensor) -> tuple[Any, ...]:
        """As the kernels take them; a tuple that would be empty has something in it that nobody reads."""
        return (
            self.numbering,
            self.tables or (some_tensor,),
            self.sizes or (1,),
            self.symbols or (1,),
        )


def totals_of(score: ScoreCall, wanted: list[int]) -> list[Tensor]:
    """Zeros to add gradients of the captured tensors to: fp32, or empty where none are wanted."""
    return [
        torch.zeros(
            table.shape if number in wanted else 0, dtype=torch.float32, device=table.device
        )
        for number, table in enumerate(score.tables)
    ]


def _as_memory(table: Tensor) -> Tensor:
    table = table.detach().contiguous()
    return table.view(torch.uint8) if table.dtype == torch.bool else table
