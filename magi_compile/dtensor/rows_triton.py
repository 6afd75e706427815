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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row `source_rows[i]` of `source` to row `target_rows[i]` of `target`; None is i itself."""
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
    tl.store(to, values.to(target.dtype.element_ty), mask=live)


@triton.jit
def sum_kernel(
    outs,
    prior,
    buffers,
    arrived,
    begin,
    order,
    own,
    widths,
    buffer_strides,
    arrived_strides,
    NUM_TENSORS: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row r of each of `outs` = row r of `prior`, if there is one, + row `own[r]` of `buffers`, if there is one, + rows
    `order[begin[r]]`, `order[begin[r] + 1]`, ... of `arrived`, one after another."""
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(begin + row)
    last = tl.load(begin + row + 1)
    for t in tl.static_range(NUM_TENSORS):
        live = col < widths[t]
        home = row.to(tl.int64) * widths[t] + col
        value = tl.zeros([BLOCK], SUM)
        if prior is not None:
            value += tl.load(prior[t] + home, mask=live, other=0.0).to(SUM)
        if own is not None:
            source = tl.load(own + row).to(tl.int64)
            at = buffers[t] + source * buffer_strides[t] + col
            value += tl.load(at, mask=live & (source >= 0), other=0.0).to(SUM)
        for i in range(first, last):
            source = tl.load(order + i).to(tl.int64)
            at = arrived[t] + source * arrived_strides[t] + col
            value += tl.load(at, mask=live, other=0.0).to(SUM)
        tl.store(outs[t] + home, value.to(outs[t].dtype.element_ty), mask=live)


def _flat(x: Tensor) -> Tensor:
    """`[rows, width]` whose rows lie anywhere, the values of each side by side."""
    flat = x.flatten(1)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def move(
    source: Tensor,
    source_rows: Tensor | None,
    target: Tensor,
    target_rows: Tensor | None,
) -> None:
    """See `rows.move`."""
    index = source_rows if source_rows is not None else target_rows
    num, width = len(target if index is None else index), target.shape[1:].numel()
    if not (num and width):
        return
    flat = _flat(source)
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
            ROWS=ROWS,
            BLOCK=block,
        )


def write_sums(
    outs: Sequence[Tensor],
    prior: Sequence[Tensor] | None,
    buffers: Sequence[Tensor],
    arrived: Sequence[Tensor],
    begin: Tensor,
    order: Tensor,
    own: Tensor | None,
) -> None:
    """See `rows.Sums`."""
    num, widths = len(outs[0]), tuple(x.shape[1:].numel() for x in outs)
    if not (num and max(widths)):
        return
    buffers, arrived = (tuple(map(_flat, xs)) for xs in (buffers, arrived))
    is_double = outs[0].dtype == torch.float64
    block = min(triton.next_power_of_2(max(widths)), MAX_BLOCK)
    with torch.cuda.device_of(outs[0]):
        sum_kernel[(num, triton.cdiv(max(widths), block))](
            tuple(outs),
            None if prior is None else tuple(prior),
            buffers,
            arrived,
            begin,
            order,
            own,
            widths,
            tuple(x.stride(0) for x in buffers),
            tuple(x.stride(0) for x in arrived),
            NUM_TENSORS=len(outs),
            SUM=tl.float64 if is_double else tl.float32,
            BLOCK=block,
        )
