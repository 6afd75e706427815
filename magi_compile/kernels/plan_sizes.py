"""The tile sizes that a plan was made for, as a part of it: the shape of a tensor without elements.

A shape is there on the host, in a CUDA graph and of a fake tensor too, so that every launch can hold it against the tile sizes
that it is going to walk with.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from magi_compile.kernels.heuristics import PlanTiles


def as_shape(sizes: PlanTiles, plan: Tensor) -> Tensor:
    """Encodes `sizes` in a plan as a shape: int32 `[*sizes, 0]`, on the device of `plan`, one of its tensors."""
    return plan.new_empty((*sizes, 0))


def check_sizes(plan: Tensor | Sequence[int], sizes: PlanTiles) -> None:
    """Holds the tile sizes that a plan was made for, as they are or `as_shape`, against those that it will be walked with.

    Args:
        plan: the sizes that it was made for: four ints, or the tensor of `as_shape`.
        sizes: those that the kernel walks by.

    Raises:
        ValueError: if they differ.
    """
    made_for = tuple(plan.shape[:-1]) if isinstance(plan, Tensor) else tuple(plan)
    if made_for != sizes:
        raise ValueError(
            f"`plan` must be made for {sizes}, got one for {made_for}; make it with the kernel, the dtype and the heads of this call"
        )
