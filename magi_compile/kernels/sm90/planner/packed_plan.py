"""The plan of a mask as two tensors: one that holds all of the others, and a shape that says where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.kernels.heuristics import PlanTiles
from magi_compile.kernels.sm90.runtime import calls
from magi_compile.plan.stairs import NUM_LANES
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS

_ALIGNMENT = 4  # int32s: kernels read 16 bytes at a time
_TILE, _RUN, _EDGE = (len(TILE_FIELDS),), (len(RUN_FIELDS),), (NUM_LANES, 2)
_ROWS = (_TILE, _RUN, _EDGE, (), _TILE, _RUN, _EDGE)  # of each tensor


class Layout(NamedTuple):
    """The number of rows of each tensor of a plan, ints or SymInts; `splits` are int32s, see `split_kv.SplitLayout`."""

    q_tiles: Any
    q_runs: Any
    q_edges: Any
    splits: Any
    k_tiles: Any
    k_runs: Any
    k_edges: Any

    @property
    def offsets(self) -> list[Any]:
        """The begin of each tensor, in int32s, and the end of the last one."""
        sizes = (rows * _numel(row) for rows, row in zip(self, _ROWS, strict=True))
        return list(accumulate((size + -size % _ALIGNMENT for size in sizes), initial=0))

    def views(self, packed: Tensor) -> list[Tensor]:
        """The tensors in `packed`."""
        return [
            calls.part_of(packed, offset, (rows, *row))
            for rows, row, offset in zip(self, _ROWS, self.offsets, strict=False)
        ]


def shape_of(sizes: Sequence[int], layout: Layout) -> tuple[Any, ...]:
    """That of the tensor that says where the tensors of a plan lie, which is made for tiles of `sizes`."""
    return (0, *sizes, *layout)


def strides_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """Contiguous ones would be products of all sizes, beyond 64 bits."""
    return (1,) * len(shape)


def sizes_in(shape: Tensor) -> Tensor:
    """The tile sizes in a shape, as a part of that tensor: see `magi_compile.kernels.plan_sizes`."""
    return calls.part_of(shape, 0, (*shape.shape[1 : 1 + len(PlanTiles._fields)], 0))


def pack(plan: list[Tensor]) -> list[Tensor]:
    """A plan of `CudaKernel` as int32 `[size]` and a tensor without elements, of shape `[0, *sizes, *layout]`.

    What `views` and `sizes_in` gave is not made again.
    """
    *q_walk, splits, sizes, k_tiles, k_runs, k_edges = plan
    base, shape = calls.base_of(q_walk[0]), calls.base_of(sizes)
    if base is not None and shape is not None:
        return [base, shape]
    tensors = (*q_walk, splits, k_tiles, k_runs, k_edges)
    layout = Layout(*(x.shape[0] for x in tensors))
    numbers = shape_of(sizes.shape[:-1], layout)
    shape = splits.new_empty_strided(numbers, strides_of(numbers))
    packed = splits.new_empty(layout.offsets[-1])
    if not _compat.is_fake(packed):
        for view, x in zip(layout.views(packed), tensors, strict=True):
            view.copy_(x)
    return [packed, shape]


def unpack(packed: list[Tensor]) -> list[Tensor]:
    """The plan in memory that `pack` packed."""
    memory, shape = packed
    layout = Layout(*shape.shape[1 + len(PlanTiles._fields) :])
    views = layout.views(memory)
    return [*views[:4], sizes_in(shape), *views[4:]]


def _numel(row: tuple[int, ...]) -> int:
    return torch.Size(row).numel()
