"""AttnSlices: the one representation of what may attend to what.

A slice is a rectangle of the score matrix, `[q_start, q_end) x [k_start, k_end)`, with up to two of its
corners cut off along the diagonal:

    FULL        CAUSAL      INV_CAUSAL  BI_CAUSAL
    # # # #     # # . .     # # # #     # # . .
    # # # #     # # # .     . # # #     . # # .
    # # # #     # # # #     . . # #     . . # #
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class MaskType(IntEnum):
    """Which corners of a slice are cut off. Bit 0: the right edge moves with the row; bit 1: the left edge."""

    FULL = 0
    CAUSAL = 1
    INV_CAUSAL = 2
    BI_CAUSAL = 3


class AttnSlice(NamedTuple):
    """One slice. Row q of it sees the keys `[lo, hi)`:

    lo = k_start + (q - q_start if INV_CAUSAL or BI_CAUSAL else 0)       (aligned top-left)
    hi = k_end - (q_end - 1 - q if CAUSAL or BI_CAUSAL else 0)           (aligned bottom-right)
    """

    q_range: tuple[int, int]
    k_range: tuple[int, int]
    mask_type: MaskType


@dataclass(frozen=True, eq=False)
class AttnSlices:
    """A list of slices over `seqlen_q` query rows and `seqlen_k` keys; their areas never overlap.

    Attributes:
        q_ranges: int32 `[num_slices, 2]`, half-open row ranges.
        k_ranges: int32 `[num_slices, 2]`, half-open key ranges, on the same device.
        mask_types: int32 `[num_slices]`, values of `MaskType`.
        seqlen_q: number of query rows.
        seqlen_k: number of keys.

    A slice with an empty range sees nothing; lists of a fixed capacity are padded with such slices.
    """

    q_ranges: Tensor
    k_ranges: Tensor
    mask_types: Tensor
    seqlen_q: int
    seqlen_k: int
