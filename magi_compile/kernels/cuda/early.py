"""A forward pass that begins before some of its keys are there: two launches that share the tiles of one plan.

    early    tiles that see near keys alone, and of a few others the near part, which leaves in fp32
    late     everything else; those few are merged with their near part

Near keys are there from the start, far keys are not. Nothing waits inside a kernel, so that thread blocks never hold SMs
that the far keys need to get here. What is cut in two costs another pass over its rows, so no more is than it takes to
be busy until the far keys are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.cuda.forward import FarKeys, Results, Walk, enqueue
from magi_compile.plan.cost import TILE_COST, longest_first, run_costs, sums
from magi_compile.plan.tiles import RUN_FIELDS

NOT_A_PART = -(2**31)  # in `part_shifts`, as in csrc/sm90/plan.cuh
#: Of how many tiles one at most is cut in two: bounds the memory of their parts.
TILES_OF_A_PART = 4

_COL_BEGIN, _NUM_BLOCKS, _NUM_LEAD, _NUM_TRAIL = (
    RUN_FIELDS.index(name) for name in ("col_begin", "num_blocks", "num_lead", "num_trail")
)


class SplitPlan(NamedTuple):
    """The q walk of a plan in two launches."""

    early: Walk
    late: Walk
    far_begin: int
    num_part_rows: int  # room for the rows of tiles that are cut in two


def split_plan(
    q_tiles: Tensor, q_runs: Tensor, tile_rows: int, far_begin: int, share: float
) -> SplitPlan:
    """Cuts the q walk of a plan in two; on a GPU nothing waits for the device.

    Args:
        q_tiles: int32 `[num_tiles, 4]`, of a plan with at least one tile.
        q_runs: int32 `[num_runs, 12]`; no run has both near and far columns.
        tile_rows: most rows of a tile.
        far_begin: the first far column.
        share: how much of all work is to be early, if so much needs no far key.

    Returns:
        The two walks, of as many tiles as the plan, with padding in place of what is the other's.
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

    # Whole tiles first, because parts cost more; then the largest parts, because there are fewest of them.
    is_whole = (far == 0) & (near > 0)
    order = longest_first(torch.where(is_whole, near + near.sum(), near))
    before = near[order].cumsum(0) - near[order]
    is_early = torch.zeros_like(is_whole)
    is_early[order] = (before < share * (near + far).sum()) & (near[order] > 0)
    max_parts = num_tiles // TILES_OF_A_PART + 1
    part = (is_early & ~is_whole).cumsum(0) - 1
    is_early &= is_whole | (part < max_parts)
    is_part = is_early & ~is_whole
    shifts = torch.where(is_part, part * tile_rows - row_begin, NOT_A_PART).int()

    def walk(is_in: Tensor, begin: Tensor, end: Tensor, cost: Tensor) -> Walk:
        columns = (torch.where(is_in, row_begin, row_end), row_end, begin, end)
        order = longest_first(torch.where(is_in, cost + TILE_COST, 0))
        return Walk(torch.stack(columns, 1)[order].int(), runs, shifts[order])

    is_late = ~is_padding & (is_part | ~is_early)
    late_begin = torch.where(is_part, run_mid, run_begin)
    late_cost = torch.where(is_part, far, near + far)
    return SplitPlan(
        walk(is_early, run_begin, run_mid, near),
        walk(is_late, late_begin, run_end, late_cost),
        far_begin,
        max_parts * tile_rows,
    )


def forward_early(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrive: Callable[[], Sequence[Tensor]],
    plan: SplitPlan,
    problem: AttnProblem,
    *,
    free_sms: int = 0,
) -> ForwardOutput:
    """Attention of `q` over near keys and over those that `arrive` returns, on torch's current stream.

    Args:
        q: `[total_q, nheads_q, head_dim]`, not empty.
        k: near keys `[total_near, nheads_kv, head_dim]`, not empty.
        v: their values.
        arrive: makes torch's current stream wait for far keys and values, and returns them; not empty.
        plan: of the mask over near and far keys.
        problem: what `CudaKernel.refusals` finds nothing against.
        free_sms: that the early launch leaves to what brings far keys; one at least computes.
    """
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return forward_early(q, k, v, arrive, plan, problem, free_sms=free_sms)
    (total_q, nheads_q, head_dim) = q.shape
    out = q.new_empty((total_q, nheads_q, head_dim))
    part_out = q.new_empty((plan.num_part_rows, nheads_q, head_dim), dtype=torch.float32)
    lse, part_lse = (
        q.new_empty((nheads_q, rows), dtype=torch.float32) for rows in (total_q, plan.num_part_rows)
    )
    enqueue(
        *(q, k, v, None, plan.early, Results(out, lse, part_out, part_lse), problem),
        free_sms=free_sms,
    )
    k_far, v_far = arrive()
    enqueue(
        *(q, k, v, FarKeys(k_far, v_far, plan.far_begin), plan.late),
        Results(out, lse, prior_out=part_out, prior_lse=part_lse),
        problem,
    )
    return ForwardOutput(out, lse)
