"""Moving rows between tensors and one exchange buffer: `[rows, ...]` tensors side by side in `[num, width]`.

Indices are int32. On a GPU each call is one kernel (`rows_triton`), otherwise indexed copies.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from magi_compile.dtensor.ranges import expand


def widths(tensors: Sequence[Tensor]) -> list[int]:
    """Values in one row of each tensor."""
    return [x.shape[1:].numel() for x in tensors]


def rows_of(first: Tensor, count: Tensor, total: int) -> Tensor:
    """Every row of the runs `[first, first + count)`, which hold `total` together, in order; int32."""
    index, step = expand(count.long(), total)
    return (first[index] + step).to(torch.int32)


def gather(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """`[len(rows), sum of widths]`: the rows `rows` of all tensors, side by side."""
    if rows.is_cuda:
        return _kernels().gather(tensors, rows)
    return torch.cat([x.flatten(1).index_select(0, rows) for x in tensors], 1)


def scatter(packed: Tensor, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with rows like those of `like`; row i of `packed` is their row `rows[i]`, a permutation."""
    if rows.is_cuda:
        return _kernels().scatter(packed, rows, like)
    buffer = torch.empty_like(packed)
    buffer[rows.long()] = packed
    return split(buffer, like)


def split(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that lie side by side in `packed`, as views."""
    parts = packed.split(widths(like), 1)
    return [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, like, strict=True)]


class Sums:
    """Which rows of `packed` add up to which home row, in which order.

    Args:
        rows: int32 `[num]`, the home row of each packed row, where packed rows come in the order of ranks.
        num_rows: of the result.
        counts: packed rows from each rank. A rank never sends two for one home row.
    """

    def __init__(self, rows: Tensor, num_rows: int, counts: list[int]):
        self._rows, self._counts = rows, counts
        # By home row, and by rank within it.
        self._order = torch.argsort(rows, stable=True).to(torch.int32)
        edges = torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device)
        self._begin = torch.searchsorted(rows[self._order], edges, out_int32=True)

    def add_to(self, totals: Sequence[Tensor], packed: Tensor) -> None:
        """`totals [num_rows, ...]`, contiguous, += their sums, in their dtype."""
        if packed.is_cuda:
            _kernels().add(totals, packed, self._begin, self._order)
            return
        for total, values in zip(totals, split(packed, totals), strict=True):
            blocks = values.to(total.dtype).split(self._counts)
            for rows, block in zip(self._rows.split(self._counts), blocks, strict=True):
                total.index_add_(0, rows, block)


def _kernels() -> ModuleType:
    """Imported at first use, because Triton need not be installed."""
    return importlib.import_module("magi_compile.dtensor.rows_triton")
