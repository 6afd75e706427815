"""magi::mask_slices: a mask program and the tensors that it captures -> slices of a fixed capacity."""

from __future__ import annotations

from typing import Any

import torch

from magi_compile.kernels.select import arch_of, mask_slices_kernel
from magi_compile.masks import padded_slices_from_intervals, row_intervals
from magi_compile.masks.evaluation.ranges import range_checks
from magi_compile.ops.masks.mask_call import ARGUMENTS, Lists, MaskCall
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher

_lib = torch.library.Library("magi", "FRAGMENT")


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
        slices = call.slices(lists)
        checks = range_checks(mask, tables, symbols, sizes, device)
    else:
        intervals = row_intervals(mask, tables, symbols, **call.lengths, device=device)
        slices, fits = padded_slices_from_intervals(intervals, call.capacity)
        checks = [*intervals.checks, fits]
        if blocks:
            checks += blocks.checks(intervals, *call.block_size)
    return call.looked_at(slices, checks, tables)


def _mask_slices_fake(*arguments: Any) -> Lists:
    call = MaskCall(*arguments)
    call.begin(mask_slices_kernel)
    return call.empty_lists(call.capacity)


# A mask without captured tensors is a call without any tensor.
define_repeatable(
    _lib,
    f"mask_slices({ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _mask_slices,
    _mask_slices_fake,
    dispatch_key="BackendSelect",
)
