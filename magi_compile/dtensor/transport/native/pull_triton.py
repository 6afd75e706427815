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


# How many rows move changes with the mask: no reason to compile again.
@triton.jit(do_not_specialize=["num_rows"])
def pull_kernel(
    target, places, num_rows, addresses, offset, width, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Row `places[1, i]` of those at `addresses[places[0, i]]` + `offset` to row `places[2, i]` of `target`."""
    for begin in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        i = begin + tl.arange(0, ROWS)
        is_row = i < num_rows
        peer = tl.load(places + i, mask=is_row, other=0)
        source_row = tl.load(places + num_rows + i, mask=is_row, other=0).to(tl.int64)
        target_row = tl.load(places + 2 * num_rows + i, mask=is_row, other=0).to(tl.int64)
        # Slots are aligned, which the compiler cannot see in an address that was loaded.
        slot = tl.multiple_of((tl.load(addresses + peer) + offset).to(target.dtype), 16)
        source = slot + source_row * width
        home = target + target_row * width
        for first in range(0, width, BLOCK):
            col = first + tl.arange(0, BLOCK)
            live = is_row[:, None] & (col < width)[None, :]
            values = tl.load(source[:, None] + col[None, :], mask=live)
            tl.store(home[:, None] + col[None, :], values, mask=live)


def pull(
    target: Tensor,
    places: Tensor,
    addresses: Tensor,
    offset: int = 0,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Rows of peers to rows of `target`, contiguous `[rows, width]`, on the current stream, by so many thread blocks,
    each of which takes an SM. `places`, contiguous int32 `[3, num_rows]`, are `peer, source_row, target_row` of every
    row; the rows of a peer lie `offset` bytes behind `addresses`, int64 `[num_peers]`; both are multiples of 16."""
    width, num_rows = target.shape[1], places.shape[1]
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    rows = min(TILE_VALUES // block, 32 * NUM_WARPS)
    with torch.cuda.device_of(target):
        pull_kernel[(min(num_programs, triton.cdiv(num_rows, rows)),)](
            *(target, places, num_rows, addresses, offset, width),
            BLOCK=block,
            ROWS=rows,
            num_warps=NUM_WARPS,
        )
