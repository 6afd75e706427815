"""Reading rows from peers with a few SMs, in Triton: loads from addresses of other GPUs, stores to this one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 16
TILE_VALUES = 1 << 15  # that a program has under way at once
MAX_BLOCK = 1 << 11  # values of a row in one step
NUM_WARPS = 16


@triton.jit
def pull_kernel(
    target, tiles, num_tiles, addresses, width, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Each tile `peer, target_row, source_row, count`: rows at `addresses[peer]` to rows of `target`."""
    step = tl.arange(0, ROWS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        entry = tiles + 4 * tile
        peer = tl.load(entry)
        target_row = tl.load(entry + 1).to(tl.int64)
        source_row = tl.load(entry + 2).to(tl.int64)
        is_row = step < tl.load(entry + 3)
        # Slots are aligned, which the compiler can not see in an address that was loaded.
        source = tl.multiple_of(tl.load(addresses + peer).to(target.dtype), 16)
        for first in range(0, width, BLOCK):
            col = first + tl.arange(0, BLOCK)
            offset = step.to(tl.int64)[:, None] * width + col[None, :]
            live = is_row[:, None] & (col < width)[None, :]
            values = tl.load(source + source_row * width + offset, mask=live)
            tl.store(target + target_row * width + offset, values, mask=live)


def rows_of_tile(width: int) -> int:
    """Rows of one tile, where rows have `width` values."""
    return max(1, TILE_VALUES // _block(width))


def pull(
    target: Tensor, tiles: Tensor, addresses: Tensor, num_programs: int = NUM_PROGRAMS
) -> None:
    """Rows of peers to rows of `target`, on the current stream.

    Args:
        target: `[rows, width]`, contiguous.
        tiles: int32 `[num_tiles, 4]`: `peer, target_row, source_row, count`, with at most `rows_of_tile(width)` rows.
        addresses: int64 `[num_peers]`, of contiguous rows of the width and dtype of `target`; multiples of 16.
        num_programs: thread blocks, each of which takes half an SM or more.
    """
    width = target.shape[1]
    with torch.cuda.device_of(target):
        pull_kernel[(min(num_programs, len(tiles)),)](
            target,
            tiles,
            len(tiles),
            addresses,
            width,
            BLOCK=_block(width),
            ROWS=rows_of_tile(width),
            num_warps=NUM_WARPS,
        )


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), MAX_BLOCK)
