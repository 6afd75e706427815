"""A forward pass that begins before some of its keys are there: two launches side by side that share the tiles of one plan.

    in front of the arrival    tiles that see near keys alone, then, of others, the near part, which leaves in fp32;
                               once the other launch runs, what that one takes
    behind the arrival         tiles that see far keys, merged with their near part if there is one; then what is left

Near keys are there from the start, far keys are not. Nothing waits inside a kernel for them, so that thread blocks never hold
SMs that the far keys need to get here: a block that finds nothing to do ends, and one of the other launch takes its place.
The first launch leaves at least one SM to the other, which by beginning says that far keys are there. How long they take
need not be known; a tile that is cut in two costs another pass over its rows, and no more are than it takes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.cuda.forward import FarKeys, Results, Walk, enqueue
from magi_compile.kernels.cuda.launch import check_far_keys, num_sms, on_device, tma_compatible
from magi_compile.kernels.heuristics import (
    PlanTiles,
    heads_per_section,
    plan_tiles,
    tiles_in_sections,
)
from magi_compile.kernels.plan_sizes import check_sizes
from magi_compile.plan.cost import longest_first, run_costs, sums
from magi_compile.plan.tiles import RUN_FIELDS

#: In place of the number of a part, as in csrc/sm90/plan.cuh.
NO_PART = -1
#: Of how many tiles one at most is cut in two: bounds the memory of their parts.
TILES_OF_A_PART = 2

# What EarlyForwardParams has beside ForwardParams.
_SCHEDULE, _EARLY = struct.Struct("<2Q4i"), struct.Struct("<3Q2i")
# In words, the counters of a call: a ticket of each list, then how many parts were begun, then how many warps have stored each.
_NUM_BEGUN, _NUM_STORED = 3, 4
_NO_BLOCK = 2**31 - 1  # begins behind the arrival

_COL_BEGIN, _NUM_BLOCKS, _NUM_LEAD, _NUM_TRAIL = (
    RUN_FIELDS.index(name) for name in ("col_begin", "num_blocks", "num_lead", "num_trail")
)


class SplitPlan(NamedTuple):
    """The q walk of a plan, by what it needs of far keys. Lists are longest first, with padding behind."""

    far_tiles: Tensor  # int32 [num_tiles, 4]: those that see far keys
    far_parts: Tensor  # int32 [num_tiles, 2], of these: the first far run, and which part the near runs are, or NO_PART
    near_tiles: Tensor  # int32 [num_tiles, 4]: those that do not
    part_tiles: Tensor  # int32 [num_parts, 4]: near runs of tiles that see both
    runs: Tensor  # int32 [num_runs, 12], the near ones of each tile first
    edges: Tensor  # int32 [total_q, NUM_LANES, 2]
    far_begin: int
    sizes: PlanTiles  # that it was made for

    @property
    def num_part_rows(self) -> int:
        return self.part_tiles.shape[0] * self.sizes.q_tile_rows


def split_plan(
    q_tiles: Tensor, q_runs: Tensor, q_edges: Tensor, sizes: PlanTiles, far_begin: int
) -> SplitPlan:
    """Cuts the q walk of a plan; on a GPU nothing waits for the device.

    Args:
        q_tiles: int32 `[num_tiles, 4]`, of a plan with at least one tile.
        q_runs: int32 `[num_runs, 12]`; no run has both near and far columns.
        q_edges: int32 `[total_q, NUM_LANES, 2]`.
        sizes: the tile sizes of the plan.
        far_begin: the first far column.
    """
    num_tiles, num_runs = q_tiles.shape[0], q_runs.shape[0]
    row_begin, row_end, run_begin, run_end = q_tiles.long().unbind(1)
    is_padding = row_begin == row_end
    run_begin, run_end = (torch.where(is_padding, 0, x) for x in (run_begin, run_end))

    # The near runs of each tile first. Runs behind the last tile's are padding, and stay there.
    index = torch.arange(num_runs, device=q_runs.device)
    is_first = torch.zeros(num_runs + 1, dtype=torch.int64, device=q_runs.device)
    is_first.index_add_(0, run_begin, (run_end > run_begin).long())
    is_far = q_runs[:, _COL_BEGIN] >= far_begin
    key = 2 * is_first.cumsum(0)[:num_runs] + is_far
    order = torch.where(index < run_end.amax(), key, 2 * num_runs + 2).argsort(stable=True)
    runs = q_runs[order]
    run_mid = run_begin + sums(~is_far[order], run_begin, run_end)
    cost = run_costs(
        runs[:, _NUM_BLOCKS].long(), runs[:, _NUM_LEAD].long() + runs[:, _NUM_TRAIL].long()
    )
    near, far = sums(cost, run_begin, run_mid), sums(cost, run_mid, run_end)

    def listed(is_in: Tensor, begin: Tensor, end: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
        columns = (torch.where(is_in, row_begin, row_end), row_end, begin, end)
        order = longest_first(torch.where(is_in, cost + 1, 0))
        return torch.stack(columns, 1)[order].int(), order

    sees_far = run_end > run_mid
    is_cut = sees_far & (run_mid > run_begin)
    part_tiles, part_order = listed(is_cut, run_begin, run_mid, near)
    num_parts = num_tiles // TILES_OF_A_PART + 1
    part = torch.empty_like(part_order)
    part[part_order] = torch.arange(num_tiles, device=part.device)
    part = torch.where(is_cut & (part < num_parts), part, NO_PART)
    far_tiles, far_order = listed(sees_far, run_begin, run_end, near + far)
    near_tiles, _ = listed(~is_padding & ~sees_far, run_begin, run_mid, near)
    return SplitPlan(
        far_tiles,
        torch.stack([run_mid, part], 1)[far_order].int(),
        near_tiles,
        part_tiles[:num_parts].contiguous(),
        runs,
        q_edges,
        far_begin,
        sizes,
    )


def forward_early(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: Sequence[Tensor],
    arrive: Callable[[], object],
    plan: SplitPlan,
    problem: AttnProblem,
    *,
    free_sms: int = 0,
    deterministic: bool = False,
) -> ForwardOutput:
    """Attention of `q` over near and far keys, on torch's current stream and on another that it then waits for.

    Args:
        q: `[total_q, nheads_q, head_dim]`, not empty.
        k: near keys `[total_near, nheads_kv, head_dim]`, not empty.
        v: their values.
        far: far keys and values; not empty.
        arrive: makes torch's current stream wait until they are there.
        plan: of the mask over near and far keys.
        problem: what `CudaKernel.refusals` finds nothing against.
        free_sms: that are left to what brings far keys; one at least computes.
        deterministic: no tile is cut in two, so that the result does not depend on when far keys come, bit by bit.

    Raises:
        ValueError: if TMA can not read `far` as it lies, or if `plan` is for other tiles than those of `problem`.
    """
    check_far_keys(*far)
    check_sizes(plan.sizes, plan_tiles(problem))
    if deterministic:
        plan = plan._replace(part_tiles=plan.part_tiles[:0])
    with on_device(q.device):
        # Once for both launches.
        q, k, v = (tma_compatible(x) for x in (q, k, v))
        total_q, nheads_q, head_dim = q.shape
        num_parts, part_rows = plan.part_tiles.shape[0], plan.num_part_rows
        out = q.new_empty((total_q, nheads_q, head_dim))
        part_out = q.new_empty((part_rows, nheads_q, head_dim), dtype=torch.float32)
        lse, part_lse = (
            q.new_empty((nheads_q, rows), dtype=torch.float32) for rows in (total_q, part_rows)
        )
        results = Results(out, lse, part_out, part_lse, part_out, part_lse)
        counters = q.new_zeros(_NUM_STORED + num_parts * nheads_q, dtype=torch.int32)
        words, sms = counters.data_ptr(), num_sms(q.device.index)
        lists = _lists(plan, k.shape[0], far[0].shape[0], words, problem, sms)

        def begin(first_behind: int, free_sms: int) -> None:
            params = _EARLY.pack(
                plan.far_parts.data_ptr(),
                words + 4 * _NUM_BEGUN,
                words + 4 * _NUM_STORED,
                plan.sizes.q_tile_rows,
                first_behind,
            )
            keys = FarKeys(far[0], far[1], plan.far_begin, lists + params)
            walk = Walk(plan.far_tiles, plan.runs, plan.edges)
            enqueue(q, k, v, keys, walk, results, problem, free_sms=free_sms)

        here, beside = torch.cuda.current_stream(q.device), _stream(q.device)
        beside.wait_stream(here)
        begin(_NO_BLOCK, max(free_sms, 1))
        with torch.cuda.stream(beside):
            arrive()
            begin(0, 0)
        here.wait_stream(beside)
    return ForwardOutput(out, lse)


def _lists(
    plan: SplitPlan, total_near: int, total_far: int, words: int, problem: AttnProblem, sms: int
) -> bytes:
    """The schedules of the lists, in the order of csrc/sm90/fwd_shared.cuh, with their tickets in the counters at `words`."""
    tiles = (plan.far_tiles, plan.near_tiles, plan.part_tiles)
    sizes = _sizes(tiles[0].shape[0], tiles[2].shape[0], total_near, total_far, problem, sms)
    return b"".join(
        _SCHEDULE.pack(x.data_ptr(), words + 4 * counter, *of_list)
        for counter, (x, of_list) in enumerate(zip(tiles, sizes, strict=True))
    )


@lru_cache(maxsize=1024)
def _sizes(
    num_tiles: int, num_parts: int, total_near: int, total_far: int, problem: AttnProblem, sms: int
) -> list[tuple[int, int, int, int]]:
    """What else a Schedule has, of each list."""
    in_sections = tiles_in_sections(problem, num_tiles, sms)
    lists = (
        (num_tiles, total_near + total_far, in_sections),
        (num_tiles, total_near, in_sections),
        (num_parts, total_near, num_parts),
    )
    return [
        (num, problem.nheads_q, heads_per_section(problem, total_k, num, sms), first)
        for num, total_k, first in lists
    ]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of the launches behind arrivals."""
    return torch.cuda.Stream(device, priority=-1)
