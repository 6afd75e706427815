"""Moving rows on a GPU, in Triton: one launch for several tensors, in blocks of rows and of a row's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # of one program
MAX_BLOCK = 1024  # values of a row in one program


# How many rows move, and where a list of them begins, changes with the mask: no reason to compile again.
@triton.jit(
    do_not_specialize=["num"], do_not_specialize_on_alignment=["source_rows", "target_rows"]
)
def move_kernel(
    sources,
    source_rows,
    targets,
    target_rows,
    num,
    widths,
    source_strides,
    target_strides,
    NUM_TENSORS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row `source_rows[i]` of each of `sources` to row `target_rows[i]` of `targets`; None is i itself."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read, write = i.to(tl.int64), i.to(tl.int64)
    if source_rows is not None:
        read = tl.load(source_rows + i, mask=i < num, other=0).to(tl.int64)
    if target_rows is not None:
        write = tl.load(target_rows + i, mask=i < num, other=0).to(tl.int64)
    for t in tl.static_range(NUM_TENSORS):
        live = (i < num)[:, None] & (col < widths[t])[None, :]
        at = sources[t] + read[:, None] * source_strides[t] + col[None, :]
        values = tl.load(at, mask=live)
        to = targets[t] + write[:, None] * target_strides[t] + col[None, :]
        tl.store(to, values.to(targets[t].dtype.element_ty), mask=live)


@triton.jit
def sum_kernel(
    outs,
    prior,
    buffers,
    arrived,
    begin,
    order,
    opens,
    widths,
    out_strides,
    buffer_strides,
    arrived_strides,
    NUM_TENSORS: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row r of each of `outs` = row r of `prior`, if there is one, + rows `order[begin[r]]`, `order[begin[r] + 1]`, ...
    of `arrived`, one after another; a negative i is the row -1 - i of `buffers`. Those of a group, which begins where
    `opens` is 1, are added up first, and rounded to the dtype of `arrived`; without `opens` each is a group."""
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(begin + row)
    last = tl.load(begin + row + 1)
    for t in tl.static_range(NUM_TENSORS):
        live = col < widths[t]
        value = tl.zeros([BLOCK], SUM)
        if prior is not None:
            home = prior[t] + row.to(tl.int64) * widths[t] + col
            value += tl.load(home, mask=live, other=0.0).to(SUM)
        part = tl.zeros([BLOCK], SUM)
        for i in range(first, last):
            source = tl.load(order + i).to(tl.int64)
            if source >= 0:
                theirs = arrived[t] + source * arrived_strides[t] + col
                summand = tl.load(theirs, mask=live, other=0.0).to(SUM)
            else:
                own = buffers[t] + (-1 - source) * buffer_strides[t] + col
                summand = tl.load(own, mask=live, other=0.0).to(SUM)
            if opens is None:
                value += summand
            else:
                is_new = tl.load(opens + i) != 0
                of_group = part.to(arrived[t].dtype.element_ty).to(SUM)
                value += tl.where(is_new, of_group, 0.0)
                part = tl.where(is_new, 0.0, part) + summand
        value += part.to(arrived[t].dtype.element_ty).to(SUM)
        to = outs[t] + row.to(tl.int64) * out_strides[t] + col
        tl.store(to, value.to(outs[t].dtype.element_ty), mask=live)


def _flat(x: Tensor) -> Tensor:
    """`[rows, width]` whose rows lie anywhere, the values of each side by side."""
    flat = x.flatten(1)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def move(
    sources: Sequence[Tensor],
    source_rows: Tensor | None,
    targets: Sequence[Tensor],
    target_rows: Tensor | None,
) -> None:
    """See `rows.move`."""
    index = source_rows if source_rows is not None else target_rows
    num = len(targets[0] if index is None else index)
    widths = tuple(x.shape[1:].numel() for x in targets)
    if not (num and max(widths)):
        return
    flat = tuple(map(_flat, sources))
    block = min(triton.next_power_of_2(max(widths)), MAX_BLOCK)
    with torch.cuda.device_of(targets[0]):
        move_kernel[(triton.cdiv(num, ROWS), triton.cdiv(max(widths), block))](
            flat,
            source_rows,
            tuple(targets),
            target_rows,
            num,
            widths,
            tuple(x.stride(0) for x in flat),
            tuple(x.stride(0) for x in targets),
            NUM_TENSORS=len(targets),
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
    opens: Tensor | None,
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
            opens,
            widths,
            tuple(x.stride(0) for x in outs),
            tuple(x.stride(0) for x in buffers),
            tuple(x.stride(0) for x in arrived),
            NUM_TENSORS=len(outs),
            SUM=tl.float64 if is_double else tl.float32,
            BLOCK=block,
        )
