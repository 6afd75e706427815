"""The plan of block lists by `csrc/sm90/planner/block_map.cu`: what `magi_compile.plan.block_map` says, in two launches
that nothing waits for."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from magi_compile._checks import flag_addresses, raise_pending
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
from magi_compile.masks.evaluation.block_lists import IS_FULL, BlockLists, broadcast
from magi_compile.plan.block_map import (
    MOST_SORTED,
    ROWS_OF_SPAN,
    ListShape,
    MapWalkShape,
    walk_of_lists,
)

_THREADS_OF_LISTS, _THREADS_OF_TILES = 1024, 512

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
def block_map_variants() -> tuple[Variant, Variant]:
    """The kernels to compile: of lists, and of tiles."""
    return (
        Variant("planner/block_map.cu", "ffa_block_map", ()),
        Variant("planner/block_map.cu", "ffa_block_map_tiles", ()),
    )


def plan_of_lists(
    lists: BlockLists, shape: ListShape, problem: AttnProblem, intervals: Tensor | None = None
) -> Plan:
    """The plan of `lists`: on their GPU, on torch's current stream, without a wait; elsewhere by operations of torch.

    Args:
        lists: ints, as in a BlockMask, of 1 or `shape.batch` batch entries and 1 or `shape.heads` heads.
        shape: nothing is in `map_refusals` of it.
        problem: has the `block_map_of` the shape.
        intervals: int32 `[batch * seqlen_q, shape.intervals, 2]`, contiguous: begin and end of the columns of all
            entries that each query sees besides; None where the lists say all.

    Returns:
        The plan, packed.

    Raises:
        MaskDataError: a list names a block that there is not, or a full block of which a query does not see everything;
            on a GPU with a later call.
        NotImplementedError: there is no room for so many blocks.
        ValueError: there are too few lists, or of other batch entries or heads.
    """
    if refusals := map_refusals(shape):
        raise NotImplementedError(f"the plan of block lists {refusals[0]}")
    device = lists.kv_indices.device
    lists.check_lengths(shape.num_q)
    for kind in lists.kinds:
        check_lists(kind, shape.batch, device)
    lists.check_heads(shape.heads)
    walks, tiles = walk_shapes(shape, problem), plan_tiles(problem)
    if not _is_on_gpu(lists):
        is_partial, is_full = lists.grids(shape.num_q, shape.num_k)
        listed = (is_partial | is_full).expand(shape.batch, shape.heads, -1, -1)
        q_walk, k_walk = (walk_of_lists(listed, walk, intervals) for walk in walks)
        return Plan(tiles, q_walk, k_walk, q_walk.tiles.new_zeros(0), block_map=problem.block_map)
    raise_pending()
    kinds = [[x.int() for x in broadcast(kind, shape.num_q)] for kind in lists.kinds]
    layouts = tuple((x.shape, x.stride()) for kind in kinds for x in kind)
    with on_device(device):
        call = _call(layouts, shape, walks, tiles, problem.block_map, device)
        given = [x for kind in kinds for x in kind]
        packed, tensor, *_ = call.run([*given, intervals], device)
    return unpack([packed, tensor])


def _is_on_gpu(lists: BlockLists) -> bool:
    return lists.kv_indices.device.type == "cuda"


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
    packed, scratch, spans = (given_intervals + i for i in (1, 3, 4))
    layout = layout_of(walks)
    offsets = layout.offsets
    fields = [
        _walk_fields(walk, [Pointer(packed, 4 * x) for x in offsets[first : first + 3]])
        for walk, first in zip(walks, (0, 4), strict=True)
    ]
    kinds = [layouts[i : i + 2] for i in range(0, given_intervals, 2)]
    lists = [list_fields(kind, 2 * i, shape.batch) for i, kind in enumerate(kinds)]
    lists += [list_fields(None, 0, shape.batch)] * (2 - len(kinds))
    list_words = words_of(shape.num_k)
    params = BLOCK_MAP.pack(
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
        list_words=list_words,
        walks=fields,
    )
    of_lists, of_tiles = (load_function(x, device.index) for x in block_map_variants())
    num_blocks = shape.heads * shape.batch * -(-shape.num_q // LISTS_AT_ONCE)
    most_tiles = shape.batch * max(walk.num_tiles for walk in walks)
    launches = (
        Launch(
            *(of_lists, num_blocks, _THREADS_OF_LISTS, params),
            shared_bytes=4 * LISTS_AT_ONCE * list_words,
        ),
        Launch(
            *(of_tiles, 2 * shape.heads, _THREADS_OF_TILES, params), shared_bytes=4 * most_tiles
        ),
    )
    sizes = shape_of(tiles, layout, block_map)
    num_scratch = 2 + shape.batch * walks[1].num_tiles
    made = (
        Buffer.of((offsets[-1],), torch.int32),
        Buffer(sizes, strides_of(sizes), torch.int32),
        Buffer.of((num_scratch,), torch.int32, zeros=num_scratch),
        Buffer.of(
            (shape.batch * -(-shape.seqlen_q // ROWS_OF_SPAN) * shape.intervals, 4), torch.int32
        ),
    )
    return Call(made, launches)


def _walk_fields(walk: MapWalkShape, places: list[Pointer]) -> dict[str, Any]:
    """Those of a MappedWalk whose tiles, runs and words are at `places`."""
    tiles, runs, words = places
    per_head = walk.lists.batch * walk.num_tiles
    return {
        "tiles": tiles,
        "runs": runs,
        "words": words,
        "asks": Pointer(words.buffer, words.offset + 4 * walk.first_ask)
        if walk.lists.intervals
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
