"""TilePlan: how a kernel walks a mask, a tile of rows at a time, block by block of columns.

A tile is some rows, computed by one owner. A run is the part of one slice in a tile:

                 first
                   v
         . . . . . # # # # # # # # . .
    rows . . . . . . # # # # # # # # .
         . . . . . . . # # # # # # # #
                   [lead][   ][ trail]      blocks: the first and the last need the mask
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck, require
from magi_compile.masks.geometry import NO_DIAG, Rects
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan.bit_runs import BitRects, room_for_bits, split_bits
from magi_compile.plan.cost import blocks_of, document_costs, longest_first, run_costs, tile_costs
from magi_compile.plan.padding import MAX_OVERLAP, PaddedSizes, padded_sizes
from magi_compile.plan.rects import (
    MOST_STEPS,
    by_column,
    down_the_steps,
    joined,
    least_from_here,
)
from magi_compile.plan.stairs import find_stairs, has_stairs, neighbours, num_edge_rows

TILE_FIELDS = ("row_begin", "row_end", "run_begin", "run_end")
RUN_FIELDS = (*Rects._fields, "first", "num_blocks", "num_lead", "num_trail", "lane", "bits")


class Walk(NamedTuple):
    """One of the two walks of a `TilePlan`."""

    tiles: Tensor
    runs: Tensor
    edges: Tensor


class TilePlan(NamedTuple):
    """The walk of a mask by query tile (forward, dq) and by key tile (dk, dv), int32 tensors.

    In the q walk a "row" is a query and a "column" a key; in the k walk it is the other way round.

    `*_tiles [num_tiles, 4]` hold `TILE_FIELDS`. The tiles cover every row once, the most expensive
    first, in the k walk together with the others of its document; a tile without runs sees nothing.
    Tiles without rows are padding and come last.

    `*_runs [num_runs, 12]` hold `RUN_FIELDS`. Row r in `[row_begin, row_end)` sees the columns
    `max(col_begin, r + diag_lo) <= c < min(col_end, r + diag_hi)`, other rows see nothing of the
    run; a diagonal that cuts nothing is `-NO_DIAG` or `NO_DIAG`. The run is walked in
    `num_blocks` blocks of `block_cols` columns, the first of which starts at `first`. The first
    `num_lead` and the last `num_trail` blocks need the mask, the others are visible to all rows of
    the tile. Every block is seen by some row, and the runs of a tile do not overlap.

    A run that has `bits` is a part of a bit block: a row sees of it what `plan/bit_runs.py` says.

    `*_edges [num_rows, NUM_LANES, 2]`, or no rows where no run may have a `lane`: of a run with one, from 1 on, row r
    sees the columns `begin <= c < end` for `begin, end = edges[r, lane - 1]`, which never move left from row to row.
    """

    q_tiles: Tensor
    q_runs: Tensor
    q_edges: Tensor
    k_tiles: Tensor
    k_runs: Tensor
    k_edges: Tensor

    @property
    def q_walk(self) -> Walk:
        return Walk(self.q_tiles, self.q_runs, self.q_edges)

    @property
    def k_walk(self) -> Walk:
        return Walk(self.k_tiles, self.k_runs, self.k_edges)


def build_tile_plan(
    slices: AttnSlices,
    *,
    q_tile_rows: int,
    q_block_cols: int,
    k_tile_rows: int,
    k_block_cols: int,
    exact: bool | None = None,
    max_overlap: int = MAX_OVERLAP,
) -> TilePlan:
    """Plans the walk of `slices`, on their device.

    Args:
        slices: what may attend to what; empty slices are welcome.
        q_tile_rows: most queries in a tile of the q walk.
        q_block_cols: keys in a block of the q walk.
        k_tile_rows: most keys in a tile of the k walk.
        k_block_cols: queries in a block of the k walk.
        exact: True for tensors of exactly the needed size, which waits for the device; False for
            padded ones, whose sizes follow from shapes alone. By default True on a CPU.
        max_overlap: bounds the padded sizes: how many slices reach across a border between tiles,
            on average over the borders. More are welcome where slices are short: `PaddedSizes`.

    Returns:
        The plan. Its size is O(rows + pairs of a tile and a slice in it), never O(blocks).

    Raises:
        ValueError: where a size is not positive.
        MaskDataError: where more slices overlap than padded tensors can hold; on a GPU, later.
    """
    sizes = {
        "q_tile_rows": q_tile_rows,
        "q_block_cols": q_block_cols,
        "k_tile_rows": k_tile_rows,
        "k_block_cols": k_block_cols,
        "max_overlap": max_overlap,
    }
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"`{name}` must be positive, got {size}")
    if exact is None:
        exact = slices.q_ranges.device.type == "cpu"
    slices, bits = split_bits(slices)
    rects = joined(by_column(slices.untrimmed_rects().trimmed()))
    columns = down_the_steps(rects)
    num_rects = rects.row_begin.numel()
    # Rows that look up what they see meet stairs row by row, others column by column.
    edge_rows = num_edge_rows(num_rects, slices.seqlen_q, q_tile_rows)
    by_q_rects = (
        (columns, rects) if has_stairs(edge_rows) else (down_the_steps(rects, MOST_STEPS),) * 2
    )

    def padded(sizes: _WalkSizes) -> PaddedSizes | None:
        where = sizes.total_rows, sizes.tile_rows
        return None if exact else padded_sizes(num_rects, *where, max_overlap)

    by_q = _WalkSizes(slices.seqlen_q, edge_rows, q_tile_rows, q_block_cols)
    by_k = _WalkSizes(slices.seqlen_k, slices.seqlen_k, k_tile_rows, k_block_cols)
    q_walk = _walk(*by_q_rects, by_q, padded(by_q), bits, is_by_document=False)
    by_k_rects = rects.transposed(), columns.transposed()
    bits = None if bits is None else bits.transposed()
    k_walk = _walk(*by_k_rects, by_k, padded(by_k), bits, is_by_document=True)
    return TilePlan(*q_walk, *k_walk)


class _WalkSizes(NamedTuple):
    """`edge_rows`: how many rows have edges, all or none."""

    total_rows: int
    edge_rows: int
    tile_rows: int
    block_cols: int


def _walk(
    long_rects: Rects,
    short_rects: Rects,
    sizes: _WalkSizes,
    padded: PaddedSizes | None,
    bits: BitRects | None,
    *,
    is_by_document: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles, runs and edges of one walk; of exact size where `padded` is None.

    Of the same area twice: where stairs are rects that go on over many rows, it shows where tiles begin best, and where
    they are not, few of them meet a tile.
    """
    total_rows, edge_rows, tile_rows, block_cols = sizes
    exact = padded is None
    borders = long_rects if bits is None else long_rects.beside(bits.rects)
    tile_begin, tile_end = _cut_rows(borders, total_rows, tile_rows, block_cols, padded)
    num_tiles = tile_begin.numel()
    run_tile, runs, _ = _meet(short_rects, tile_begin, tile_end, padded)
    run_tile, runs = _merge(run_tile, runs, num_tiles, edge_rows, block_cols, exact=exact)
    run_tile, runs, common_begin, common_end, lane, edges = find_stairs(
        run_tile, runs, num_tiles, tile_rows, block_cols, edge_rows, exact=exact
    )
    of_bits = torch.zeros_like(lane)
    if bits is not None:
        if padded is not None:
            padded = padded._replace(num_runs=room_for_bits(len(bits.number), tile_rows))
        bit_tile, bit_runs, which = _meet(bits.rects, tile_begin, tile_end, padded)
        order = torch.cat([run_tile, bit_tile]).argsort(stable=True)
        nothing = torch.zeros_like(bit_tile)
        is_there = bit_tile < num_tiles
        code = torch.where(is_there, bits.bits_of(which, bit_runs), 0)
        run_tile, common_begin, common_end, lane, of_bits = (
            torch.cat(pair)[order]
            for pair in (
                (run_tile, bit_tile),
                (common_begin, bit_runs.col_begin),
                (common_end, bit_runs.col_begin),
                (lane, nothing),
                (of_bits, code),
            )
        )
        runs = runs.beside(bit_runs).select(order)

    # Padding has no blocks, and `num_tiles` as its tile, which keeps it out of every tile.
    is_padding = run_tile == num_tiles
    row_of = run_tile.clamp(max=max(num_tiles - 1, 0))
    covers_tile = torch.zeros_like(is_padding)
    if num_tiles > 0:
        covers_tile = (runs.row_begin == tile_begin[row_of]) & (runs.row_end == tile_end[row_of])
    num_blocks, num_lead, num_trail = _classify(
        runs, common_begin, common_end, covers_tile, block_cols
    )

    tile_ids = torch.arange(num_tiles, device=run_tile.device)
    run_begin = torch.searchsorted(run_tile, tile_ids)
    run_end = torch.searchsorted(run_tile, tile_ids, right=True)
    cost = tile_costs(
        run_costs(num_blocks, num_lead + num_trail), run_begin, run_end, tile_begin == tile_end
    )
    if is_by_document:
        col_ends = torch.cat([runs.col_end, run_end.new_full((1,), -1)])
        has_runs = run_begin < run_end
        cost = document_costs(cost, col_ends[torch.where(has_runs, run_begin, run_tile.numel())])
    tiles = torch.stack([tile_begin, tile_end, run_begin, run_end], dim=-1)[longest_first(cost)]
    walked = torch.stack(
        [*runs, runs.col_begin, num_blocks, num_lead, num_trail, lane, of_bits], dim=-1
    )
    return tiles.int(), walked.int(), edges


