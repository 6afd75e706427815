"""Packed rows and entries of a batch, and which order in memory an output has: that of q,
as PyTorch's FlexAttention promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def memory_order(strides: Sequence[int]) -> list[int]:
    """The dimensions of an output for a q with these `strides`, from the largest stride on; the last one is dense."""
    # By comparisons, because strides are symbols where a graph is for all lengths, which Dynamo does not sort.
    order: list[int] = []
    for dim in range(len(strides) - 1):
        place = len(order)
        while place and strides[order[place - 1]] < strides[dim]:
            place -= 1
        order.insert(place, dim)
    return [*order, len(strides) - 1]


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`."""
    return sorted(range(len(order)), key=lambda dim: order[dim])


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """`x`, dense with its dimensions in `order`: itself, or a copy."""
    return x.permute(*order).contiguous().permute(*inverse(order))


def by_entries(packed: Tensor, batch: Any, seqlen: Any, nheads: int) -> Tensor:
    """`[batch, nheads, seqlen, head_dim]`, a view of `[batch * seqlen, nheads, head_dim]`, whichever of rows and heads
    come first in memory, or of `[batch * nheads * seqlen, 1, head_dim]`."""
    _, heads, head_dim = packed.shape
    if heads != nheads:
        return packed.view(batch, nheads, seqlen, head_dim)
    if nheads == 1 or packed.stride(0) != head_dim:
        return packed.view(batch, seqlen, nheads, head_dim).transpose(1, 2)
    if type(batch) is int and batch == 1:
        return packed.transpose(0, 1).view(1, nheads, seqlen, head_dim)
    return packed.transpose(0, 1).view(nheads, batch, seqlen, head_dim).transpose(0, 1)


def packed(x: Tensor, *, by_head: bool) -> Tensor:
    """The inverse of `by_entries`: `[batch, nheads, seqlen, head_dim]` as rows of all heads, or `by_head` as rows of
    one; what is packed stays as it is."""
    if x.dim() == 3:
        return x
    if by_head:
        return x.reshape(-1, 1, x.shape[3])
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
