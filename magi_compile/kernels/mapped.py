"""Block lists without slices: the protocol of kernels that walk them, beside `base.Kernel`, and the sizes of plans."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import map_lines, plan_tiles
from magi_compile.kernels.plan import BlockMap, Plan, PlanLayout, shape_of, strides_of
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.plan.block_map import ListShape, MapWalkShape

LISTS_AT_ONCE = (
    32  # as in csrc/sm90/planner/block_map.cu, of which a thread block has them in shared memory
)
_MOST_SHARED_BYTES = 48 * 1024
MAX_INTERVALS = 4


@runtime_checkable
class MappedKernel(Protocol):
    """A kernel whose forward and backward take a plan of block lists, of a problem with a `block_map`."""

    def list_refusals(self, shape: ListShape) -> list[str]:
        """Every reason why this kernel cannot walk lists of `shape`, of lengths that may be SymInts; empty when it
        can."""
        ...

    def plan_lists(
        self,
        lists: BlockLists,
        shape: ListShape,
        problem: AttnProblem,
        intervals: Tensor | None = None,
    ) -> Plan:
        """The plan of `lists`, and of the `intervals` that queries see besides, see `plan.block_map`. On a GPU nothing
        waits for the device."""
        ...


def block_map_of(shape: ListShape) -> BlockMap:
    """The kind of a map of lists of `shape`."""
    rows, keys = (128 if size % 128 == 0 else 64 for size in (shape.block_rows, shape.block_keys))
    return BlockMap(shape.batch, shape.heads, rows, keys, shape.intervals)


def walk_shapes(shape: ListShape, problem: AttnProblem) -> tuple[MapWalkShape, MapWalkShape]:
    """The walks by queries and by keys of lists of `shape`, for the kernels of `problem`."""
    tiles, lines = plan_tiles(problem), map_lines(problem)
    together = max(tiles.q_tile_rows // lines.q, tiles.k_block_cols)
    return (
        MapWalkShape(shape, False, tiles.q_tile_rows, tiles.q_block_cols, lines.q, together),
        MapWalkShape(shape, True, tiles.k_tile_rows, tiles.k_block_cols, lines.k, together),
    )


def intervals_offset(problem: AttnProblem, total_q: int, total_k: int) -> int:
    """The bytes in front of the intervals in the words of the walk by queries."""
    by_queries, _ = walk_shapes(shape_of_lists_in(problem, total_q, total_k), problem)
    return int(4 * by_queries.first_interval)


def shape_of_lists_in(problem: AttnProblem, total_q: int, total_k: int) -> ListShape:
    """The sizes of lists of `problem`, of blocks of the rows and keys that kernels see."""
    assert problem.block_map is not None
    batch, heads, rows, keys, intervals = problem.block_map
    return ListShape(batch, heads, total_q // batch, total_k // batch, rows, keys, intervals)


def layout_of(walks: tuple[MapWalkShape, MapWalkShape]) -> PlanLayout:
    """The places of the walks in a packed plan; of lengths that may be SymInts."""
    q_counts, k_counts = ((x.num_listed, x.num_listed, x.num_edges) for x in walks)
    return PlanLayout(*q_counts, 0, *k_counts)


def map_refusals(shape: ListShape) -> list[str]:
    """Every reason why a plan cannot be made of lists of `shape`; empty when it can. Of lengths that are SymInts,
    nothing is asked but what a batch of several entries needs."""
    if any(size % 64 for size in (shape.block_rows, shape.block_keys)):
        return [f"needs blocks of multiples of 64, got {shape.block_rows} x {shape.block_keys}"]
    lengths = shape.seqlen_q, shape.seqlen_k
    if not isinstance(shape.batch, int) or (
        shape.batch > 1 and not all(isinstance(x, int) for x in lengths)
    ):
        return ["needs static lengths for several batch entries"]
    if shape.intervals > MAX_INTERVALS:
        return [
            f"looks up at most {MAX_INTERVALS} key intervals beside lists, got {shape.intervals}"
        ]
    if shape.batch > 1 and any(x % 16 for x in lengths):
        return [
            f"needs lengths of multiples of 16 for several batch entries, got {lengths[0]} and {lengths[1]}"
        ]
    if not all(isinstance(x, int) for x in lengths):
        return []
    tiles = shape.batch * -(-max(lengths) // 128)
    words = shape.heads * tiles * 3 * -(-max(lengths) // (64 * 32))
    if words >= 2**31 or shape.heads >= 2**16:
        return [f"has no numbers for the words of {shape.heads} heads of {max(lengths)} tokens"]
    if 4 * max(LISTS_AT_ONCE * words_of(shape.num_k), tiles) > _MOST_SHARED_BYTES:
        return [f"has no room for lists of {shape.num_k} blocks, or for {tiles} tiles of a head"]
    return []


def fake_plan_of_lists(lists: BlockLists, shape: ListShape, problem: AttnProblem) -> list[Tensor]:
    """The packed plan of fake lists, whose lengths may be SymInts."""
    layout = layout_of(walk_shapes(shape, problem))
    memory = lists.kv_indices.new_empty(layout.offsets[-1], dtype=torch.int32)
    sizes = shape_of(plan_tiles(problem), layout, problem.block_map)
    return [memory, memory.new_empty_strided(sizes, strides_of(sizes))]


def words_of(num_bits: Any) -> Any:
    """The number of words of 32 bits that hold so many bits."""
    return -(-num_bits // 32)