def _cut_rows(
    rects: Rects, total_rows: int, tile_rows: int, block_cols: int, padded: PaddedSizes | None
) -> tuple[Tensor, Tensor]:
    """Cuts `[0, total_rows)` into tiles, sorted by row: `(begin, end)`, each int64 `[num_tiles]`.

    The borders of the rects cut the rows into segments. A segment of at least one tile starts a
    region, which reaches to the next one; each region is tiled from its start. So long documents
    start a tile, and short ones share tiles. Where the rects that reach across its start have more
    columns than those that begin there, a segment starts none: one tile more would cost more than
    a tile of two documents does.
    """
    num_rects = rects.row_begin.numel()
    ends = rects.row_begin.new_zeros(2)
    ends[1:].fill_(total_rows)
    borders = torch.cat([rects.row_begin, rects.row_end, ends]).sort().values
    segment_begin, segment_end = borders[:-1], borders[1:]
    starts_region = segment_end - segment_begin >= tile_rows
    starts_region &= _blocks_begun(rects, segment_begin, tile_rows, block_cols) >= 0
    starts_region[:1].fill_(True)

    # The end of a region is the next start.
    next_start = least_from_here(torch.where(starts_region, segment_begin, total_rows))
    region_end = torch.cat([next_start[1:], ends[1:]])
    tiles_in_region = (region_end - segment_begin + tile_rows - 1) // tile_rows
    tiles_before_end = torch.where(starts_region, tiles_in_region, 0).cumsum(0)

    num_tiles = int(tiles_before_end[-1]) if padded is None else padded.num_tiles
    tile = torch.arange(num_tiles, device=borders.device)
    region = torch.searchsorted(tiles_before_end, tile, right=True).clamp(max=2 * num_rects)
    # Beyond the last tile the rows would start past the end: such tiles are empty.
    first_tile = tiles_before_end[region] - tiles_in_region[region]
    begin = segment_begin[region] + (tile - first_tile) * tile_rows
    is_padding = tile >= tiles_before_end[-1]
    begin = torch.where(is_padding, total_rows, begin)
    end = torch.where(is_padding, total_rows, torch.minimum(begin + tile_rows, region_end[region]))
    return begin, end


