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
def move_kernel(
    source,
    source_rows,
    target,
    target_rows,
    num,
    width,
    source_stride,
    target_stride,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row `source_rows[i]` of `source` to row `target_rows[i]` of `target`, or on top of it; None is i itself."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (i < num)[:, None] & (col < width)[None, :]
    read, write = i.to(tl.int64), i.to(tl.int64)
    if source_rows is not None:
        read = tl.load(source_rows + i, mask=i < num, other=0).to(tl.int64)
    if target_rows is not None:
        write = tl.load(target_rows + i, mask=i < num, other=0).to(tl.int64)
    values = tl.load(source + read[:, None] * source_stride + col[None, :], mask=live)
    to = target + write[:, None] * target_stride + col[None, :]
    values = values.to(target.dtype.element_ty)
    if ADD:
        values += tl.load(to, mask=live)
    tl.store(to, values, mask=live)


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


def move(
    source: Tensor,
    source_rows: Tensor | None,
    target: Tensor,
    target_rows: Tensor | None,
    add: bool,
) -> None:
    """See `rows.move`."""
    index = source_rows if source_rows is not None else target_rows
    num, width = len(target if index is None else index), target.shape[1:].numel()
    if not (num and width):
        return
    flat = source.flatten(1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    with torch.cuda.device_of(target):
        move_kernel[(triton.cdiv(num, ROWS), triton.cdiv(width, block))](
            flat,
            source_rows,
            target,
            target_rows,
            num,
            width,
            flat.stride(0),
            target.stride(0),
            ADD=add,
            ROWS=ROWS,
            BLOCK=block,
        )


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
