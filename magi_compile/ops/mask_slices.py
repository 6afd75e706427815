"""magi::mask_slices: a mask program and the tensors that it captures -> slices of a fixed capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from magi_compile._checks import require
from magi_compile.kernels.select import arch_of, mask_slices_kernel
from magi_compile.masks import MaskProgram, padded_slices_from_intervals, row_intervals
from magi_compile.masks.block_lists import BlockLists
from magi_compile.masks.evaluation.ranges import range_checks
from magi_compile.masks.evaluation.verify import MaskSizes, check_slices, is_verified, remember
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher

_lib = torch.library.Library("magi", "FRAGMENT")

Lists = tuple[Tensor, Tensor, Tensor]


def _mask_slices(
    tables: Sequence[Tensor] | None,
    symbols: Sequence[int] | None,
    program: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    capacity: int,
    device: torch.device,
    block_lists: Sequence[Tensor],
    block_size: Sequence[int],
    verify: bool = False,
) -> Lists:
    tables, symbols = tables or [], symbols or []  # AOTInductor passes None for an empty list
    mask, sizes = MaskProgram.parse(program), MaskSizes(batch, seqlen_q, seqlen_k)
    blocks = BlockLists(*block_lists) if block_lists else None
    on_device = mask_slices_kernel(arch_of(device))
    if on_device is not None:
        hand_over_to_launcher()
        lists, tables = on_device(
            *(mask, tables, symbols, (*sizes, capacity), device, blocks, tuple(block_size))
        )
        checks = range_checks(mask, tables, symbols, sizes, device)
    else:
        lengths = dict(zip(("batch", "seqlen_q", "seqlen_k"), sizes, strict=True))
        intervals = row_intervals(mask, tables, symbols, **lengths, device=device)
        slices, fits = padded_slices_from_intervals(intervals, capacity)
        lists, checks = (
            (slices.q_ranges, slices.k_ranges, slices.mask_types),
            [*intervals.checks, fits],
        )
        if blocks:
            checks += blocks.checks(intervals, *block_size)
    if verify or not is_verified(program):
        checks += check_slices(mask, tables, symbols, lists, sizes)
    require(checks)
    remember(program)
    if checks and device.type == "cuda":
        # A failed check raises later here, so no kernel may meet the nonsense that data it speaks of leads to.
        holds = torch.stack([check.ok for check in checks]).all()
        lists = tuple(x * holds for x in lists)
    return lists


def _mask_slices_fake(
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    program: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    capacity: int,
    device: torch.device,
    *_: Any,
) -> Lists:
    def ranges() -> Tensor:
        return torch.empty(capacity, 2, dtype=torch.int32, device=device)

    return ranges(), ranges(), torch.empty(capacity, dtype=torch.int32, device=device)


# A mask without captured tensors is a call without any tensor.
define_repeatable(
    _lib,
    "mask_slices(Tensor[] tables, SymInt[] symbols, str program, SymInt batch, SymInt seqlen_q, "
    "SymInt seqlen_k, SymInt capacity, Device device, Tensor[] block_lists, SymInt[] block_size, bool verify=False) "
    "-> (Tensor, Tensor, Tensor)",
    _mask_slices,
    _mask_slices_fake,
    dispatch_key="BackendSelect",
)
