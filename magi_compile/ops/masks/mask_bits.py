"""magi::mask_bits: a mask program and the tensors that it captures -> slices,
with bit blocks where intervals do not do.

On a CPU the data of each run decide which: where the mask has intervals and its data are as these need them, the slices
are those of `magi::mask_slices`; else they are one for every 128 queries and 128 keys, with bit blocks. There is room
for both. On a GPU, where looking at the data would wait for them, all slices are the latter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from magi_compile._checks import raise_pending, require
from magi_compile.functions.text import in_ops, mask_mod_of, names_of_captures
from magi_compile.kernels.select import arch_of, mask_bits_kernel
from magi_compile.masks import AttnSlices, padded_slices_from_intervals
from magi_compile.masks.bits import BLOCK, WORDS
from magi_compile.masks.evaluation.bit_blocks import Listed, slices_with_bits
from magi_compile.masks.evaluation.row_intervals import exact_intervals
from magi_compile.masks.evaluation.sizes import MaskSizes
from magi_compile.ops.masks.mask_call import ARGUMENTS, MaskCall
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher

_lib = torch.library.Library("magi", "FRAGMENT")

Lists = tuple[Tensor, Tensor, Tensor, Tensor]


def _mask_bits(*arguments: Any) -> Lists:
    raise_pending()
    call = MaskCall.of(*arguments)
    slices = _from_intervals(call) if call.capacity else None
    if slices is None:
        return _padded(_from_mask_mod(call), call)
    call.looked_at(slices)
    return _padded(slices, call)


def _from_intervals(call: MaskCall) -> AttnSlices | None:
    """The slices of intervals; None where these data have none, or more than there is room for, or where block lists
    hide something of them."""
    device = torch.device("cpu")
    intervals = exact_intervals(call.mask, call.tables, call.symbols, call.sizes, device)
    if intervals is None:
        return None
    if lists := call.lists:
        holds_all, *others = lists.checks(intervals, *call.block_size)
        if not bool(holds_all.ok):
            return None
        require(others)
    slices, fits = padded_slices_from_intervals(intervals, call.capacity)
    return slices if bool(fits.ok) else None


def _from_mask_mod(call: MaskCall) -> AttnSlices:
    """A slice for each block of queries and keys; by one kernel where there is one."""
    mask, sizes, listed = call.mask, call.sizes, None
    if lists := call.lists:
        rows, keys = call.block_size
        listed = Listed.of(lists, rows, keys, sizes)
    on_device = mask_bits_kernel(arch_of(call.device))
    if on_device is not None:
        made = on_device.run(mask, call.tables, call.symbols, sizes, listed, call.device)
        if made is not None:
            hand_over_to_launcher()
            *_, bits = made
            slices = call.slices(made[:3], bits)
            return call.slices(call.looked_at(slices, listed=listed), bits)
    captures = names_of_captures(call.tables, call.symbols)
    with in_ops():
        mask_mod = mask_mod_of(mask.functions["mask"], captures, mask.names)
        return slices_with_bits(mask_mod, sizes, listed, call.device)


def _padded(slices: AttnSlices, call: MaskCall) -> Lists:
    """The slices, and room for those that there might have been."""
    bits = _empty_bits(call.sizes, call.device) if slices.bits is None else slices.bits
    q_ranges, k_ranges, mask_types = slices.lists
    if missing := _room(call.capacity, call.sizes) - len(slices):
        q_ranges, k_ranges = (pad(x, (0, 0, 0, missing)) for x in (q_ranges, k_ranges))
        mask_types = pad(mask_types, (0, missing))
    return q_ranges, k_ranges, mask_types, bits


def _room(capacity: Any, sizes: MaskSizes) -> Any:
    return torch.sym_max(capacity, sizes.num_blocks)


def _empty_bits(sizes: MaskSizes, device: torch.device) -> Tensor:
    return torch.empty(sizes.num_blocks + 1, BLOCK, WORDS, dtype=torch.int32, device=device)


def _mask_bits_fake(*arguments: Any) -> Lists:
    call = MaskCall(*arguments)
    call.begin(mask_bits_kernel)
    lists = call.empty_lists(_room(call.capacity, call.sizes))
    return *lists, _empty_bits(call.sizes, call.device)


# A mask without captured tensors is a call without any tensor.
define_repeatable(
    _lib,
    f"mask_bits({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _mask_bits,
    _mask_bits_fake,
    dispatch_key="BackendSelect",
)
