"""Moving rows on a GPU, in Triton: one launch for each tensor, in blocks of rows and of a row's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # of one program
MAX_BLOCK = 1024  # values of a row in one program


@triton.jit
def gather_kernel(
    x, packed, rows, num, width, x_stride, packed_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Row `rows[i]` of `x` to row i of `packed`."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < num, other=0).to(tl.int64)
    live = (i < num)[:, None] & (col < width)[None, :]
    values = tl.load(x + row[:, None] * x_stride + col[None, :], mask=live)
    tl.store(packed + i.to(tl.int64)[:, None] * packed_stride + col[None, :], values, mask=live)


@triton.jit
def scatter_kernel(
    x, packed, rows, num, width, x_stride, packed_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Row i of `packed` to row `rows[i]` of `x`."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < num, other=0).to(tl.int64)
    live = (i < num)[:, None] & (col < width)[None, :]
    values = tl.load(packed + i.to(tl.int64)[:, None] * packed_stride + col[None, :], mask=live)
    tl.store(x + row[:, None] * x_stride + col[None, :], values, mask=live)


@triton.jit
def add_kernel(total, packed, begin, order, width, packed_stride, BLOCK: tl.constexpr):
    """Row r of `total` += rows `order[begin[r]]`, `order[begin[r] + 1]`, ... of `packed`, one after another."""
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(begin + row)
    last = tl.load(begin + row + 1)
    if first < last:
        home = total + row.to(tl.int64) * width + col
        live = col < width
        value = tl.load(home, mask=live, other=0.0)
        for i in range(first, last):
            source = tl.load(order + i).to(tl.int64)
            part = tl.load(packed + source * packed_stride + col, mask=live, other=0.0)
            value += part.to(value.dtype)
        tl.store(home, value, mask=live)


def gather(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """See `rows.gather`."""
    flat = [x.flatten(1) for x in tensors]
    packed = tensors[0].new_empty(len(rows), sum(x.shape[1] for x in flat))
    for x, part in zip(flat, packed.split([x.shape[1] for x in flat], 1), strict=True):
        _move(gather_kernel, x if x.stride(1) == 1 else x.contiguous(), part, rows)
    return packed


def scatter(packed: Tensor, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """See `rows.scatter`."""
    buffers = [x.new_empty(len(rows), *x.shape[1:]) for x in like]
    parts = packed.split([x.shape[1:].numel() for x in like], 1)
    for buffer, part in zip(buffers, parts, strict=True):
        _move(scatter_kernel, buffer.flatten(1), part, rows)
    return buffers


def add(totals: Sequence[Tensor], packed: Tensor, begin: Tensor, order: Tensor) -> None:
    """See `rows.Sums`."""
    parts = packed.split([x.shape[1:].numel() for x in totals], 1)
    for total, part in zip(totals, parts, strict=True):
        num, width = len(total), part.shape[1]
        if num and width and len(order):
            block = min(triton.next_power_of_2(width), MAX_BLOCK)
            with torch.cuda.device_of(total):
                add_kernel[(num, triton.cdiv(width, block))](
                    total, part, begin, order, width, part.stride(0), BLOCK=block
                )


def _move(kernel: triton.JITFunction, x: Tensor, part: Tensor, rows: Tensor) -> None:
    num, width = part.shape
    if num and width:
        block = min(triton.next_power_of_2(width), MAX_BLOCK)
        with torch.cuda.device_of(x):
            kernel[(triton.cdiv(num, ROWS), triton.cdiv(width, block))](
                x, part, rows, num, width, x.stride(0), part.stride(0), BLOCK=block, ROWS=ROWS
            )
