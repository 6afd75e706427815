"""Block lists without slices: the protocol of kernels that walk them, beside `base.Kernel`, and the sizes of plans."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import map_lines, plan_tiles
from magi_compile.kernels.plan import BlockMap, Plan, PlanLayout, shape_of, strides_of
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.plan.block_map import CELL, ListShape, MapWalkShape

# As in csrc/sm90/planner/block_map.cu, of which a thread block has them in shared memory.
LISTS_AT_ONCE = 32
_MOST_SHARED_BYTES = 48 * 1024
MAX_INTERVALS = 4
KEYS_OF_TABLE = 128  # of a block of the forward, where blocks of keys begin and end anywhere


@runtime_checkable
class MappedKernel(Protocol):
    """A kernel whose forward and backward take a plan of block lists, of a problem with a `block_map`."""

    def list_refusals(self, shape: ListShape) -> list[str]:
        """Every reason why this kernel cannot walk lists of `shape`, of lengths that may be SymInts; empty when it
        can."""
        ...

    def plan_lists(
        self,
        lists: BlockLists | None,
        shape: ListShape,
        problem: AttnProblem,
        intervals: Tensor | None = None,
        table: BlockTable | None = None,
    ) -> Plan:
        """The plan of `lists`, and of the `intervals` and the `table` that say what queries see besides, see
        `plan.block_map`. There may be no lists beside a table. On a GPU nothing waits for the device."""
        ...


def block_map_of(shape: ListShape) -> BlockMap:
    """The kind of a map of lists of `shape`."""
    if shape.has_table:
        # What lists beside it do not show, nobody looks up: no block of columns may be larger than theirs.
        keys = CELL if shape.block_keys % 128 == CELL else KEYS_OF_TABLE
        return BlockMap(shape.batch, shape.heads, CELL, keys, shape.intervals, 1)
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


def table_offset(problem: AttnProblem, total_q: int, total_k: int, *, by_keys: bool) -> int:
    """The bytes in front of the table in the words of a walk."""
    walks = walk_shapes(shape_of_lists_in(problem, total_q, total_k), problem)
    return int(4 * walks[by_keys].first_table)


def shape_of_lists_in(problem: AttnProblem, total_q: int, total_k: int) -> ListShape:
    """The sizes of lists of `problem`, of blocks of the rows and keys that kernels see."""
    assert problem.block_map is not None
    batch, heads, rows, keys, intervals, has_table = problem.block_map
    of_table = (1, 1) if has_table else (None, None)  # its place does not depend on them
    lengths = total_q // batch, total_k // batch
    return ListShape(batch, heads, *lengths, rows, keys, intervals, *of_table)


def layout_of(walks: tuple[MapWalkShape, MapWalkShape]) -> PlanLayout:
    """The places of the walks in a packed plan; of lengths that may be SymInts."""
    q_counts, k_counts = ((x.num_listed, x.num_listed, x.num_edges) for x in walks)
    return PlanLayout(*q_counts, 0, *k_counts)


def map_refusals(shape: ListShape) -> list[str]:
    """Every reason why a plan cannot be made of lists of `shape`; empty when it can. Of lengths that are SymInts,
    nothing is asked but what a batch of several entries needs."""
    if not shape.has_table and any(size % 64 for size in (shape.block_rows, shape.block_keys)):
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
    if shape.has_table and (size := _ints_of_table(shape)) >= 2**31:
        return [f"has no numbers for {size} words of blocks that begin and end anywhere"]
    list_words = 0 if shape.has_table else LISTS_AT_ONCE * words_of(shape.num_k)
    if 4 * max(list_words, tiles) > _MOST_SHARED_BYTES:
        return [f"has no room for lists of {shape.num_k} blocks, or for {tiles} tiles of a head"]
    return []


def _ints_of_table(shape: ListShape) -> Any:
    """The int32s of the table in each of two walks together, at most; 0 where its sizes are not known yet."""
    sizes = (shape.table_q, shape.table_k, shape.seqlen_q, shape.seqlen_k)
    if not all(isinstance(x, int) for x in sizes):
        return 0
    words = shape.table_q * words_of(shape.seqlen_k + 128) + shape.table_k * words_of(
        shape.seqlen_q + 128
    )
    return shape.heads * shape.batch * words


def fake_plan_of_lists(given: Tensor, shape: ListShape, problem: AttnProblem) -> list[Tensor]:
    """The packed plan of fake lists, whose lengths may be SymInts, where the `given` tensor is."""
    layout = layout_of(walk_shapes(shape, problem))
    memory = given.new_empty(layout.offsets[-1], dtype=torch.int32)
    sizes = shape_of(plan_tiles(problem), layout, problem.block_map)
    return [memory, memory.new_empty_strided(sizes, strides_of(sizes))]


def words_of(num_bits: Any) -> Any:
    """The number of words of 32 bits that hold so many bits."""
    return -(-num_bits // 32)
