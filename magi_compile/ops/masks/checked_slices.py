"""magi::checked_slices: slices that a graph makes itself -> the same, checked when the graph runs."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile._checks import MaskDataError, require
from magi_compile.masks import AttnSlices
from magi_compile.masks.evaluation.slice_checks import slice_checks
from magi_compile.ops.define import define

_lib = torch.library.Library("magi", "FRAGMENT")

Lists = tuple[Tensor, Tensor, Tensor]


def _checked_slices(
    q_ranges: Tensor, k_ranges: Tensor, mask_types: Tensor, seqlen_q: int, seqlen_k: int
) -> Lists:
    slices = AttnSlices.unchecked(q_ranges, k_ranges, mask_types, seqlen_q, seqlen_k)
    if slices.device.type == "cpu":
        try:
            slices.validate()
        except ValueError as error:
            raise MaskDataError(str(error)) from None
        return q_ranges.clone(), k_ranges.clone(), mask_types.clone()
    checks = slice_checks(slices)
    require(checks)
    # A failed check raises later here, so no kernel may meet what it speaks of.
    holds = torch.stack([check.ok for check in checks]).all() if checks else 1
    return q_ranges * holds, k_ranges * holds, mask_types * holds


def _checked_slices_fake(
    q_ranges: Tensor, k_ranges: Tensor, mask_types: Tensor, seqlen_q: int, seqlen_k: int
) -> Lists:
    q_like, k_like, types_like = (x.new_empty(x.shape) for x in (q_ranges, k_ranges, mask_types))
    return q_like, k_like, types_like


define(
    _lib,
    "checked_slices(Tensor q_ranges, Tensor k_ranges, Tensor mask_types, SymInt seqlen_q, SymInt seqlen_k) "
    "-> (Tensor, Tensor, Tensor)",
    _checked_slices,
    _checked_slices_fake,
)