def _blocks_begun(rects: Rects, at: Tensor, tile_rows: int, block_cols: int) -> Tensor:
    """Blocks that a tile starting at `at` gains from rects starting there, minus those of rects crossing `at`."""
    in_first_tile = torch.minimum(rects.row_end, rects.row_begin + tile_rows) - 1 + rects.diag_hi
    begun = blocks_of(torch.minimum(rects.col_end, in_first_tile) - rects.col_begin, block_cols)
    in_band = rects.diag_hi - rects.diag_lo + tile_rows
    reached = blocks_of(torch.minimum(rects.col_end - rects.col_begin, in_band), block_cols)
    by_begin, by_end = rects.row_begin.sort(), rects.row_end.sort()

    def up_to(values: Tensor, order: torch.return_types.sort, right: bool) -> Tensor:
        """The sum of the values of rects that begin, or end, before each `at`; at it too, if `right`."""
        total = torch.cat([values.new_zeros(1), values[order.indices].cumsum(0)])
        return total[torch.searchsorted(order.values, at, right=right)]

    begun_there = up_to(begun, by_begin, right=True) - up_to(begun, by_begin, right=False)
    reach_across = up_to(reached, by_begin, right=False) - up_to(reached, by_end, right=True)
    return begun_there - reach_across


def _meet(
    rects: Rects, tile_begin: Tensor, tile_end: Tensor, padded: PaddedSizes | None
) -> tuple[Tensor, Rects, Tensor]:
    """All pairs of a tile and a rect with rows in common: the tile, the rect clipped to it, and which rect that is."""
    num_rects, num_tiles = rects.row_begin.numel(), tile_begin.numel()
    is_live = rects.has_area()
    first_tile = torch.searchsorted(tile_begin, rects.row_begin, right=True) - 1
    last_tile = torch.searchsorted(tile_begin, rects.row_end - 1, right=True) - 1
    num_touched = torch.where(is_live, last_tile - first_tile + 1, 0)
    pairs_before_end = num_touched.cumsum(0)

    num_pairs = int(pairs_before_end[-1]) if padded is None else padded.num_runs
    if padded is not None and num_tiles > 0:
        require([MaskCheck(pairs_before_end[-1] <= num_pairs, padded.message)])
    pair = torch.arange(num_pairs, device=tile_begin.device)
    rect = torch.searchsorted(pairs_before_end, pair, right=True).clamp(max=num_rects - 1)
    tile = first_tile[rect] + pair - (pairs_before_end - num_touched)[rect]
    is_padding = pair >= pairs_before_end[-1]
    tile = torch.where(is_padding, 0, tile)
    clipped = rects.select(rect).clipped(
        torch.where(is_padding, 0, tile_begin[tile]), torch.where(is_padding, 0, tile_end[tile])
    )
    return torch.where(is_padding, num_tiles, tile), clipped, rect


