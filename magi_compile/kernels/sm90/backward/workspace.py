"""The workspace of a backward pass, in one allocation."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import BackwardConfig, hopper_head_dim

DQ_GROUP_ROWS = 16
STATS_BYTES = 12  # of a query, in csrc/sm90/common/statistics.cuh
_ENTRY_BYTES = 16  # of csrc/sm90/backward/schedule/agenda.cuh
_MOST_PARTIALS = 768  # parts of tiles, each for one head
_WARPS = BackwardConfig.num_threads // 32  # each leaves its progress two items at most, of a launch


class Scratch(NamedTuple):
    """The offsets in the one allocation, in bytes.

    First the sums of dq `[nheads_q, padded_q, hopper_head_dim]` in fp32, the statistics `[nheads_q, padded_q / 8]` of
    csrc/sm90/common/statistics.cuh, and dk and dv of the parts of tiles in fp32, if there may be some; then the agenda,
    and what its writer needs; then how many parts have arrived, the visits of csrc/sm90/backward/params.cuh that are
    done and those that are wanted, and the progress of dq.
    """

    num_slots: int  # how many parts of tiles there is room for
    stats: int
    partials: int
    entries: int
    counters: int
    num_entries: int
    workspace: int
    arrivals: int
    done: int
    wanted: int
    progress: int
    size: int

    @staticmethod
    def of(
        problem: AttnProblem,
        config: BackwardConfig,
        padded_q: int,
        num_tiles: int,
        heads_per_section: int,
        grid: int,
        most_passes: int = 1,
    ) -> Scratch:
        """Lays out the workspace. With passes over all tiles, each tile has a slot, and an entry for each of them."""
        group, nheads_q = problem.qhead_per_kvhead, problem.nheads_q
        num_items = num_tiles * problem.nheads_kv // heads_per_section
        most_slots = max(_MOST_PARTIALS // heads_per_section, 1)
        num_slots = min(num_items * group, most_slots) if group > 1 else 0
        if most_passes > 1:
            num_slots = max(num_slots, num_tiles)
        num_entries = max(num_items + num_slots, num_items * most_passes if most_passes > 1 else 0)
        num_partials = num_slots * heads_per_section
        head_dim = hopper_head_dim(problem)
        stats = nheads_q * padded_q * head_dim
        partials = stats + nheads_q * padded_q * STATS_BYTES // 4
        end = partials + num_partials * 2 * config.tile_rows * head_dim
        words = (
            num_entries * _ENTRY_BYTES // 4,
            2 + num_tiles * problem.nheads_kv // grid,
            1,
            3 * num_tiles + 1 + (num_items if group > 1 else 0),
            num_partials * config.tile_warps,
            nheads_q * padded_q // DQ_GROUP_ROWS,
            padded_q // DQ_GROUP_ROWS + 1,
            7 + 2 * _WARPS * config.num_ctas * grid,
        )
        places = (4 * x for x in accumulate(words, initial=end))
        return Scratch(num_slots, 4 * stats, 4 * partials, *places)
