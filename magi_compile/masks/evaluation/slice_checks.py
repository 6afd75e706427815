"""What `AttnSlices.validate` checks, as checks that wait for no device: for slices whose values nobody could look at."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck
from magi_compile.masks import bands
from magi_compile.masks.slices import AttnSlices

# Overlaps are looked for among this many slices behind each one, in the order of first rows.
NEIGHBOURS = 64


def slice_checks(slices: AttnSlices) -> list[MaskCheck]:
    """Bounds, types, and overlaps: of each slice with the next `NEIGHBOURS` in the order of first rows, O(n log n) in all.

    So two slices that overlap go unseen where more than that many begin in the rows between their first rows.
    """
    if len(slices) == 0:
        return []
    checks = []
    for name, seqlen_name in (("q_ranges", "seqlen_q"), ("k_ranges", "seqlen_k")):
        begin, end = getattr(slices, name).unbind(1)
        bad = (begin < 0) | (begin > end) | (end > getattr(slices, seqlen_name))
        first = _first(bad)
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
    first = _first(bad)
    message = "`mask_types` must hold values of MaskType (0, 1, 2 or 3)"
    checks.append(
        MaskCheck(~bad.any(), message, "`mask_types[{}]` is {}", (first, _at(types, first)))
    )
    checks.append(_overlap_check(slices))
    return checks


def _overlap_check(slices: AttnSlices) -> MaskCheck:
    lists = (slices.q_ranges, slices.k_ranges, slices.mask_types)
    parts = bands.trim(bands.from_ranges(*lists))
    num_slices = len(slices)
    # Those without rows come last.
    begin = torch.where(parts.begin < parts.end, parts.begin, 1 << 62)
    order = parts.lo.argsort(stable=True)
    order = order[begin[order].argsort(stable=True)]
    parts = bands.Bands(*(field[order] for field in parts))

    width = min(NEIGHBOURS, num_slices - 1)
    index = torch.arange(num_slices, device=order.device)[:, None]
    behind = index + 1 + torch.arange(width, device=order.device)
    is_there = behind < num_slices
    behind = behind.clamp(max=num_slices - 1)
    one = bands.Bands(*(field[:, None] for field in parts))
    other = bands.Bands(*(field[behind] for field in parts))
    # In some row that both have, each begins before the other one ends.
    row = torch.maximum(one.begin, other.begin)
    end = torch.minimum(one.end, other.end)
    (one_lo, one_hi), (other_lo, other_hi) = one.at(row), other.at(row)
    for room, slope in (
        (one_hi - other_lo, one.dhi - other.dlo),
        (other_hi - one_lo, other.dhi - one.dlo),
    ):
        first = torch.maximum(one.begin, other.begin)
        row = torch.maximum(row, torch.where(slope > 0, first + 1 - room, first))
        last = torch.where(slope < 0, first + room, torch.where(room > 0, end, first))
        end = torch.minimum(end, torch.where(slope > 0, end, last))
    overlaps = is_there & (row < end)
    found = _first(overlaps.flatten())
    pair = found // max(width, 1), found // max(width, 1) + 1 + found % max(width, 1)
    ids = tuple(_at(order, x.clamp(max=num_slices - 1)) for x in pair)
    return MaskCheck(
        ~overlaps.any(), "slices must not overlap", "those at {} and {} do", (ids[0], ids[1])
    )


def _first(flags: Tensor) -> Tensor:
    """Where the first flag is set, 0-d; 0 where none is."""
    return flags.int().argmax() if flags.numel() else flags.sum()


def _at(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]`, 0-d, without a look at `index`."""
    return values.index_select(0, index.view(1))[0]
