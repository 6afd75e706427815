"""Stairs: runs below one another in a tile that are walked as one, whose rows look up what they see.

# # # . . . . .        Three runs, of which each begins where the one above it ends, sees nothing
# # # . . . . .        further left or further less right, and leaves no gap: blocks of columns
. # # # # . . .        that several of them see are then walked once.
. . . # # # # #
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.geometry import NO_DIAG, Rects
from magi_compile.plan.cost import blocks_of

NUM_LANES = 4  # how many stairs a tile may have

_NUM_COLS = 1 << 31


def num_edge_rows(num_slices: int, total_rows: int, tile_rows: int) -> int:
    """The number of rows for which a q walk has edges, an int or a SymInt: of all where there are more slices than
    tiles, or of none.

    Looking up costs a forward kernel 1 to 3 % of the time of every mask, which only many small slices pay back.
    """
    return total_rows * torch.sym_min(1, num_slices // (total_rows // tile_rows + 1))


def has_stairs(edge_rows: int) -> bool:
    """True if a walk whose rows have edges, or none, may have stairs; of a SymInt, of which shapes alone depend,
    yes."""
    return not isinstance(edge_rows, int) or edge_rows > 0


class Stairs(NamedTuple):
    """Runs `[num_runs]` of tiles, some of which are stairs.

    Attributes:
        run_tile: the tile of each run; for padding the number of tiles.
        runs: what is walked; stairs as the rectangle around them.
        common_begin: the columns `[common_begin, common_end)` are seen by all rows of a run.
        common_end: see `common_begin`.
        lane: where the rows of stairs look, from 1 to `NUM_LANES`; 0 for other runs.
        edges: int32 `[edge_rows, NUM_LANES, 2]`: the columns `[begin, end)` that a row of stairs sees; `[0, 0)` for
            others.
    """

    run_tile: Tensor
    runs: Rects
    common_begin: Tensor
    common_end: Tensor
    lane: Tensor
    edges: Tensor


def find_stairs(
    run_tile: Tensor,
    runs: Rects,
    num_tiles: int,
    tile_rows: int,
    block_cols: int,
    edge_rows: int,
    *,
    exact: bool,
) -> Stairs:
    """Joins runs of a tile that are stairs, in the first `NUM_LANES` of a tile.

    The runs are trimmed, sorted by tile, row and column, padding behind; those of a tile do not overlap. `run_tile` is
    the tile of each, `num_tiles` for padding. All rows have edges, or none, and then there are no stairs: `edge_rows`.
    Where `exact`, the result has no padding; else it is as long as `runs`.
    """
    common_begin, common_end = runs.common_begin(), runs.common_end()
    if not has_stairs(edge_rows):
        lane = torch.zeros_like(run_tile)
        edges = _edges(runs, lane, edge_rows, exact=exact)
        return Stairs(run_tile, runs, common_begin, common_end, lane, edges)
    index = torch.arange(run_tile.numel(), device=run_tile.device)
    is_live = run_tile < num_tiles
    above, below = neighbours(run_tile, runs, is_live, block_cols)
    first, last = above, below
    for _ in range(max(tile_rows - 1, 1).bit_length()):
        first, last = first[first], last[last]

    starts_stairs = is_live & (above == index) & (below != index)
    num_before = starts_stairs.cumsum(0) - starts_stairs.long()
    number = num_before - num_before[torch.searchsorted(run_tile, run_tile)]
    lane = torch.where(starts_stairs & (number < NUM_LANES), number + 1, 0)
    edges = _edges(runs, lane[first], edge_rows, exact=exact)

    # Steps are gone; what is left moves up.
    is_kept = is_live & ((above == index) | (lane[first] == 0))
    if exact:
        kept = is_kept.nonzero().flatten()
        is_padding = torch.zeros_like(kept, dtype=torch.bool)
    else:
        kept = (~is_kept).long().argsort(stable=True)
        is_padding = index >= is_kept.sum()
    lane = lane[kept]
    last = torch.where(lane > 0, last[kept], kept)
    runs, ends = runs.select(kept), runs.select(last)
    walked = Rects(
        row_begin=runs.row_begin,
        row_end=ends.row_end,
        col_begin=runs.col_begin,
        col_end=ends.col_end,
        diag_lo=torch.where(lane > 0, -NO_DIAG, runs.diag_lo),
        diag_hi=torch.where(lane > 0, NO_DIAG, runs.diag_hi),
    )
    begin, end, lane, *fields = (
        torch.where(is_padding, 0, field)
        for field in (common_begin[last], common_end[kept], lane, *walked)
    )
    run_tile = torch.where(is_padding, num_tiles, run_tile[kept])
    return Stairs(run_tile, Rects(*fields), begin, end, lane, edges)


def neighbours(
    run_tile: Tensor, runs: Rects, is_live: Tensor, block_cols: int
) -> tuple[Tensor, Tensor]:
    """The step above each run and the one below it; itself where there is none, or no block would be saved."""
    index = torch.arange(run_tile.numel(), device=run_tile.device)
    common_begin, common_end = runs.common_begin(), runs.common_end()
    if not run_tile.numel():
        return index, index
    # Of the runs that begin in the next row, the first one that sees nothing further left.
    nowhere = _NUM_COLS**2 - 1
    place = torch.where(is_live, runs.row_begin * _NUM_COLS + runs.col_begin, nowhere)
    wanted = torch.where(is_live, runs.row_end * _NUM_COLS + common_begin, nowhere)
    found = torch.searchsorted(place, wanted).clamp(max=run_tile.numel() - 1)
    num_blocks = blocks_of(runs.col_end - runs.col_begin, block_cols)
    together = blocks_of(runs.col_end[found] - runs.col_begin, block_cols)
    fits = (
        is_live
        & (run_tile[found] == run_tile)
        & (runs.row_begin[found] == runs.row_end)
        & (common_begin <= runs.col_begin[found])
        & (runs.col_begin[found] <= runs.col_end)
        & (runs.col_end <= common_end[found])
        & (together < num_blocks + num_blocks[found])
    )
    # Where two find the same, the later one has it.
    above = index.new_full((run_tile.numel() + 1,), -1)
    above = above.scatter_reduce(0, torch.where(fits, found, run_tile.numel()), index, "amax")[:-1]
    below = torch.where(fits & (above[found] == index), found, index)
    return torch.where(above < 0, index, above), below


def _edges(runs: Rects, lane: Tensor, total_rows: int, *, exact: bool) -> Tensor:
    """`Stairs.edges`, for runs on the stairs of a `lane` from 1 on. Runs that begin further down come later."""
    if lane.numel() == 0 or (exact and not bool(lane.any())):
        return torch.zeros(total_rows, NUM_LANES, 2, dtype=torch.int32, device=lane.device)
    order = lane.argsort(stable=True)
    place = (lane * total_rows + runs.row_begin)[order]
    row = torch.arange(total_rows, device=lane.device)[:, None]
    lanes = torch.arange(1, NUM_LANES + 1, device=lane.device)
    run_at = torch.searchsorted(place, lanes * total_rows + row, right=True) - 1
    run_at = order[run_at.clamp(min=0)]
    run = runs.select(run_at)
    sees = (lane[run_at] == lanes) & (row >= run.row_begin) & (row < run.row_end)
    return torch.stack([torch.where(sees, x, 0) for x in run.at(row)], dim=-1).int()
