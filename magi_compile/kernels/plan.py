"""The plan of a mask: how a kernel walks it. Kernels read it by name; ops take it packed in few tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.plan.stairs import NUM_LANES
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS, Walk

_ALIGNMENT = 4  # int32s: kernels read 16 bytes at a time
_WALK = ((len(TILE_FIELDS),), (len(RUN_FIELDS),), (NUM_LANES, 2))
_ROWS: tuple[tuple[int, ...], ...] = (*_WALK, (), *_WALK, (8,))  # of each tensor of a `PlanLayout`
_NUMELS = tuple(math.prod(row) for row in _ROWS)
_STRIDES = tuple(tuple(math.prod(row[i:]) for i in range(len(row) + 1)) for row in _ROWS)


class PlanTiles(NamedTuple):
    """The tile sizes a plan is built for: the q walk (forward, dq) and the k walk (dk, dv)."""

    q_tile_rows: int
    q_block_cols: int
    k_tile_rows: int
    k_block_cols: int


class BlockMap(NamedTuple):
    """The kind of a mask of block lists, by which a kernel walks it; see `magi_compile.plan.block_map`.

    Attributes:
        batch: number of batch entries.
        heads: with lists of their own: 1, or all heads of q.
        rows: 64 or 128 queries, the larger one that divides those of a block.
        keys: 64 or 128 keys, likewise.
        intervals: that a query sees at most besides its lists; 0 if these say all.
        has_table: 1 if there is a table, of blocks that begin and end anywhere.
    """

    batch: int
    heads: int
    rows: int
    keys: int
    intervals: int = 0
    has_table: int = 0


class Plan(NamedTuple):
    """The plan of a mask. Fields that a kernel does not need are None; tensors are int32.

    Attributes:
        tiles: the sizes that the walks are made for.
        q_walk: the walk by query tile, see `magi_compile.plan.tiles.TilePlan`.
        k_walk: the walk by key tile.
        splits: the tiles of the q walk that are cut into splits of their keys, see `split_kv.SplitLayout`; empty where
            none is.
        pieces: `[num_pieces, 8]`, those of the CPU kernel, see `magi_compile.kernels.cpu.pieces.Piece`.
        others: tensors of any dtype of a kernel that makes its own plan.
        block_map: of a mask of block lists; its walks are those of `magi_compile.plan.block_map`.
        packed: this plan as `pack` gives it, where it lies in such memory.
    """

    tiles: PlanTiles | None = None
    q_walk: Walk | None = None
    k_walk: Walk | None = None
    splits: Tensor | None = None
    pieces: Tensor | None = None
    others: tuple[Tensor, ...] = ()
    block_map: BlockMap | None = None
    packed: tuple[Tensor, ...] = ()

    def walks(self, tiles: PlanTiles) -> tuple[Walk, Walk]:
        """The q walk and the k walk, for a kernel that walks by `tiles`. Raises ValueError if they were made for
        others."""
        check_tiles(self.tiles, tiles)
        assert self.q_walk is not None
        assert self.k_walk is not None
        return self.q_walk, self.k_walk


def other_kernel(name: str) -> ValueError:
    """The error of the kernel called `name` for the plan of another one."""
    return ValueError(
        f"`plan` must be made with the kernel that runs it, {name!r}, got that of another one"
    )


def check_tiles(made_for: PlanTiles | None, tiles: PlanTiles) -> None:
    """Raises ValueError if a plan that was `made_for` some tiles is walked by others."""
    if made_for != tiles:
        raise ValueError(
            f"`plan` must be made for {tiles}, got one for {made_for}; make it with the kernel, the "
            "dtype and the heads of this call"
        )


class PlanLayout(NamedTuple):
    """The number of rows of each tensor of a plan in packed memory, ints or SymInts; `splits` are int32s."""

    q_tiles: Any
    q_runs: Any
    q_edges: Any
    splits: Any
    k_tiles: Any
    k_runs: Any
    k_edges: Any
    pieces: Any = 0

    @property
    def offsets(self) -> list[Any]:
        """The begin of each tensor, in int32s, and the end of the last one."""
        ends: list[Any] = [0]
        for rows, numel in zip(self, _NUMELS, strict=True):
            size = rows * numel
            ends.append(ends[-1] + size + -size % _ALIGNMENT)
        return ends

    @property
    def places(self) -> list[tuple[Any, ...]]:
        """The size, the stride and the offset of each tensor."""
        sizes = [(rows, *row) for rows, row in zip(self, _ROWS, strict=True)]
        return list(zip(sizes, _STRIDES, self.offsets, strict=False))


def shape_of(
    tiles: Sequence[int], layout: PlanLayout, block_map: BlockMap | None = None
) -> tuple[Any, ...]:
    """The shape of the tensor without elements that says where the tensors of a plan lie, which is made for `tiles`,
    perhaps of a `block_map`: a shape is there on the host, in a CUDA graph, and of a fake tensor."""
    return (0, *tiles, *layout, *(block_map or ()))


def strides_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """The strides of that tensor: contiguous ones would be products of all sizes, beyond 64 bits."""
    return (1,) * len(shape)


def pack(plan: Plan) -> list[Tensor]:
    """A plan as ops take it, in as few tensors as can be, since each of them costs every call of a graph; of fakes too.

    Walks and pieces become int32 `[size]` and a tensor of shape `shape_of(...)`. What lies in such memory already is
    not copied.
    """
    if plan.packed:
        return list(plan.packed)
    q_walk, k_walk = (walk or Walk(None, None, None) for walk in (plan.q_walk, plan.k_walk))  # type: ignore[arg-type]
    tensors = (*q_walk, plan.splits, *k_walk, plan.pieces)
    some = next((x for x in tensors if x is not None), None)
    if some is None and not plan.others:
        return []
    if some is None:
        some = plan.others[0].new_empty(0, dtype=torch.int32)
    layout = PlanLayout(*(0 if x is None else x.shape[0] for x in tensors))
    shape = shape_of(plan.tiles or PlanTiles(0, 0, 0, 0), layout, plan.block_map)
    memory = some.new_empty(layout.offsets[-1])
    if not _compat.is_fake(memory):
        for place, x in zip(layout.places, tensors, strict=True):
            if x is not None:
                memory.as_strided(*place).copy_(x)
    return [memory, some.new_empty_strided(shape, strides_of(shape)), *plan.others]


def unpack(packed: Sequence[Tensor]) -> Plan:
    """The plan that `pack` packed, in the same memory."""
    if not packed:
        return Plan()
    memory, shape, *others = packed
    try:
        tiles, places, block_map = _read(tuple(shape.shape))
    except TypeError:  # SymInts, which have no hash
        tiles, places, block_map = _read.__wrapped__(tuple(shape.shape))
    if tiles is None:
        pieces = None if others else memory.as_strided(*places[-1])
        return Plan(pieces=pieces, others=tuple(others), packed=tuple(packed))
    q_tiles, q_runs, q_edges, splits, k_tiles, k_runs, k_edges = (
        memory.as_strided(*place) for place in places[:-1]
    )
    q_walk, k_walk = Walk(q_tiles, q_runs, q_edges), Walk(k_tiles, k_runs, k_edges)
    return Plan(tiles, q_walk, k_walk, splits, block_map=block_map, packed=tuple(packed))


@lru_cache(maxsize=1024)
def _read(
    shape: tuple[int, ...],
) -> tuple[PlanTiles | None, list[tuple[Any, ...]], BlockMap | None]:
    """The tile sizes in the shape of a packed plan, None where it has no walks, the places of its tensors, and the kind
    of its block map."""
    first = 1 + len(PlanTiles._fields)
    end = first + len(PlanLayout._fields)
    tiles = PlanTiles(*shape[1:first])
    block_map = BlockMap(*shape[end:]) if len(shape) > end else None
    return tiles if tiles.q_tile_rows else None, PlanLayout(*shape[first:end]).places, block_map
