"""Row intervals to slices.

A slice is a run of rows whose intervals change the same way from row to row: each edge stands still or moves
by one. Where intervals are those of the rows that see a key, it is a run of keys. Entries lie one after the other: row
q of entry n is row `n * seqlen_q + q` of the slices, key kv is key `n // heads.group * seqlen_k + kv`. A batch entry is
an entry, or each of its heads where these have masks of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck
from magi_compile.masks.evaluation import messages
from magi_compile.masks.evaluation.row_intervals import RowIntervals
from magi_compile.masks.geometry import Rects
from magi_compile.masks.slices import AttnSlices


class _Runs(NamedTuple):
    """Maximal runs of rows, each interval number on its own; all `[num_intervals * entries * seqlen_q]`, in the
    order of (interval number, row)."""

    starts: Tensor  # bool: a run starts here
    ends: Tensor  # bool: a run has its last row here
    mask_type: Tensor  # int8, where a run starts: how it goes on


def slices_from_intervals(intervals: RowIntervals) -> AttnSlices:
    """The slices of row intervals, in normal form: no list is shorter per chain of rows.

    Does not look at `intervals.checks`. Waits for the device if the intervals are on a GPU.
    """
    runs = _runs(intervals)
    first, last = runs.starts.nonzero().flatten(), runs.ends.nonzero().flatten()
    if intervals.by_keys:
        lists = _rects_of_keys(intervals, runs, first, last).live().to_ranges()
        return AttnSlices.unchecked(*lists, *intervals.sizes.totals).normalize()
    bounds = _gather_runs(intervals, runs, first, last)
    slices = AttnSlices.of_rects(Rects.from_bounds(*bounds), *intervals.sizes.totals)
    return slices if first.device.type == "cpu" else slices.to(first.device)


def padded_slices_from_intervals(
    intervals: RowIntervals, capacity: int
) -> tuple[AttnSlices, MaskCheck]:
    """The slices of row intervals as lists of `capacity` entries, empty slices at the end, and the check that they all
    fit; without room the first `capacity` of them are there.

    Shapes depend on shapes alone, and nothing waits for the device. Usually as short as the normal form. Does not look
    at `intervals.checks`.
    """
    if capacity < 0:
        raise ValueError(f"`capacity` must not be negative, got {capacity}")
    runs = _runs(intervals)
    places = []
    for flags in (runs.starts, runs.ends):
        number = flags.cumsum(0, dtype=torch.int32)
        wanted = torch.arange(1, capacity + 1, dtype=torch.int32, device=flags.device)
        places.append(torch.searchsorted(number, wanted))
    count = number[-1] if number.numel() else number.sum()
    total = runs.starts.shape[0]
    if total:
        is_used = (places[0] < total)[:, None]
        first, last = (place.clamp(max=total - 1) for place in places)
        if intervals.by_keys:
            rects = _rects_of_keys(intervals, runs, first, last)
            has_area = rects.has_area() & is_used[:, 0].repeat(3)
            # With more runs than room the number is one of those that do not fit either.
            count = torch.maximum(count, has_area.sum())
            first_of_all = has_area.to(torch.int8).argsort(descending=True, stable=True)[:capacity]
            is_used = has_area[first_of_all][:, None]
            q_ranges, k_ranges, types = rects.select(first_of_all).to_ranges()
        else:
            *bounds, types = _gather_runs(intervals, runs, first, last)
            q_ranges, k_ranges = (torch.stack(pair, -1) for pair in (bounds[:2], bounds[2:]))
        q_ranges, k_ranges = (
            torch.where(is_used, x, 0).to(torch.int32) for x in (q_ranges, k_ranges)
        )
        mask_types = torch.where(is_used[:, 0], types, 0).to(torch.int32)
    else:
        q_ranges = torch.zeros(capacity, 2, dtype=torch.int32, device=count.device)
        k_ranges, mask_types = torch.zeros_like(q_ranges), q_ranges.new_zeros(capacity)
    check = MaskCheck(count <= capacity, *messages.fits(capacity), (count,), of_conversion=True)
    totals = intervals.sizes.totals
    return AttnSlices.unchecked(q_ranges, k_ranges, mask_types, *totals), check


def _runs(intervals: RowIntervals) -> _Runs:
    lo, hi = intervals.lo, intervals.hi
    is_live = lo < hi
    dlo, dhi = lo[..., 1:] - lo[..., :-1], hi[..., 1:] - hi[..., :-1]
    goes_on = is_live[..., 1:] & is_live[..., :-1]
    goes_on &= ((dlo | dhi) & ~1) == 0  # both are 0 or 1
    # How the run changes from this row to the next one, -1 where it ends.
    change = dlo.mul_(2).add_(dhi).to(torch.int8).masked_fill_(~goes_on, -1)
    change = torch.nn.functional.pad(change, (1, 1), value=-1)
    before, after = change[..., :-1], change[..., 1:]
    # A run that has two rows already must go on as it did. (Where one that has a single row could have gone
    # on, because the change into it was cut, this cuts more than the normal form.)
    is_cut = (before >= 0) & (after >= 0) & (before != after)
    starts = is_live & ((before < 0) | torch.nn.functional.pad(is_cut[..., :-1], (1, 0)))
    ends = is_live & ((after < 0) | is_cut)
    mask_type = after.masked_fill(ends, 0)
    return _Runs(starts.flatten(), ends.flatten(), mask_type.flatten())


def _gather_runs(
    intervals: RowIntervals, runs: _Runs, first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Begin and end of the rows, begin and end of the keys, and types of the runs from row number `first` to row number
    `last`; integers."""
    rows_per_interval = intervals.sizes.entries * intervals.seqlen_q
    row, last_row = first % rows_per_interval, last % rows_per_interval
    shift = row // intervals.seqlen_q // intervals.heads.group * intervals.seqlen_k
    k_begin, k_end = intervals.lo.flatten()[first], intervals.hi.flatten()[last]
    return row, last_row + 1, k_begin + shift, k_end + shift, runs.mask_type[first]


def _rects_of_keys(intervals: RowIntervals, runs: _Runs, first: Tensor, last: Tensor) -> Rects:
    """The runs of keys from place `first` to place `last`: straight rects, three for each, some without area."""
    sizes = intervals.sizes
    key, last_key = (place % (sizes.entries * sizes.seqlen_k) for place in (first, last))
    entry, begin = key // sizes.seqlen_k, key % sizes.seqlen_k
    keys = torch.stack([begin, begin + last_key - key + 1], -1)
    rows = torch.stack([intervals.lo.flatten()[first], intervals.hi.flatten()[last]], -1)
    rects = Rects.from_ranges(keys, rows, runs.mask_type[first]).transposed().trimmed().straight()
    return rects.moved(
        (entry * sizes.seqlen_q).repeat(3), (entry // sizes.heads.group * sizes.seqlen_k).repeat(3)
    )
