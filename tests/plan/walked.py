"""What rows see of the runs of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magi_compile.plan.tiles import RUN_FIELDS


def seen(run: Sequence[int], rows: Tensor, num_cols: int, edges: Tensor) -> Tensor:
    """Which columns each of `rows [num_rows]` sees of a run: bool `[num_rows, num_cols]`."""
    fields = dict(zip(RUN_FIELDS, run, strict=True))
    rows, cols = rows[:, None], torch.arange(num_cols)
    in_run = (rows >= fields["row_begin"]) & (rows < fields["row_end"])
    if fields["lane"] > 0:
        begin, end = edges[rows, fields["lane"] - 1].unbind(-1)
        visible = edges[fields["row_begin"] : fields["row_end"], fields["lane"] - 1]
        assert (visible.diff(dim=0) >= 0).all(), "a row that sees more to the left"
    else:
        begin = torch.clamp(rows + fields["diag_lo"], min=fields["col_begin"])
        end = torch.clamp(rows + fields["diag_hi"], max=fields["col_end"])
    return in_run & (cols >= begin) & (cols < end)
