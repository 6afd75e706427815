"""The checks of `AttnSlices.validate` without waiting for a device: for slices whose values are not readable."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck, first_of
from magi_compile.masks.slices import AttnSlices

# Overlaps are looked for among this many slices behind each one, in the order of first rows.
NEIGHBOURS = 64


def slice_checks(slices: AttnSlices) -> list[MaskCheck]:
    """Bounds, types, and overlaps: of each slice with the next `NEIGHBOURS` in the order of first rows,
    O(n log n) in all.

    So two slices that overlap go unseen where more than that many begin in the rows between their first rows.
    """
    if len(slices) == 0:
        return []
    checks = []
    for name, seqlen_name in (("q_ranges", "seqlen_q"), ("k_ranges", "seqlen_k")):
        begin, end = getattr(slices, name).unbind(1)
        bad = (begin < 0) | (begin > end) | (end > getattr(slices, seqlen_name))
        first = first_of(bad)
        checks.append(
            MaskCheck(
                ~bad.any(),
                f"`{name}` must satisfy 0 <= start <= end <= {seqlen_name}",
                f"`{name}[{{}}]` is [{{}}, {{}}]",
                (first, _at(begin, first), _at(end, first)),
            )
        )
    types = slices.mask_types
    bad = (types < 0) | (types > 3)
    first = first_of(bad)
    message = "`mask_types` must hold values of MaskType (0, 1, 2 or 3)"
    checks.append(
        MaskCheck(~bad.any(), message, "`mask_types[{}]` is {}", (first, _at(types, first)))
    )
    checks.append(_overlap_check(slices))
    return checks


def _overlap_check(slices: AttnSlices) -> MaskCheck:
    rects = slices.untrimmed_rects().trimmed()
    num_slices = len(slices)
    # Those without area come last.
    begin = torch.where(rects.has_area(), rects.row_begin, 1 << 62)
    order = rects.col_begin.argsort(stable=True)
    order = order[begin[order].argsort(stable=True)]
    rects = rects.select(order)

    width = min(NEIGHBOURS, num_slices - 1)
    index = torch.arange(num_slices, device=order.device)[:, None]
    behind = index + 1 + torch.arange(width, device=order.device)
    is_there = behind < num_slices
    behind = behind.clamp(max=num_slices - 1)
    pairs = rects.select(index).intersected(rects.select(behind))
    overlaps = is_there & pairs.has_area()
    found = first_of(overlaps)
    pair = found // max(width, 1), found // max(width, 1) + 1 + found % max(width, 1)
    ids = tuple(_at(order, x.clamp(max=num_slices - 1)) for x in pair)
    return MaskCheck(
        ~overlaps.any(), "slices must not overlap", "those at {} and {} do", (ids[0], ids[1])
    )


def _at(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]`, 0-d, without a look at `index`."""
    return values.index_select(0, index.view(1))[0]