def _merge(
    run_tile: Tensor,
    runs: Rects,
    num_tiles: int,
    edge_rows: int,
    block_cols: int,
    *,
    exact: bool,
) -> tuple[Tensor, Rects]:
    """Sorts runs by tile, row and column, and joins neighbours whose union is one rect.

    Two runs of the same rows join where one ends in the column where the other begins and no
    diagonal cuts them there: the full and the causal slice of one document become one run.
    Unless both are steps of stairs. Padding has `num_tiles` as its tile.
    """
    # Tiles are ordered by row, so the first row of a run also orders its tile.
    num_cols = 1 << 31
    key = torch.where(
        run_tile == num_tiles, num_cols**2 - 1, runs.row_begin * num_cols + runs.col_begin
    )
    order = key.argsort(stable=True)
    run_tile, runs = run_tile[order], runs.select(order)

    joins = torch.zeros_like(run_tile, dtype=torch.bool)
    joins[1:] = (
        (run_tile[1:] == run_tile[:-1])
        & (runs.row_begin[1:] == runs.row_begin[:-1])
        & (runs.row_end[1:] == runs.row_end[:-1])
        & (runs.col_begin[1:] == runs.col_end[:-1])
        & (runs.diag_lo[1:] == -NO_DIAG)
        & (runs.diag_hi[:-1] == NO_DIAG)
        & (run_tile[1:] != num_tiles)
    )
    if has_stairs(edge_rows):
        index = torch.arange(run_tile.numel(), device=order.device)
        for neighbour in neighbours(run_tile, runs, run_tile < num_tiles, block_cols):
            is_on_stairs = neighbour != index
            joins[1:] &= ~(is_on_stairs[1:] & is_on_stairs[:-1])
    group_of = (~joins).cumsum(0) - 1
    num_pairs = run_tile.numel()
    group = torch.arange(
        int(group_of[-1]) + 1 if exact and num_pairs else num_pairs, device=order.device
    )
    head = torch.searchsorted(group_of, group).clamp(max=max(num_pairs - 1, 0))
    tail = torch.searchsorted(group_of, group, right=True) - 1
    merged = runs.select(head)._replace(col_end=runs.col_end[tail], diag_hi=runs.diag_hi[tail])
    # What merging has freed at the end is padding.
    is_freed = group > group_of[-1:]
    run_tile = torch.where(is_freed, num_tiles, run_tile[head])
    return run_tile, Rects(*(torch.where(is_freed, 0, field) for field in merged))


def _classify(
    runs: Rects, common_begin: Tensor, common_end: Tensor, covers_tile: Tensor, block_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The number of blocks of each run, and of those at its begin and its end that need the mask.

    All rows of a run see the columns between the left edge of its last row and the right edge of
    its first. The blocks inside need no mask, if no row of the tile lies outside the run.
    """
    num_blocks = blocks_of(runs.col_end - runs.col_begin, block_cols)
    left = common_begin - runs.col_begin
    right = torch.where(covers_tile, common_end - runs.col_begin, 0)
    num_trail = num_blocks - right // block_cols
    num_lead = torch.minimum((left + block_cols - 1) // block_cols, num_blocks - num_trail)
    return num_blocks, num_lead, num_trail
