"""Masks that flash-attn-4 has itself: packed documents, windows in them, causal masks and full ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.fa4.intervals import Intervals


class Native(NamedTuple):
    """A document's row r, of the rows and keys of the document,
    sees the keys from `r + shift - left` to `r + shift + right`.

    Attributes:
        cu_seqlens: where the documents begin, int32 `[num_documents + 1]`; None for a single one.
        longest: the most rows of a document.
        left: None for no limit, like `right`.
        right: `shift` is the number of keys less that of rows: windows are aligned at the last row.
    """

    cu_seqlens: Tensor | None
    longest: int
    left: int | None
    right: int | None


def native_mask(intervals: Intervals, least_rows: int) -> Native | None:
    """The mask that `intervals`, the keys of every query, are, where flash-attn-4 has it; None where it has not. Waits
    once, and for packed documents only. These have at least `least_rows` rows on average: of shorter ones several
    share a block of a block list."""
    _, begin, end, num_rows, num_cols, most = intervals
    if most != 1 or len(begin) != num_rows:  # some row sees nothing, or more than one interval
        return None
    row, shift = torch.arange(num_rows, device=begin.device), num_cols - num_rows
    # The first row of a document is the one that sees nothing before itself; with other keys than rows there is one
    # document.
    starts = row == 0 if shift else begin == row
    first = torch.where(starts, row, 0).cummax(0).values
    following = torch.where(starts, row, num_rows).flip(0).cummin(0).values.flip(0)
    beyond = torch.cat([following[1:], following.new_full((1,), num_rows)])
    at, last = row + shift, beyond + shift
    left, right = (at - begin).max(), (end - 1 - at).max()
    facts = [
        *(starts.sum(), (beyond - first).max(), left, right),
        starts[0] & (begin == torch.maximum(first, at - left)).all(),
        (end == torch.minimum(last, at + right + 1)).all(),
        (begin == first).all(),
        (end == last).all(),
    ]
    found = torch.stack([fact.long() for fact in facts]).tolist()
    num_documents, longest, most_left, most_right, in_left, in_right, to_first, to_last = found
    limits = None if to_first else most_left, None if to_last else most_right
    if not (in_left and in_right) or (shift and limits not in ((None, None), (None, 0))):
        return None
    if num_documents == 1:
        return Native(None, longest, *limits)
    if num_documents * least_rows > num_rows:
        return None
    places = torch.nonzero_static(starts, size=num_documents)[:, 0]
    cu_seqlens = torch.cat([places, places.new_full((1,), num_rows)])
    return Native(cu_seqlens.int(), longest, *limits)
