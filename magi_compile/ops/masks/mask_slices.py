"""magi::mask_slices: a mask program and the tensors that it captures -> slices of a fixed capacity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magi_compile._checks import require
from magi_compile.kernels.select import arch_of, mask_slices_kernel
from magi_compile.masks import padded_slices_from_intervals, row_intervals
from magi_compile.masks.evaluation.ranges import range_checks
from magi_compile.ops.masks.mask_call import ARGUMENTS, MaskCall, empty_where_broken
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher

_lib = torch.library.Library("magi", "FRAGMENT")

Lists = tuple[Tensor, Tensor, Tensor]


def _mask_slices(*arguments: Any) -> Lists:
    call = MaskCall.of(*arguments)
    mask, tables, symbols, device = call.mask, call.tables, call.symbols, call.device
    blocks, sizes = call.lists, call.sizes
    on_device = None if mask.by_keys else mask_slices_kernel(arch_of(device))
    if on_device is not None:
        hand_over_to_launcher()
        lists, tables = on_device.run(
            mask, tables, symbols, sizes, call.capacity, device, blocks, call.block_size
        )
        checks = range_checks(mask, tables, symbols, sizes, device)
    else:
        intervals = row_intervals(mask, tables, symbols, **call.lengths, device=device)
        slices, fits = padded_slices_from_intervals(intervals, call.capacity)
        lists, checks = slices.lists, [*intervals.checks, fits]
        if blocks:
            checks += blocks.checks(intervals, *call.block_size)
    made = call.slices(lists)
    checks += call.second_opinion(made, tables)
    require(checks)
    call.passed(made)
    return empty_where_broken(lists, checks)


def _mask_slices_fake(*arguments: Any) -> Lists:
    call = MaskCall(*arguments)
    call.begin(mask_slices_kernel)

    def ranges() -> Tensor:
        return torch.empty(call.capacity, 2, dtype=torch.int32, device=call.device)

    return ranges(), ranges(), torch.empty(call.capacity, dtype=torch.int32, device=call.device)


# A mask without captured tensors is a call without any tensor.
define_repeatable(
    _lib,
    f"mask_slices({ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _mask_slices,
    _mask_slices_fake,
    dispatch_key="BackendSelect",
)
