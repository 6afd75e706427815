"""magi::mask_intervals: a mask program and the tensors that it captures -> the key intervals of each query, for block
lists to be cut by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from magi_compile._checks import require
from magi_compile.masks.evaluation.row_intervals import RowIntervals, row_intervals
from magi_compile.masks.evaluation.verify import check_intervals, is_verified, remember
from magi_compile.ops.define import define
from magi_compile.ops.masks.mask_call import ARGUMENTS, MaskCall

_lib = torch.library.Library("magi", "FRAGMENT")


def packed_intervals(intervals: RowIntervals, count: int) -> Tensor:
    """The intervals of the packed rows of all batch entries, as columns of all entries, of a mask that is the same for
    all heads: int32 `[batch * seqlen_q, count, 2]`, begin and end; empty ones are `[0, 0)`. `count` is at least as many
    as there are."""
    assert len(intervals.lo) <= count
    first = torch.arange(intervals.lo.shape[1], device=intervals.lo.device) * intervals.seqlen_k
    edges = torch.stack([intervals.lo, intervals.hi], -1) + first[:, None, None]
    edges = edges.masked_fill((intervals.lo >= intervals.hi)[..., None], 0)
    edges = pad(edges, (0, 0) * 3 + (0, count - len(edges)))
    return edges.movedim(0, 2).flatten(0, 1).to(torch.int32).contiguous()


def _mask_intervals(*arguments: Any) -> Tensor:
    call = MaskCall.of(*arguments)
    intervals = row_intervals(
        call.mask, call.tables, call.symbols, **call.lengths, device=call.device
    )
    checks = list(intervals.checks)
    if call.verify or not is_verified(call.program):
        checks += check_intervals(call.mask, call.tables, call.symbols, intervals)
    require(checks)
    remember(call.program)
    edges = packed_intervals(intervals, call.capacity)
    if checks and edges.device.type == "cuda":  # raises later there: until then nothing is seen
        edges = edges * torch.stack([check.ok for check in checks]).all()
    return edges


def _mask_intervals_fake(*arguments: Any) -> Tensor:
    call = MaskCall(*arguments)
    shape = call.batch * call.seqlen_q, call.capacity, 2
    return torch.empty(shape, dtype=torch.int32, device=call.device)


# A mask without captured tensors is a call without any tensor.
define(_lib, f"mask_intervals({ARGUMENTS}) -> Tensor", _mask_intervals, _mask_intervals_fake)
