"""The plan of block lists by `csrc/sm90/planner/block_map.cu`: what `magi_compile.plan.block_map` says, in two launches
that nothing waits for, and of a table in four."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from magi_compile._checks import flag_addresses, raise_pending, require
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.mapped import (
    LISTS_AT_ONCE,
    layout_of,
    map_refusals,
    walk_shapes,
    words_of,
)
from magi_compile.kernels.plan import BlockMap, Plan, PlanTiles, shape_of, strides_of, unpack
from magi_compile.kernels.sm90.masks.list_fields import check_lists, list_fields
from magi_compile.kernels.sm90.params import BLOCK_MAP
from magi_compile.kernels.sm90.runtime.calls import Buffer, Call, Launch
from magi_compile.kernels.sm90.runtime.driver import load_function, on_device
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import Pointer
from magi_compile.masks.evaluation.block_lists import (
    IS_FULL,
    BlockLists,
    broadcast,
    visible_blocks,
)
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.masks.evaluation.row_intervals import RowIntervals
from magi_compile.plan.block_map import (
    CELL,
    MOST_SORTED,
    ROWS_OF_SPAN,
    ListShape,
    MapWalkShape,
)

_THREADS_OF_LISTS, _THREADS_OF_TILES = 1024, 512
_THREADS_OF_TABLE, _THREADS_OF_CELLS = 512, 256
_LINES_AT_ONCE, _COLUMNS_AT_ONCE = 64, 2048  # as in the source

INDICES = (
    "the indices of `block_mask` must be those of its kv blocks",
    "{} is listed for q block {} of head {} of batch entry {}",
)
COUNTS = (
    "the counts of `block_mask` must be from 0 to the columns of its indices",
    "q block {1} of head {2} of batch entry {3} has {0}",
)


FULL = (IS_FULL[0], "it hides some in kv block {} of q block {} of head {} of batch entry {}")


@cache
def block_map_variants(has_table: bool = False) -> tuple[Variant, ...]:
    """The kernels to compile: of lists, or of a table, its cells and lines; and of tiles."""
    of_lists = ("ffa_block_map",)
    of_table = ("ffa_block_table", "ffa_block_table_cells", "ffa_block_table_lines")
    entries = (*(of_table if has_table else of_lists), "ffa_block_map_tiles")
    return tuple(Variant("planner/block_map.cu", entry, ()) for entry in entries)


def plan_of_lists(
    lists: BlockLists | None,
    shape: ListShape,
    problem: AttnProblem,
    intervals: Tensor | None = None,
    table: BlockTable | None = None,
) -> Plan:
    """The plan of `lists`: on their GPU, on torch's current stream, without a wait.

    Args:
        lists: ints, as in a BlockMask, of 1 or `shape.batch` batch entries and 1 or `shape.heads` heads; None where
            only a table says what is seen.
        shape: nothing is in `map_refusals` of it.
        problem: has the `block_map_of` the shape.
        intervals: int32 `[batch * seqlen_q, shape.intervals, 2]`, contiguous: begin and end of the columns of all
            entries that each query sees besides; None where the lists say all.
        table: of blocks that begin and end anywhere, of which a query sees what the lists show as well. Lists of blocks
            that are no multiples of 64 are one.

    Returns:
        The plan, packed.

    Raises:
        MaskDataError: a list names a block that there is not, or a full block of which a query does not see everything;
            on a GPU with a later call.
        NotImplementedError: there is no room for so many blocks.
        ValueError: there are too few lists, or of other batch entries or heads.
    """
    lists, table = check_given(lists, shape, intervals, table)
    raise_pending()
    if table is not None:
        return _plan_of_table(table, lists, shape, problem, intervals)
    assert lists is not None
    device = lists.kv_indices.device
    kinds = [[x.int() for x in broadcast(kind, shape.num_q)] for kind in lists.kinds]
    layouts = tuple((x.shape, x.stride()) for kind in kinds for x in kind)
    walks, tiles = walk_shapes(shape, problem), plan_tiles(problem)
    with on_device(device):
        call = _call(layouts, shape, walks, tiles, problem.block_map, device)
        given = [x for kind in kinds for x in kind]
        packed, tensor, *_ = call.run([*given, intervals], device)
    return unpack([packed, tensor])


def check_given(
    lists: BlockLists | None, shape: ListShape, intervals: Tensor | None, table: BlockTable | None
) -> tuple[BlockLists | None, BlockTable | None]:
    """The lists and the table to plan, which `shape` must fit: of lists whose blocks are no multiples of 64, a table.
    Raises as `plan_of_lists`."""
    if refusals := map_refusals(shape):
        raise NotImplementedError(f"the plan of block lists {refusals[0]}")
    if lists is not None:
        lists.check_lengths(shape.num_q)
        for kind in lists.kinds:
            check_lists(kind, shape.batch, lists.kv_indices.device)
        lists.check_heads(shape.heads)
    if shape.has_table and table is None:
        assert lists is not None
        table, lists = table_of_lists(lists, shape, intervals), None
    return lists, table


def table_of_lists(
    lists: BlockLists, shape: ListShape, intervals: Tensor | None = None
) -> BlockTable:
    """Lists of blocks of any size as a table, on their device.

    Args:
        lists: what `shape` says.
        shape: of the lists.
        intervals: as in `plan_of_lists`.

    Returns:
        The table.

    Raises:
        MaskDataError: a list names a block that there is not, or a full block of which a query does not see everything;
            on a GPU with a later call, and then nothing is seen.
    """
    is_partial, is_full = lists.grids(shape.num_q, shape.num_k)
    listed = is_partial | is_full
    checks = lists.index_checks(shape.num_q, shape.num_k)
    if intervals is not None and len(lists.kinds) > 1:
        first = shape.seqlen_k * torch.arange(shape.batch, device=listed.device)[:, None, None]
        edges = intervals.view(shape.batch, shape.seqlen_q, shape.intervals, 2) - first[..., None]
        lo, hi = edges.clamp(min=0).permute(3, 2, 0, 1).contiguous()
        shown = visible_blocks(RowIntervals(lo, hi, shape.seqlen_k), *shape[4:6])
        checks.append(lists.checks_of(*shown)[1])
    require(checks)
    if listed.device.type == "cuda":
        listed = listed & torch.stack([check.ok for check in checks]).all()

    def blocks(length: int, size: int) -> Tensor:
        number = torch.arange(length, dtype=torch.int32, device=listed.device) // size
        return number.expand(shape.batch, -1)

    of_queries = blocks(shape.seqlen_q, shape.block_rows)
    return BlockTable(listed, of_queries, blocks(shape.seqlen_k, shape.block_keys))


def _plan_of_table(
    table: BlockTable,
    lists: BlockLists | None,
    shape: ListShape,
    problem: AttnProblem,
    intervals: Tensor | None,
) -> Plan:
    listed, *blocks = table
    listed = listed.expand(shape.batch, shape.heads, -1, -1)
    if listed.stride()[2:] != (listed.shape[3], 1):
        listed = listed.contiguous()
    of_queries, of_keys = (x.to(torch.int32).contiguous() for x in blocks)
    beside = None
    if lists is not None:
        is_partial, is_full = lists.grids(shape.num_q, shape.num_k)
        checks = lists.index_checks(shape.num_q, shape.num_k)
        require(checks)
        holds = torch.stack([check.ok for check in checks]).all()
        says = (is_partial | is_full).to(torch.uint8) + 2 * is_full.to(torch.uint8)
        beside = (says * holds).contiguous().expand(shape.batch, shape.heads, -1, -1)
    strides = [(0, 0) if x is None else x.stride()[:2] for x in (listed, beside)]
    walks, tiles = walk_shapes(shape, problem), plan_tiles(problem)
    with on_device(listed.device):
        call = _call_of_table(
            *(tuple(strides), beside is not None, shape, walks, tiles),
            *(problem.block_map, listed.device),
        )
        given = [listed, of_queries, of_keys, beside, intervals]
        packed, tensor, *_ = call.run(given, listed.device)
    return unpack([packed, tensor])


@lru_cache(maxsize=1024)
def _call_of_table(
    strides: tuple[tuple[int, int], tuple[int, int]],
    has_lists: bool,
    shape: ListShape,
    walks: tuple[MapWalkShape, MapWalkShape],
    tiles: PlanTiles,
    block_map: BlockMap,
    device: torch.device,
) -> Call:
    """The call that makes the plan of a table with such strides of batch entries and heads, and of lists beside it."""
    listed, of_queries, of_keys, beside, intervals = range(5)
    packed, cells = 5, 9  # what `_made` makes, and one more
    offsets = layout_of(walks).offsets
    edges = [Pointer(packed, 4 * offsets[i]) for i in (2, 6)]
    of_walks = [
        {
            "blocks": Pointer(blocks),
            "places": Pointer(packed, words.offset + 4 * walk.first_table),
            "lines": Pointer(packed, words.offset + 4 * walk.first_line),
            "num_blocks": walk.num_blocks,
            "num_words": walk.words_of_line,
        }
        for walk, words, blocks in zip(walks, edges, (of_queries, of_keys), strict=True)
    ]
    table = {
        "listed": Pointer(listed),
        "beside": Pointer(beside) if has_lists else None,
        "cells": Pointer(cells),
        "listed_strides": strides[0],
        "beside_strides": strides[1],
        "walks": of_walks,
    }
    lists = [list_fields(None, 0, shape.batch)] * 2
    params = _params(lists, intervals, packed, shape, walks, device, table)
    of_table, of_cells, of_lines, of_tiles = (
        load_function(x, device.index) for x in block_map_variants(has_table=True)
    )
    entries = shape.heads * shape.batch
    chunks = [
        -(-walk.num_blocks // _LINES_AT_ONCE) * -(-walk.cols // _COLUMNS_AT_ONCE) for walk in walks
    ]
    num_cells = tuple(-(-size // CELL) for size in (shape.seqlen_q, shape.seqlen_k))
    num_words = entries * max(walk.num_tiles * walk.num_lines * walk.num_words for walk in walks)
    launches = (
        Launch(*(of_table, entries * sum(chunks), _THREADS_OF_TABLE, params), shared_bytes=0),
        Launch(*(of_cells, entries * num_cells[0], _THREADS_OF_CELLS, params), shared_bytes=0),
        Launch(
            *(of_lines, -(-num_words // _THREADS_OF_CELLS), _THREADS_OF_CELLS, params),
            shared_bytes=0,
        ),
        _launch_of_tiles(of_tiles, shape, walks, params),
    )
    made = _made(shape, walks, tiles, block_map)
    return Call((*made, Buffer.of((entries * num_cells[0] * num_cells[1],), torch.uint8)), launches)


@lru_cache(maxsize=1024)
def _call(
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    shape: ListShape,
    walks: tuple[MapWalkShape, MapWalkShape],
    tiles: PlanTiles,
    block_map: BlockMap,
    device: torch.device,
) -> Call:
    """The call that makes the plan, of lists with such sizes and strides."""
    given_intervals = len(layouts)
    packed = given_intervals + 1
    kinds = [layouts[i : i + 2] for i in range(0, given_intervals, 2)]
    lists = [list_fields(kind, 2 * i, shape.batch) for i, kind in enumerate(kinds)]
    lists += [list_fields(None, 0, shape.batch)] * (2 - len(kinds))
    params = _params(lists, given_intervals, packed, shape, walks, device)
    of_lists, of_tiles = (load_function(x, device.index) for x in block_map_variants())
    num_blocks = shape.heads * shape.batch * -(-shape.num_q // LISTS_AT_ONCE)
    launches = (
        Launch(
            *(of_lists, num_blocks, _THREADS_OF_LISTS, params),
            shared_bytes=4 * LISTS_AT_ONCE * words_of(shape.num_k),
        ),
        _launch_of_tiles(of_tiles, shape, walks, params),
    )
    return Call(_made(shape, walks, tiles, block_map), launches)


def _params(
    lists: list[dict[str, Any]],
    given_intervals: int,
    packed: int,
    shape: ListShape,
    walks: tuple[MapWalkShape, MapWalkShape],
    device: torch.device,
    table: dict[str, Any] | None = None,
) -> Any:
    """The parameters, where the plan is the buffer `packed`."""
    scratch, spans = packed + 2, packed + 3
    offsets = layout_of(walks).offsets
    fields = [
        _walk_fields(walk, [Pointer(packed, 4 * x) for x in offsets[first : first + 3]])
        for walk, first in zip(walks, (0, 4), strict=True)
    ]
    return BLOCK_MAP.pack(
        lists=lists,
        given_intervals=Pointer(given_intervals) if shape.intervals else None,
        intervals=Pointer(packed, 4 * (offsets[2] + walks[0].first_interval)),
        spans=Pointer(spans),
        num_intervals=shape.intervals,
        num_together=walks[0].num_together,
        seqlen_q=shape.seqlen_q,
        broken=Pointer(scratch),
        num_done=Pointer(scratch, 4),
        counts=Pointer(scratch, 8),
        flags=flag_addresses(device, [INDICES, COUNTS, FULL]),
        batch=shape.batch,
        heads=shape.heads,
        block_rows=shape.block_rows,
        block_keys=shape.block_keys,
        num_q=shape.num_q,
        num_k=shape.num_k,
        list_words=words_of(shape.num_k),
        walks=fields,
        table=table or _NO_TABLE,
    )


def _launch_of_tiles(
    function: Any, shape: ListShape, walks: tuple[MapWalkShape, MapWalkShape], params: Any
) -> Launch:
    most_tiles = shape.batch * max(walk.num_tiles for walk in walks)
    return Launch(
        *(function, 2 * shape.heads, _THREADS_OF_TILES, params), shared_bytes=4 * most_tiles
    )


def _made(
    shape: ListShape,
    walks: tuple[MapWalkShape, MapWalkShape],
    tiles: PlanTiles,
    block_map: BlockMap,
) -> tuple[Buffer, ...]:
    """The buffers of every call: the plan, the tensor that says what lies where, scratch, and spans."""
    layout = layout_of(walks)
    sizes = shape_of(tiles, layout, block_map)
    num_scratch = 2 + shape.batch * walks[1].num_tiles
    return (
        Buffer.of((layout.offsets[-1],), torch.int32),
        Buffer(sizes, strides_of(sizes), torch.int32),
        Buffer.of((num_scratch,), torch.int32, zeros=num_scratch),
        Buffer.of(
            (shape.batch * -(-shape.seqlen_q // ROWS_OF_SPAN) * shape.intervals, 4), torch.int32
        ),
    )


_NO_BLOCKS = {"blocks": None, "places": None, "lines": None, "num_blocks": 0, "num_words": 0}
_NO_TABLE = {
    **dict.fromkeys(("listed", "beside", "cells")),
    **dict.fromkeys(("listed_strides", "beside_strides"), (0, 0)),
    "walks": [_NO_BLOCKS, _NO_BLOCKS],
}


def _walk_fields(walk: MapWalkShape, places: list[Pointer]) -> dict[str, Any]:
    """Those of a MappedWalk whose tiles, runs and words are at `places`."""
    tiles, runs, words = places
    per_head = walk.lists.batch * walk.num_tiles
    return {
        "tiles": tiles,
        "runs": runs,
        "words": words,
        "asks": Pointer(words.buffer, words.offset + 4 * walk.first_ask)
        if walk.lists.may_ask
        else None,
        "tile_rows": walk.tile_rows,
        "block_cols": walk.block_cols,
        "num_lines": walk.num_lines,
        "num_tiles": walk.num_tiles,
        "num_words": walk.num_words,
        "total_rows": walk.rows,
        "total_cols": walk.cols,
        "is_sorted": int(not walk.is_by_keys and per_head <= MOST_SORTED),
    }
