"""The visible columns of each row of a mask as intervals, and the blocks that are visible as a whole.

A row is a query and a column a key; of transposed rects it is the other way round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.geometry import Rects


class Intervals(NamedTuple):
    """The columns `[begin, end)` that rows see, sorted by row and column;
    those of one row are disjoint and do not touch.

    int64 tensors `[num_intervals]`, and on the host how many rows and columns there are, and the most intervals of a
    row.
    """

    row: Tensor
    begin: Tensor
    end: Tensor
    num_rows: int
    num_cols: int
    most: int


def intervals_of_rects(rects: Rects, num_rows: int, num_cols: int) -> Intervals:
    """The intervals of the rows of disjoint trimmed rects, on their device. Waits for it twice."""
    row, begin, end = rects.by_row()
    if not len(row):
        return Intervals(row, begin, end, num_rows, num_cols, 0)
    order = torch.argsort(row * (num_cols + 1) + begin)
    row, begin, end = (x.index_select(0, order) for x in (row, begin, end))
    # Disjoint intervals of a row can only touch; what begins where the one before it ends continues it.
    starts = torch.ones_like(row, dtype=torch.bool)
    starts[1:] = (row[1:] != row[:-1]) | (begin[1:] > end[:-1])
    stops = torch.ones_like(starts)
    stops[:-1] = starts[1:]
    number = starts.cumsum(0)
    in_row = number - number.index_select(0, torch.searchsorted(row, row))
    num_intervals, most = torch.stack([number[-1], in_row.max() + 1]).tolist()
    first, last = (torch.nonzero_static(x, size=num_intervals)[:, 0] for x in (starts, stops))
    return Intervals(row[first], begin[first], end[last], num_rows, num_cols, most)


def blocks_of(intervals: Intervals, block_rows: int, block_cols: int) -> Tensor:
    """The blocks of `block_rows` rows and `block_cols` columns: bool `[2, row blocks, column blocks]`, those with some
    visible pairs and some that are not, and those with visible ones alone. In memory of the size of their number."""
    row, begin, end, num_rows, num_cols, _ = intervals
    across, down = -(-num_cols // block_cols), -(-num_rows // block_rows)
    of_row = row // block_rows * (across + 1)

    def depth(first: Tensor, last: Tensor) -> Tensor:
        """The number of intervals that reach over each block: those from `first` to before `last` of each."""
        edges = torch.zeros(down * (across + 1), dtype=torch.int32, device=row.device)
        one = (first < last).int()
        edges.scatter_add_(0, of_row + first, one)
        edges.scatter_add_(0, of_row + torch.maximum(first, last), -one)
        return edges.view(down, across + 1).cumsum(1)[:, :-1]

    seen = depth(begin // block_cols, (end + block_cols - 1) // block_cols) > 0
    # The last block ends where the columns do.
    whole_until = torch.where(end == num_cols, across, end // block_cols)
    rows_of_block = torch.full((down,), block_rows, device=row.device)
    rows_of_block[-1:] = num_rows - (down - 1) * block_rows
    full = depth((begin + block_cols - 1) // block_cols, whole_until) == rows_of_block[:, None]
    return torch.stack([seen & ~full, full])


def unrolled_bounds(intervals: Intervals, padded_rows: int) -> Tensor:
    """The bounds of every row beside one another: int32 `[padded_rows * 2 * most]`,
    begin and end of one interval after another.

    A row with fewer intervals than the most, and one that is only there for kernels that read on behind the last row,
    has intervals `[0, 0)`.
    """
    row, most = intervals.row, max(intervals.most, 1)
    in_row = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
    bounds = torch.zeros(padded_rows * most, 2, dtype=torch.int32, device=row.device)
    bounds[row * most + in_row] = torch.stack([intervals.begin, intervals.end], 1).int()
    return bounds.flatten()


def searched_bounds(intervals: Intervals, padded_rows: int) -> Tensor:
    """The bounds of all rows one after the other, increasing in each row, behind `padded_rows + 1` numbers that say
    where in the same tensor those of each row begin: int32 `[padded_rows + 1 + 2 * num_intervals]`."""
    rows = torch.arange(padded_rows + 1, device=intervals.row.device)
    offsets = padded_rows + 1 + 2 * torch.searchsorted(intervals.row, rows)
    bounds = torch.stack([intervals.begin, intervals.end], 1).flatten()
    return torch.cat([offsets, bounds]).int()
