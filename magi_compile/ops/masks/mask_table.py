"""magi::mask_table: a mask program that looks up blocks of queries and keys, and the tensors that it captures -> its
block table, and the key intervals of each query beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magi_compile._checks import require
from magi_compile.masks.evaluation.block_table import block_table, shape_of_table
from magi_compile.masks.evaluation.row_intervals import row_intervals
from magi_compile.masks.evaluation.sizes import ONE_MASK
from magi_compile.masks.evaluation.verify import check_table, is_verified, remember
from magi_compile.ops.define import define
from magi_compile.ops.masks.mask_call import ARGUMENTS, MaskCall
from magi_compile.ops.masks.mask_intervals import packed_intervals

_lib = torch.library.Library("magi", "FRAGMENT")

Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def _mask_table(*arguments: Any) -> Parts:
    call = MaskCall.of(*arguments)
    mask, sizes, device = call.mask, call.sizes, call.device
    found = mask.block_look_up
    assert found is not None
    table, checks = block_table(mask, call.tables, call.symbols, sizes, device)
    intervals, edges = None, _no_intervals(call)
    if call.capacity:
        of_one = sizes._replace(heads=ONE_MASK)._asdict()
        intervals = row_intervals(found.beside, call.tables, call.symbols, **of_one, device=device)
        checks += intervals.checks
        edges = packed_intervals(intervals, call.capacity)
    require(checks)
    known_as = f"table of {call.program}"
    if call.verify or not is_verified(known_as):
        second = check_table(mask, call.tables, call.symbols, table, intervals, sizes)
        require(second)
        checks = [*checks, *second]
    remember(known_as)
    listed = table.listed
    if checks and device.type == "cuda":  # raises later there: until then nothing is seen
        listed = listed & torch.stack([check.ok for check in checks]).all()
    # An op returns no view of what it is given.
    return listed.clone(memory_format=torch.contiguous_format), *table[1:], edges


def _no_intervals(call: MaskCall) -> Tensor:
    shape = call.batch * call.seqlen_q if call.capacity else 0, call.capacity, 2
    return torch.empty(shape, dtype=torch.int32, device=call.device)


def _mask_table_fake(*arguments: Any) -> Parts:
    call = MaskCall(*arguments)
    found = call.mask.block_look_up
    assert found is not None
    captured = call.tables[found.look_up.args[0]].shape
    shape = shape_of_table(found, captured, call.sizes)
    listed = torch.empty(shape, dtype=torch.bool, device=call.device)
    of_queries, of_keys = (
        torch.empty(call.batch, length, dtype=torch.int32, device=call.device)
        for length in (call.seqlen_q, call.seqlen_k)
    )
    return listed, of_queries, of_keys, _no_intervals(call)


define(
    _lib,
    f"mask_table({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _mask_table,
    _mask_table_fake,
)
