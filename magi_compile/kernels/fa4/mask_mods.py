"""mask_mods in CuTe that look up what flash-attn-4 may show: intervals of keys by query, and of queries by key.

One aux tensor holds the bounds (`intervals.py`). flash-attn-4 compiles once for each mask_mod, so there is one object
for each number of intervals, made once a process. Needs flash-attn-4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@cache
def unrolled(most: int, *, by_key: bool) -> Callable[..., Any]:
    """The mask_mod of `unrolled_bounds` with `most` intervals a row: a row is a query, or a key if `by_key`."""

    @cute.jit
    def is_visible(batch, head, q, kv, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        bounds = aux_tensors[0]
        row, col = (kv, q) if cutlass.const_expr(by_key) else (q, kv)
        first = row[0] * cutlass.Int32(2 * most)
        begin = utils.scalar_to_ssa(bounds[first], cutlass.Int32)
        end = utils.scalar_to_ssa(bounds[first + 1], cutlass.Int32)
        seen = (col >= begin) & (col < end)
        for i in cutlass.range_constexpr(1, most):
            begin = utils.scalar_to_ssa(bounds[first + 2 * i], cutlass.Int32)
            end = utils.scalar_to_ssa(bounds[first + 2 * i + 1], cutlass.Int32)
            seen = seen | ((col >= begin) & (col < end))
        return seen

    return is_visible


@cache
def unrolled_of_32_keys(most: int) -> Callable[..., Any]:
    """The same of 32 neighbouring keys of a query at a time, as bits of a number."""

    @cute.jit
    def are_visible(batch, head, q, kv, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        bounds = aux_tensors[0]
        first = q[0] * cutlass.Int32(2 * most)
        ones = cutlass.Uint32(0xFFFFFFFF)
        seen = cutlass.Uint32(0)
        for i in cutlass.range_constexpr(most):
            hidden_before = max(bounds[first + 2 * i] - kv[0], cutlass.Int32(0))
            hidden_behind = max(
                cutlass.Int32(32) - (bounds[first + 2 * i + 1] - kv[0]), cutlass.Int32(0)
            )
            from_begin = utils.shl_u32(ones, cutlass.Uint32(hidden_before))
            to_end = utils.shr_u32(ones, cutlass.Uint32(hidden_behind))
            seen = seen | (from_begin & to_end)
        result = cute.make_rmem_tensor(1, dtype=cutlass.Uint32)
        result[0] = seen
        return result.load()

    are_visible.__vec_size__ = 32
    return are_visible


@cache
def searched(num_steps: int, *, by_key: bool) -> Callable[..., Any]:
    """The mask_mod of `searched_bounds` where rows have fewer than `2 ** num_steps` bounds: a column is visible where
    an odd number of bounds of its row are not beyond it."""

    @cute.jit
    def is_visible(batch, head, q, kv, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        bounds = aux_tensors[0]
        row, col = (kv, q) if cutlass.const_expr(by_key) else (q, kv)
        first, last = bounds[row[0]], bounds[row[0] + 1]
        place = first
        for i in cutlass.range_constexpr(num_steps):
            reached = place + cutlass.Int32(1 << (num_steps - 1 - i))
            bound = bounds[min(reached, last) - 1]
            place = reached if (reached <= last) & (bound <= col[0]) else place
        return utils.scalar_to_ssa(((place - first) & 1) == 1, cutlass.Boolean)

    return is_visible
