"""Which order in memory an output has: that of q, as PyTorch's FlexAttention promises."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def memory_order(strides: Sequence[int]) -> list[int]:
    """The dimensions of an output for a q with these `strides`, from the largest stride on; the last one is dense."""
    last = len(strides) - 1
    return [*sorted(range(last), key=lambda dim: strides[dim], reverse=True), last]


def inverse(order: Sequence[int]) -> list[int]:
    """What takes dimensions in `order` back to their own."""
    return sorted(range(len(order)), key=lambda dim: order[dim])


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """`x`, dense with its dimensions in `order`: itself, or a copy."""
    return x.permute(*order).contiguous().permute(*inverse(order))
