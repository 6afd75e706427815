"""The fields of a `BlockList` of `csrc/sm90/visibility/block_list.cuh`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from magi_compile.kernels.sm90.runtime.structs import Pointer

Layout = tuple[Sequence[int], Sequence[int]]  # sizes and strides


def check_lists(kind: tuple[Tensor, Tensor], batch: int, device: torch.device) -> None:
    """Raises ValueError where the counts or the indices are not those of `batch` entries, or of one, on `device`."""
    for x in kind:
        if x.device != device or x.shape[0] not in (1, batch):
            raise ValueError(
                f"`block_mask` must have lists of 1 or {batch} batch entries on {device}, "
                f"got {x.shape[0]} on {x.device}"
            )


def list_fields(kind: Sequence[Layout] | None, buffer: int, batch: int) -> dict[str, Any]:
    """The fields of lists of one kind; lists of one batch entry are those of all.

    Args:
        kind: the layouts of the counts `[batch, heads, q blocks]` and of the indices, as `broadcast` gives them; None
            where there are none.
        buffer: the number of the counts among the buffers of the call; the indices are the next one.
        batch: number of batch entries.

    Returns:
        The values by the names of the fields.
    """
    if kind is None:
        nothing = {"num_blocks_strides": (0,) * 3, "indices_strides": (0,) * 4}
        return {"num_blocks": None, "indices": None, **nothing, "num_heads": 1, "num_columns": 0}
    (of_counts, count_strides), (of_indices, index_strides) = kind
    is_one = batch > 1 and of_counts[0] == 1
    return {
        "num_blocks": Pointer(buffer),
        "indices": Pointer(buffer + 1),
        "num_blocks_strides": (0, *count_strides[1:]) if is_one else tuple(count_strides),
        "indices_strides": (0, *index_strides[1:]) if is_one else tuple(index_strides),
        "num_heads": of_indices[1],
        "num_columns": of_indices[3],
    }
