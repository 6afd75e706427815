"""Moving rows between tensors `[rows, ...]`: one kernel for each tensor on a GPU, indexed copies elsewhere.

`packed [num, width]` holds rows of several tensors side by side, as they travel. Indices are int32.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from magi_compile.dtensor.ranges import expand


def rows_of(first: Tensor, count: Tensor, total: int) -> Tensor:
    """Every row of the runs `[first, first + count)`, which hold `total` together, in order; int32."""
    index, step = expand(count.long(), total)
    return (first[index] + step).to(torch.int32)


def move(
    source: Tensor,
    source_rows: Tensor | None,
    target: Tensor,
    target_rows: Tensor | None,
    *,
    add: bool = False,
) -> None:
    """Row `source_rows[i]` of `source` to row `target_rows[i]` of `target`, or on top of it; None is i itself.

    Args:
        source: `[rows, ...]`; the values of a row lie side by side, or are copied to do so.
        source_rows: int32 `[num]`.
        target: `[rows, ...]`, likewise, with equally many values in a row; never copied.
        target_rows: int32 `[num]`, no row twice.
        add: whether to add, in the dtype of `target`.
    """
    if target.is_cuda:
        _kernels().move(source, source_rows, target, target_rows, add)
        return
    values = source.flatten(1) if source_rows is None else source.flatten(1)[source_rows.long()]
    values = values.to(target.dtype)
    flat = target.view(len(target), values.shape[1])
    rows = slice(None) if target_rows is None else target_rows.long()
    flat[rows] = flat[rows] + values if add else values


def gather(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """`packed`, the rows `rows` of all tensors."""
    sizes = widths(tensors)
    packed = tensors[0].new_empty(len(rows), sum(sizes))
    for x, part in zip(tensors, packed.split(sizes, 1), strict=True):
        move(x, rows, part, None)
    return packed


def split(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that lie side by side in `packed`, as views with rows like those of `like`."""
    parts = packed.split(widths(like), 1)
    return [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, like, strict=True)]


def widths(tensors: Sequence[Tensor]) -> list[int]:
    """Values in one row of each tensor."""
    return [x.shape[1:].numel() for x in tensors]


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
        blocks = (self._rows.split(self._counts), packed.split(self._counts))
        for rows, block in zip(*blocks, strict=True):
            for total, values in zip(totals, split(block, totals), strict=True):
                move(values, None, total, rows, add=True)


def _kernels() -> ModuleType:
    """Imported at first use, because Triton need not be installed."""
    return importlib.import_module("magi_compile.dtensor.rows_triton")
