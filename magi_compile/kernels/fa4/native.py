"""Masks that flash-attn-4 has itself: packed documents, windows in them, causal masks and full ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.fa4.intervals import Intervals


class Native(NamedTuple):
    """A document's row r, of the rows and keys of the document, sees the keys from `r + shift - left` to `r + shift + right`.

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
    """The mask that `intervals` are, where flash-attn-4 has it; None where it has not. Waits once, and for packed documents only.

    Args:
        intervals: the keys of every query.
        least_rows: how many rows documents have on average, at least: of shorter ones several share a block of a block list.

    Returns:
        The arguments of flash-attn-4 for it, or None.
    """
    row, begin, end, num_rows, num_cols, most = intervals
    if most != 1 or len(row) != num_rows:  # some row sees nothing, or more than one interval
        return None
    if num_rows != num_cols:
        return _one_document(begin, end, num_cols)
    return _documents(begin, end, least_rows)


def _one_document(begin: Tensor, end: Tensor, num_cols: int) -> Native | None:
    num_rows = len(begin)
    row = torch.arange(num_rows, device=begin.device)
    is_full = (begin == 0) & (end == num_cols)
    is_causal = (begin == 0) & (end == row + 1 + num_cols - num_rows)
    full, causal = torch.stack([is_full, is_causal]).all(1).tolist()
    if full:
        return Native(None, num_rows, None, None)
    return Native(None, num_rows, None, 0) if causal else None


def _documents(begin: Tensor, end: Tensor, least_rows: int) -> Native | None:
    num_rows = len(begin)
    row = torch.arange(num_rows, device=begin.device)
    # The first row of a document is the one that sees nothing before itself.
    starts = begin == row
    number = starts.cumsum(0)
    first = torch.where(starts, row, 0).cummax(0).values
    following = torch.where(starts, row, num_rows).flip(0).cummin(0).values.flip(0)
    beyond = torch.cat([following[1:], following.new_full((1,), num_rows)])
    left, right = (row - begin).max(), (end - 1 - row).max()
    facts = [
        number[-1],
        (beyond - first).max(),
        left,
        right,
        begin[0] == 0,
        (begin == first).all(),
        (begin == torch.maximum(first, row - left)).all(),
        (end == beyond).all(),
        (end == torch.minimum(beyond, row + right + 1)).all(),
    ]
    found = torch.stack([fact.long() for fact in facts]).tolist()
    (
        num_documents,
        longest,
        left_limit,
        right_limit,
        from_0,
        to_first,
        in_left,
        to_last,
        in_right,
    ) = found
    if not (from_0 and in_left and in_right):
        return None
    limits = None if to_first else left_limit, None if to_last else right_limit
    if num_documents == 1:
        return Native(None, longest, *limits)
    if num_documents * least_rows > num_rows:
        return None
    places = torch.nonzero_static(starts, size=num_documents).flatten()
    cu_seqlens = torch.cat([places, places.new_full((1,), num_rows)])
    return Native(cu_seqlens.int(), longest, *limits)
