"""magi::mask_bits: a mask program and the tensors that it captures -> slices, with bit blocks where intervals do not do.

Which of the two is decided by the data of each run. Where the mask has intervals and its data are as these need them, the slices are
those of `magi::mask_slices`; else they are one for every 128 queries and 128 keys, with bit blocks. There is room for both. It
looks at the data, and so is for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from magi_compile._checks import raise_pending, require
from magi_compile.masks import AttnSlices, MaskProgram, padded_slices_from_intervals
from magi_compile.masks.bits import BLOCK, WORDS
from magi_compile.masks.block_lists import BlockLists
from magi_compile.masks.evaluation.bit_blocks import (
    Grid,
    Heads,
    Listed,
    slices_with_bits,
)
from magi_compile.masks.evaluation.row_intervals import exact_intervals
from magi_compile.masks.evaluation.verify import MaskSizes, check_slices, is_verified, remember
from magi_compile.masks.program.source import in_ops, mask_mod_of, names_of_captures
from magi_compile.ops.define import define

_lib = torch.library.Library("magi", "FRAGMENT")

Lists = tuple[Tensor, Tensor, Tensor, Tensor]


def _mask_bits(
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
    verify: bool,
    heads: Sequence[int],
) -> Lists:
    raise_pending()
    tables, symbols = tables or [], symbols or []  # AOTInductor passes None for an empty list
    mask = MaskProgram.parse(program)
    grid = Grid(batch, Heads(*heads), seqlen_q, seqlen_k)
    lists = BlockLists(*block_lists) if block_lists else None
    slices = None
    if capacity:
        slices = _from_intervals(mask, tables, symbols, grid, capacity, lists, block_size)
    if slices is None:
        listed = None
        if lists:
            rows, keys = block_size
            listed = Listed.of(lists, rows, keys, grid, decide=mask.is_always_true)
        mask_mod = mask_mod_of(
            mask.functions["mask"], names_of_captures(tables, symbols), mask.names
        )
        with in_ops():
            slices = slices_with_bits(mask_mod, grid, listed, device)
    elif verify or not is_verified(program):
        three = (slices.q_ranges, slices.k_ranges, slices.mask_types)
        sizes = MaskSizes(batch, seqlen_q, seqlen_k)
        require(check_slices(mask, tables, symbols, three, sizes))
        remember(program)
    missing = _room(capacity, grid) - len(slices)
    bits = slices.bits
    if bits is None:
        bits = _empty_bits(grid, device)
    return (
        pad(slices.q_ranges, (0, 0, 0, missing)),
        pad(slices.k_ranges, (0, 0, 0, missing)),
        pad(slices.mask_types, (0, missing)),
        bits,
    )


def _from_intervals(
    mask: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    grid: Grid,
    capacity: int,
    lists: BlockLists | None,
    block_size: Sequence[int],
) -> AttnSlices | None:
    """The slices of intervals; None where these data have none, or more than there is room for."""
    sizes = {"batch": grid.batch, "seqlen_q": grid.seqlen_q, "seqlen_k": grid.seqlen_k}
    device = torch.device("cpu")
    intervals = exact_intervals(mask, tables, symbols, **sizes, device=device)
    if intervals is None:
        return None
    if lists:
        require(lists.checks(intervals, *block_size))
    slices, fits = padded_slices_from_intervals(intervals, capacity)
    return slices if bool(fits.ok) else None


def _room(capacity: Any, grid: Grid) -> Any:
    return torch.sym_max(capacity, grid.num_blocks)


def _empty_bits(grid: Grid, device: torch.device) -> Tensor:
    return torch.empty(grid.num_blocks + 1, BLOCK, WORDS, dtype=torch.int32, device=device)


def _mask_bits_fake(
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    program: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    capacity: int,
    device: torch.device,
    block_lists: Sequence[Tensor],
    block_size: Sequence[int],
    verify: bool,
    heads: Sequence[int],
) -> Lists:
    grid = Grid(batch, Heads(*heads), seqlen_q, seqlen_k)
    room = _room(capacity, grid)

    def ranges() -> Tensor:
        return torch.empty(room, 2, dtype=torch.int32, device=device)

    types = torch.empty(room, dtype=torch.int32, device=device)
    return ranges(), ranges(), types, _empty_bits(grid, device)


define(
    _lib,
    "mask_bits(Tensor[] tables, SymInt[] symbols, str program, SymInt batch, SymInt seqlen_q, SymInt seqlen_k, "
    "SymInt capacity, Device device, Tensor[] block_lists, SymInt[] block_size, bool verify, int[] heads) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _mask_bits,
    _mask_bits_fake,
)
