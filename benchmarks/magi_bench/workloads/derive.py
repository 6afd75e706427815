"""Derives the masks of other attention functions from slices: intervals, documents, windows, blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.fa4.intervals import Intervals, intervals_of_rects
from magi_compile.kernels.fa4.native import Native, native_mask
from magi_compile.masks.geometry import Rects
from magi_compile.masks.slices import AttnSlices


class Window(NamedTuple):
    """Row r sees the keys from `r - left` to `r + right`; None for no limit."""

    left: int | None
    right: int | None


def key_intervals(slices: AttnSlices) -> Tensor:
    """The keys of every row as disjoint intervals in increasing order that do not touch: int64 `[num_intervals, 2,
    seqlen_q]` of begins and ends; rows with fewer intervals end in empty ones."""
    row, begin, end, num_rows, _, most = _intervals(slices)
    index = torch.arange(len(row)) - torch.searchsorted(row, row)
    found = torch.zeros(max(most, 1), 2, num_rows, dtype=torch.int64)
    found[index, 0, row] = begin
    found[index, 1, row] = end
    return found


def _intervals(slices: AttnSlices) -> Intervals:
    return intervals_of_rects(slices.rects(), slices.seqlen_q, slices.seqlen_k)


def packing_of(slices: AttnSlices) -> Native | None:
    """The packed documents, each full or each causal, or the one sliding window that `slices` are; None if neither."""
    if slices.seqlen_q != slices.seqlen_k:
        return None
    found = native_mask(_intervals(slices), least_rows=1)
    if found is None or found.cu_seqlens is None:
        return found
    return found if found.left is None and found.right in (None, 0) else None


def window_of(slices: AttnSlices) -> Window | None:
    """The sliding window that `slices` are, full and causal included; None if they are none."""
    found = packing_of(slices)
    if found is None or found.cu_seqlens is not None:
        return None
    return Window(found.left, found.right)


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
