"""Derives the masks of other attention functions from slices: intervals, documents, windows, blocks."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.geometry import Rects
from magi_compile.masks.slices import AttnSlices


class Documents(NamedTuple):
    """Packed documents that see only themselves: `cu_seqlens` as a list, and whether each is causal."""

    cu_seqlens: list[int]
    causal: bool

    @property
    def longest(self) -> int:
        return max(end - begin for begin, end in itertools.pairwise(self.cu_seqlens))


class Window(NamedTuple):
    """Row r sees the keys from `r - left` to `r + right`; None for no limit."""

    left: int | None
    right: int | None


def key_intervals(slices: AttnSlices) -> Tensor:
    """The keys of every row as disjoint intervals in increasing order that do not touch: int64 `[num_intervals, 2,
    seqlen_q]` of begins and ends; rows with fewer intervals end in empty ones."""
    num_rows, num_columns = slices.seqlen_q, slices.seqlen_k
    row, begin, end = slices.rects().by_row()
    if not len(row):
        return torch.zeros(1, 2, num_rows, dtype=torch.int64)
    order = torch.argsort(row * (num_columns + 1) + begin)
    row, begin, end = row[order], begin[order], end[order]
    # An interval that starts where the one before it ends continues it.
    starts = torch.ones_like(row, dtype=torch.bool)
    starts[1:] = (row[1:] != row[:-1]) | (begin[1:] > end[:-1])
    stops = torch.ones_like(starts)
    stops[:-1] = starts[1:]
    row, begin, end = row[starts], begin[starts], end[stops]
    per_row = torch.bincount(row, minlength=num_rows)
    index = torch.arange(len(row)) - (per_row.cumsum(0) - per_row)[row]
    intervals = torch.zeros(int(per_row.max()), 2, num_rows, dtype=torch.int64)
    intervals[index, 0, row] = begin
    intervals[index, 1, row] = end
    return intervals


def window_of(slices: AttnSlices) -> Window | None:
    """The sliding window that `slices` are, full and causal included; None if they are none."""
    intervals = key_intervals(slices)
    if len(intervals) > 1 or slices.seqlen_q != slices.seqlen_k:
        return None
    begin, end = intervals[0]
    row, last = torch.arange(slices.seqlen_q), slices.seqlen_k - 1
    left, right = int(last - begin[-1]), int(end[0] - 1)
    matches = (begin == (row - left).clamp(min=0)) & (end == (row + right + 1).clamp(max=last + 1))
    if not bool(matches.all()):
        return None
    return Window(None if left == last else left, None if right == last else right)


def documents_of(slices: AttnSlices) -> Documents | None:
    """The packed documents that `slices` are, a single one included; None if they are none."""
    intervals = key_intervals(slices)
    if len(intervals) > 1 or slices.seqlen_q != slices.seqlen_k:
        return None
    begin, end = intervals[0]
    row = torch.arange(slices.seqlen_q)
    starts = row[begin == row]
    if not len(starts) or starts[0] != 0:
        return None
    bounds = torch.cat([starts, torch.tensor([slices.seqlen_q])])
    document = torch.bucketize(row, bounds, right=True) - 1
    if not torch.equal(begin, bounds[document]):
        return None
    for causal, expected in ((True, row + 1), (False, bounds[document + 1])):
        if torch.equal(end, expected):
            return Documents(bounds.tolist(), causal)
    return None


def needs_documents_or_window(slices: AttnSlices) -> list[str]:
    """The refusal of a contender that takes packed documents and sliding windows; none if `slices` are such."""
    if documents_of(slices) or window_of(slices):
        return []
    return ["takes documents and windows only"]


def block_areas(slices: AttnSlices, block: int, device: torch.device | str = "cpu") -> Tensor:
    """Visible pairs in every `block x block` tile of the score matrix: int64 `[q blocks, k blocks]` on `device`."""
    num_q, num_k = -(-slices.seqlen_q // block), -(-slices.seqlen_k // block)
    areas = torch.zeros(num_q, num_k, dtype=torch.int64, device=device)
    rects = slices.rects().live()
    bounds = torch.stack(rects[:4], 1).tolist()
    rects = Rects(*(x.to(device) for x in rects))
    for number, (row_begin, row_end, col_begin, col_end) in enumerate(bounds):
        row = torch.arange(row_begin, row_end, device=device)
        begin, end = rects.select(slice(number, number + 1)).at(row)
        first, last = col_begin // block, -(-col_end // block)
        # How far an interval reaches into each block is a difference of two clamped ramps.
        edges = torch.arange(first, last + 1, device=device) * block
        reach = (edges.clamp(max=slices.seqlen_k) - begin[:, None]).clamp(min=0)
        reach = torch.minimum(reach, (end - begin)[:, None])
        areas[:, first:last].index_add_(0, row // block, reach.diff(dim=1))
    return areas


def block_lists(listed: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks that every row of `[..., q blocks, k blocks]` lists: their number, and their indices before those of
    the others; int32, contiguous whatever `listed` is."""
    # Sums and sorts keep the strides of what they are given; attention functions want the last dimension dense.
    listed = listed.contiguous()
    index = listed.int().argsort(dim=-1, descending=True, stable=True)
    return listed.sum(-1, dtype=torch.int32), index.int()
