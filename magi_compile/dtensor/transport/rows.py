"""Moving rows between tensors `[rows, ...]`: one kernel for all of them on a GPU, indexed copies elsewhere.

`packed [num, width]` holds rows of several tensors side by side, as they travel. Indices are int32.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from magi_compile.dtensor.planning.ranges import expand


def rows_of(first: Tensor, count: Tensor, total: int) -> Tensor:
    """Every row of the ranges `[first, first + count)`, which hold `total` together, in order; int32."""
    index, step = expand(count.long(), total)
    return (first[index] + step).to(torch.int32)


def move(
    sources: Sequence[Tensor],
    source_rows: Tensor | None,
    targets: Sequence[Tensor],
    target_rows: Tensor | None,
) -> None:
    """Row `source_rows[i]` of each of `sources` to row `target_rows[i]` of `targets`; None is i itself.

    Args:
        sources: `[rows, ...]`; the values of a row lie side by side, or are copied to do so.
        source_rows: int32 `[num]`.
        targets: `[rows, ...]`, likewise, with equally many values in a row; never copied.
        target_rows: int32 `[num]`, no row twice.
    """
    if targets[0].is_cuda:
        _kernels().move(sources, source_rows, targets, target_rows)
        return
    read, write = (slice(None) if x is None else x.long() for x in (source_rows, target_rows))
    for source, target in zip(sources, targets, strict=True):
        values = source.flatten(1)[read]
        target.view(len(target), values.shape[1])[write] = values.to(target.dtype)


def gather(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """`packed`, the rows `rows` of all tensors."""
    sizes = widths(tensors)
    packed = tensors[0].new_empty(rows.shape[0], sum(sizes))
    move(tensors, rows, torch.split_with_sizes(packed, sizes, 1), None)
    return packed


def split(packed: Tensor, like: Sequence[Tensor], sizes: list[int] | None = None) -> list[Tensor]:
    """The tensors that lie side by side in `packed`, as views with rows like those of `like`; `sizes` are their widths,
    where these are at hand."""
    parts = torch.split_with_sizes(packed, widths(like) if sizes is None else sizes, 1)
    return [torch.unflatten(part, 1, x.shape[1:]) for part, x in zip(parts, like, strict=True)]


def widths(tensors: Sequence[Tensor]) -> list[int]:
    """Values in one row of each tensor."""
    return [x.shape[1:].numel() for x in tensors]


class Sums:
    """The rows that add up to each home row, in order: one of the rank itself, then those of others by rank.

    Args:
        rows: int32 `[num]`, the home row of each row that arrives, where these come in the order of ranks.
        num_rows: of the result.
        counts: rows that arrive from each rank. A rank never sends two for one home row.
        own_home_rows: int32 `[num_own]`, home rows to which the rank itself has something to add, no row twice.
        own_buffer_rows: int32 `[num_own]`, where that lies.
    """

    def __init__(
        self,
        rows: Tensor,
        num_rows: int,
        counts: list[int],
        own_home_rows: Tensor,
        own_buffer_rows: Tensor,
    ):
        self._rows, self._counts = rows, counts
        # By home row, and by rank within it.
        self._order = torch.argsort(rows, stable=True).to(torch.int32)
        edges = torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device)
        self._begin = torch.searchsorted(rows[self._order], edges, out_int32=True)
        self._own_home_rows, self._own_buffer_rows = own_home_rows, own_buffer_rows
        self._own: Tensor | None = None  # the buffer row of each home row, -1 for none
        if len(own_home_rows):
            self._own = torch.full_like(edges[1:], -1)
            self._own[own_home_rows.long()] = own_buffer_rows

    def write(
        self,
        outs: Sequence[Tensor],
        prior: Sequence[Tensor] | None,
        buffers: Sequence[Tensor],
        arrived: Sequence[Tensor],
    ) -> None:
        """The sums of several tensors at once, added up in fp32 or wider and rounded once.

        Args:
            outs: `[num_rows, ...]`, contiguous, of one dtype.
            prior: contiguous tensors of the same shapes, to which all else is added; None for zeros. May be `outs`.
            buffers: `[num_received, ...]`, what the rank itself has; the values of a row lie side by side, or are
                copied to do so.
            arrived: `[num, ...]`, likewise.
        """
        if outs[0].is_cuda:
            order = (self._begin, self._order, self._own)
            _kernels().write_sums(outs, prior, buffers, arrived, *order)
            return
        for i, out in enumerate(outs):
            total = torch.zeros_like(out, dtype=torch.promote_types(out.dtype, torch.float32))
            if prior is not None:
                total += prior[i]
            flat = total.flatten(1)
            own = buffers[i].flatten(1)[self._own_buffer_rows.long()]
            flat[self._own_home_rows.long()] += own
            blocks = (self._rows.split(self._counts), arrived[i].split(self._counts))
            for rows, block in zip(*blocks, strict=True):
                flat[rows.long()] += block.flatten(1)
            out.copy_(total)


@cache
def _kernels() -> ModuleType:
    """Imported at first use, because Triton need not be installed."""
    return importlib.import_module("magi_compile.dtensor.transport.rows_triton")
