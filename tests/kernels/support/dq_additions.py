"""A count, one by one, of the additions to dq in the backward's walk of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile.plan.tiles import RUN_FIELDS, TilePlan

GROUP_ROWS = 16
_COL_END, _FIRST = (RUN_FIELDS.index(name) for name in ("col_end", "first"))


def additions_of_tiles(plan: TilePlan, row_groups: int) -> Tensor:
    """How often each tile adds to each 16 query rows, int32 `[num_tiles, row_groups]`:
    once for each run with some of them."""
    additions = torch.zeros(len(plan.k_tiles), row_groups, dtype=torch.int32)
    for tile, (_, _, run_begin, run_end) in enumerate(plan.k_tiles.tolist()):
        for run in plan.k_runs[run_begin:run_end].tolist():
            additions[tile, run[_FIRST] // GROUP_ROWS : -(-run[_COL_END] // GROUP_ROWS)] += 1
    return additions
