"""Which order in memory an output has: that of q, as PyTorch's FlexAttention promises."""

from __future__ import annotations

from collections.abc import Sequence

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
    """What takes dimensions in `order` back to their own."""
    return sorted(range(len(order)), key=lambda dim: order[dim])


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """`x`, dense with its dimensions in `order`: itself, or a copy."""
    return x.permute(*order).contiguous().permute(*inverse(order))
