"""The order in which tiles of the k walk of a plan add to dq, where there is one."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile.kernels.sm90.backward.workspace import DQ_GROUP_ROWS
from magi_compile.plan.tiles import RUN_FIELDS

_RUN_COL_END, _RUN_FIRST = (RUN_FIELDS.index(name) for name in ("col_end", "first"))


def turns_of_tiles(k_tiles: Tensor, k_runs: Tensor, row_groups: int) -> Tensor:
    """The number of additions to each 16 query rows from the tiles before, int32 `[num_tiles, row_groups]`.

    A run adds once to every 16 rows between its first and its last column. Runs of no tile hold anything.
    """
    num_tiles = k_tiles.shape[0]
    run = torch.arange(k_runs.shape[0], device=k_runs.device)
    tile = _tile_of_run(k_tiles, run)
    is_walked = (k_tiles[tile, 2] <= run) & (run < k_tiles[tile, 3])
    first = torch.where(is_walked, k_runs[:, _RUN_FIRST], 0) // DQ_GROUP_ROWS
    last = torch.where(is_walked, k_runs[:, _RUN_COL_END] - 1, -1) // DQ_GROUP_ROWS
    steps = torch.zeros(num_tiles * (row_groups + 1), dtype=torch.int32, device=k_runs.device)
    one = is_walked.int()
    steps.index_add_(0, tile * (row_groups + 1) + first, one)
    steps.index_add_(0, tile * (row_groups + 1) + last + 1, -one)
    additions = steps.view(num_tiles, row_groups + 1)[:, :row_groups].cumsum(1, dtype=torch.int32)
    return additions.cumsum(0, dtype=torch.int32) - additions


def _tile_of_run(k_tiles: Tensor, run: Tensor) -> Tensor:
    """The tile whose runs hold `run`; anything for padding. Tiles come in the order of their cost."""
    run_begin, run_end = k_tiles[:, 2].long(), k_tiles[:, 3].long()
    run_end = torch.where(run_begin < run_end, run_end, run.shape[0] + 1)
    run_end, order = run_end.sort()
    at = torch.searchsorted(run_end, run, right=True)
    return order[at.clamp(max=k_tiles.shape[0] - 1)]
