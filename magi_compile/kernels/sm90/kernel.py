"""Attention on Hopper GPUs: the kernels of `csrc/sm90`, compiled at first use."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem, BackwardOutput, ForwardOutput, Grads, Saved
from magi_compile.kernels.heuristics import (
    HOPPER_HEAD_DIMS,
    forward_config,
    has_table,
    hopper_head_dim,
    is_between_hopper_head_dims,
    map_lines,
    plan_tiles,
    table_gradients_config,
)
from magi_compile.kernels.mapped import map_refusals
from magi_compile.kernels.overlap import SavedQueries
from magi_compile.kernels.plan import Plan
from magi_compile.kernels.scored import ScoreNeeds, refusals_of_atomics, refuse_atomics
from magi_compile.kernels.sm90.backward.launch import BackwardPass, backward
from magi_compile.kernels.sm90.backward.table_gradients import table_gradients_variant
from magi_compile.kernels.sm90.backward.variants import backward_variants
from magi_compile.kernels.sm90.codegen.pointwise import UnknownOperation
from magi_compile.kernels.sm90.forward.launch import ELEMENTS, forward, forward_variant
from magi_compile.kernels.sm90.forward.overlap import (
    EarlyForward,
    EarlyPlan,
    early_plan,
    early_tiles_variant,
)
from magi_compile.kernels.sm90.forward.split_kv import (
    cut_tiles,
    forward_in_splits,
    has_splits,
    merge_variant,
)
from magi_compile.kernels.sm90.planner.block_map import block_map_variants, plan_of_lists
from magi_compile.kernels.sm90.planner.tile_plan import (
    plan_of_sizes,
    plan_on_device,
    plan_variants,
)
from magi_compile.kernels.sm90.runtime import ahead
from magi_compile.kernels.sm90.scores.arguments import source_of
from magi_compile.kernels.sm90.scores.source import ScoreSource, score_source
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan.block_map import ListShape
from magi_compile.plan.tiles import build_tile_plan
from magi_compile.score.program import ScoreCall


class HopperKernel:
    """Warp-specialised attention for sm_90a; see `Kernel`, `ScoredKernel`, `MappedKernel`,
    `EarlyKernel` and `PhasedKernel` for the interface.

    dq is summed up in any order, and which tiles a forward that begins early cuts in two depends on when remote keys
    come. Under `torch.use_deterministic_algorithms(True)` dq has one order, and no tile is cut.
    """

    name = "hopper"
    plans_in_graph = True
    needs_slices = False
    prepares_calls = True

    def refusals(self, problem: AttnProblem) -> list[str]:
        if problem.device_type != "cuda":
            return [f"needs a CUDA device, got {problem.device_type!r}"]
        reasons = []
        if problem.device_arch != (9, 0):
            reasons.append(f"needs compute capability 9.0, got {problem.device_arch}")
        if problem.dtype not in ELEMENTS:
            reasons.append(f"needs bfloat16 or float16, got {problem.dtype}")
        dims = problem.head_dim, problem.head_dim_v
        # TMA reads rows that begin at multiples of 16 bytes.
        if any(dim % 8 or not 8 <= dim <= HOPPER_HEAD_DIMS[-1] for dim in dims):
            reasons.append(
                "needs a head_dim and a head_dim_v that are multiples of 8 from 8 to "
                f"{HOPPER_HEAD_DIMS[-1]}, got {dims[0]} and {dims[1]}"
            )
        return reasons

    def notes(self, problem: AttnProblem) -> list[str]:
        if not is_between_hopper_head_dims(problem):
            return []
        return [
            f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} run in tiles for "
            f"{hopper_head_dim(problem)}, "
            "of which TMA fills columns with zeros; nothing is copied"
        ]

    def plan(self, slices: AttnSlices, problem: AttnProblem) -> Plan:
        tiles = plan_tiles(problem)
        is_on_gpu = slices.device.type == "cuda" and not _compat.is_fake(slices.q_ranges)
        if is_on_gpu:
            return plan_on_device(slices, tiles, problem)
        # Elsewhere (fake tensors, slices on a CPU) the same in operations of torch.
        plan = build_tile_plan(slices, **tiles._asdict())
        splits = cut_tiles(plan.q_tiles, plan.q_runs, slices.seqlen_k, tiles, problem)
        return Plan(tiles, plan.q_walk, plan.k_walk, splits)

    def plan_key(self, problem: AttnProblem) -> Hashable:
        return plan_tiles(problem), problem.nheads_q, problem.block_map, map_lines(problem)

    def list_refusals(self, shape: ListShape) -> list[str]:
        return map_refusals(shape)

    def plan_lists(
        self,
        lists: BlockLists | None,
        shape: ListShape,
        problem: AttnProblem,
        intervals: Tensor | None = None,
        table: BlockTable | None = None,
    ) -> Plan:
        return plan_of_lists(lists, shape, problem, intervals, table)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: AttnSlices | None,
        plan: Plan,
        problem: AttnProblem,
        *,
        prior: ForwardOutput | None = None,
        out_dtype: torch.dtype | None = None,
        score: ScoreCall | None = None,
        max_scores: Tensor | None = None,
    ) -> ForwardOutput:
        walk, _ = plan.walks(plan_tiles(problem))
        bits = _bits_of(slices, problem)
        # A pass that is a prior, or has one, stays whole: its own merge is in registers. Nothing merges splits under a
        # score program.
        is_alone = prior is None and out_dtype in (None, q.dtype) and score is None
        if has_splits(plan) and is_alone:
            assert plan.splits is not None
            return forward_in_splits((q, k, v), walk, plan.splits, problem, bits, max_scores)
        return forward(
            *((q, k, v), walk, problem),
            bits=bits,
            prior=prior,
            out_dtype=out_dtype,
            score=score,
            max_scores=max_scores,
        )

    def score_refusals(self, problem: AttnProblem, needs: ScoreNeeds) -> list[str]:
        program, dtypes, ranks, wants_table_gradients = needs
        reasons = []
        try:
            score_source(program.text, dtypes, ranks, may_shift=problem.softmax_scale > 0)
        except UnknownOperation as unknown:
            reasons = [f"has no code for the score_mod: {unknown} is not written in CUDA"]
        if not wants_table_gradients:
            return reasons
        try:
            score_source(program.text, dtypes, ranks, wanted=program.differentiable_tables)
        except UnknownOperation as unknown:
            what = f"gradients of what the score_mod captures: {unknown}"
            return [*reasons, f"has no code for {what} is not written in CUDA"]
        return [*reasons, *refusals_of_atomics()]

    def plan_of_sizes(
        self,
        num_slices: int,
        total_q: int,
        total_k: int,
        problem: AttnProblem,
        device: torch.device,
    ) -> Plan:
        sizes = plan_tiles(problem)
        return plan_of_sizes(num_slices, total_q, total_k, sizes, problem, device)

    def begin_plan(self, plan: Plan, problem: AttnProblem, *, later: bool = False) -> None:
        is_of_lists = problem.block_map is not None
        ahead.begin(
            block_map_variants(has_table(problem)) if is_of_lists else plan_variants(plan, problem),
            later=later,
        )

    def begin_forward(
        self,
        plan: Plan,
        problem: AttnProblem,
        score: ScoreCall | None = None,
        *,
        is_early: bool = False,
        later: bool = False,
    ) -> None:
        assert plan.q_walk is not None
        source = None if score is None else source_of(score, problem)
        has_stairs = (
            problem.block_map is None and _compat.size_at_hand(plan.q_walk.edges.shape[0]) > 0
        )
        config = forward_config(problem)
        options = {"has_stairs": has_stairs, "is_early": is_early}
        variants = [forward_variant(problem, config, **options, score=source)]
        if is_early:
            variants.insert(0, early_tiles_variant())
        if has_splits(plan) and score is None and not is_early:
            variants.append(merge_variant(problem.head_dim_v, problem.dtype))
        ahead.begin(variants, later=later)

    def begin_backward(
        self,
        problem: AttnProblem,
        score: ScoreCall | None = None,
        *,
        wanted: Sequence[int] = (),
        deterministic: bool = False,
        later: bool = False,
    ) -> None:
        source = None if score is None else source_of(score, problem)
        of_tables = (
            source_of(score, problem, tuple(wanted)) if score is not None and wanted else None
        )
        _begin_backward(problem, deterministic, source, of_tables, later=later)

    def early_plan(self, slices: AttnSlices, problem: AttnProblem, remote_begin: int) -> EarlyPlan:
        _refuse_bits(problem)
        tiles = plan_tiles(problem)
        walk, _ = self.plan(slices, problem).walks(tiles)
        return early_plan(walk, tiles, remote_begin)

    def early_forward(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        remote: Sequence[Tensor],
        plan: EarlyPlan,
        problem: AttnProblem,
        *,
        free_sms: int = 0,
        max_scores: Tensor | None = None,
    ) -> EarlyForward:
        return EarlyForward(
            *(q, keys, remote, plan, problem),
            free_sms=free_sms,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            max_scores=max_scores,
        )

    def backward(
        self,
        grads: Grads,
        saved: Saved,
        slices: AttnSlices | None,
        plan: Plan,
        problem: AttnProblem,
        *,
        score: ScoreCall | None = None,
        deterministic: bool | None = None,
    ) -> BackwardOutput:
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        refuse_atomics(score, deterministic)
        q_walk, k_walk = plan.walks(plan_tiles(problem))
        return backward(
            *(grads, saved, k_walk, problem),
            bits=_bits_of(slices, problem),
            score=score,
            q_walk=q_walk,
            deterministic=deterministic,
        )

    def phased_backward(
        self,
        grads: Grads,
        saved: SavedQueries,
        slices: AttnSlices | None,
        plan: Plan,
        problem: AttnProblem,
    ) -> BackwardPass:
        _refuse_bits(problem)
        deterministic = torch.are_deterministic_algorithms_enabled()
        _, walk = plan.walks(plan_tiles(problem))
        return BackwardPass(grads, saved, walk, problem, deterministic)


@lru_cache(maxsize=1024)
def _begin_backward(
    problem: AttnProblem,
    deterministic: bool,
    source: ScoreSource | None,
    of_tables: ScoreSource | None,
    *,
    later: bool,
) -> None:
    """Once: eager calls ask each time. `of_tables` is the source with gradients of captured tensors."""
    variants = [*backward_variants(problem, deterministic, score=source)]
    if of_tables is not None:
        config = table_gradients_config(problem)
        variants.append(table_gradients_variant(problem, config, of_tables))
    ahead.begin(variants, later=later)


def _bits_of(slices: AttnSlices | None, problem: AttnProblem) -> Tensor | None:
    """The bit blocks of a mask, as kernels read them, where `problem` has some."""
    bits = None if slices is None else slices.bits
    assert (bits is not None) == problem.has_bits
    return None if bits is None else bits.contiguous()


def _refuse_bits(problem: AttnProblem) -> None:
    """In passes that overlap communication: nobody divides bit blocks among ranks."""
    if problem.has_bits:
        raise NotImplementedError(
            "bit-block masks cannot overlap communication, got `problem.has_bits`=True; express the mask by intervals"
        )
