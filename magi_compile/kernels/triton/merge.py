"""Merging and summing partial results on a GPU in one pass over them, in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # of one program
SUM_BLOCK = 4096


@triton.jit
def merge_kernel(
    outs,
    lses,
    out,
    lse,
    num_rows,
    nheads,
    head_dim,
    NUM_PARTIALS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """`outs`: contiguous `[num_rows, nheads, head_dim]`; `lses`: contiguous `[nheads, num_rows]`."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    at_lse = head * num_rows + row
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    for i in tl.static_range(NUM_PARTIALS):
        peak = tl.maximum(peak, tl.load(lses[i] + at_lse, mask=row < num_rows, other=0.0))
    # Relative to the largest: exp(lse_i - lse) would carry the rounding of a large lse into the weights.
    base = tl.where(peak == -float("inf"), 0.0, peak)
    live = (row < num_rows)[:, None] & (dim < head_dim)[None, :]
    at_out = (row.to(tl.int64)[:, None] * nheads + head) * head_dim + dim[None, :]
    total = tl.zeros([ROWS], tl.float32)
    value = tl.zeros([ROWS, DIM], tl.float32)
    for i in tl.static_range(NUM_PARTIALS):
        weight = tl.exp(tl.load(lses[i] + at_lse, mask=row < num_rows, other=0.0) - base)
        partial = tl.load(outs[i] + at_out, mask=live, other=0.0).to(tl.float32)
        total += weight
        value += weight[:, None] * partial
    value = value / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at_out, value.to(out.dtype.element_ty), mask=live)
    tl.store(lse + at_lse, base + tl.log(total), mask=row < num_rows)


@triton.jit
def sum_kernel(partials, total, numel, NUM_PARTIALS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(NUM_PARTIALS):
        value += tl.load(partials[i] + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=at < numel)


def merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `merge.merge_prior`."""
    outs = tuple(x.contiguous() for x in outs)
    lses = tuple(x.contiguous() for x in lses)
    num_rows, nheads, head_dim = outs[0].shape
    out, lse = torch.empty_like(outs[0], dtype=out_dtype), torch.empty_like(lses[0])
    if out.numel():
        with torch.cuda.device_of(out):
            merge_kernel[(triton.cdiv(num_rows, ROWS), nheads)](
                *(outs, lses, out, lse, num_rows, nheads, head_dim),
                NUM_PARTIALS=len(outs),
                ROWS=ROWS,
                DIM=triton.next_power_of_2(head_dim),
            )
    return out, lse


def add(partials: Sequence[Tensor]) -> Tensor:
    """See `merge.sum_partials`."""
    partials = tuple(x.contiguous() for x in partials)
    total = torch.empty_like(partials[0])
    if total.numel():
        with torch.cuda.device_of(total):
            sum_kernel[(triton.cdiv(total.numel(), SUM_BLOCK),)](
                partials, total, total.numel(), NUM_PARTIALS=len(partials), BLOCK=SUM_BLOCK
            )
    return total
