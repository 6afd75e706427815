"""Attention over slices in Triton, on any CUDA GPU from sm_80, by the same walk as the Hopper kernel.

Every output tile has one writer: results are deterministic, are written once in their own dtype,
and need no buffer but delta (fp32, `[nheads_q, total_q]`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Hashable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import (
    AttnProblem,
    BackwardOutput,
    ForwardOutput,
    Grads,
    Saved,
    output_like,
)
from magi_compile.kernels.heuristics import DELTA_ROWS, plan_tiles, triton_config
from magi_compile.kernels.merge import merge_prior
from magi_compile.kernels.plan import Plan
from magi_compile.kernels.scored import ScoreNeeds, refusals_of_atomics, refuse_atomics
from magi_compile.kernels.triton.score_expressions import NoTritonCode
from magi_compile.kernels.triton.score_source import score_arguments, score_source
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan.tiles import Walk, build_tile_plan
from magi_compile.score.program import ScoreCall

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_ARCH = (8, 0)
MAX_HEAD_DIM = 256


class KernelSizes(NamedTuple):
    """The constants that a kernel is compiled for; one and the same name for each on the host and on the device."""

    tile_rows: int
    block_cols: int
    dim: int
    padded_dim: int
    dim_v: int
    padded_dim_v: int
    has_softcap: bool
    has_bits: bool


def sizes_of(problem: AttnProblem, tile_rows: int, block_cols: int) -> KernelSizes:
    """The constants of a kernel whose tiles have `tile_rows` and whose blocks have `block_cols`."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    of_heads = (dim, _padded(dim), dim_v, _padded(dim_v))
    return KernelSizes(tile_rows, block_cols, *of_heads, problem.softcap != 0.0, problem.has_bits)


class TritonKernel:
    """The Triton kernel behind the kernel interface."""

    name = "triton"
    plans_in_graph = True
    needs_slices = False
    prepares_calls = False

    def refusals(self, problem: AttnProblem) -> list[str]:
        reasons = []
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed")
        if problem.device_type != "cuda" or problem.device_arch is None:
            reasons.append(f"runs on CUDA GPUs, not on {problem.device_type!r}")
        elif problem.device_arch < MIN_ARCH:
            major, minor = problem.device_arch
            reasons.append(f"needs compute capability 8.0, got {major}.{minor}")
        if problem.dtype not in DTYPES:
            reasons.append(f"`dtype` must be fp16, bf16 or fp32, got {problem.dtype}")
        for name in ("head_dim", "head_dim_v"):
            size = getattr(problem, name)
            if not 1 <= size <= MAX_HEAD_DIM:
                reasons.append(f"`{name}` must be from 1 to {MAX_HEAD_DIM}, got {size}")
        return reasons

    def notes(self, problem: AttnProblem) -> list[str]:
        return []

    def plan(self, slices: AttnSlices, problem: AttnProblem) -> Plan:
        tiles = plan_tiles(problem, self.name)
        plan = build_tile_plan(slices, **tiles._asdict())
        q_walk, k_walk = (
            Walk(*(x.to(problem.device_type) for x in walk)) for walk in (plan.q_walk, plan.k_walk)
        )
        return Plan(tiles, q_walk, k_walk)

    def plan_key(self, problem: AttnProblem) -> Hashable:
        return plan_tiles(problem, self.name)

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
        assert (max_scores is not None) == problem.has_max_scores
        walk, _ = plan.walks(plan_tiles(problem, self.name))
        config, program = triton_config(problem), score_arguments(score)
        total_q, nheads_q, _ = q.shape
        out = output_like(q, problem.head_dim_v)
        lse = q.new_empty(nheads_q, total_q, dtype=torch.float32)
        if out.numel():
            with torch.cuda.device_of(q):
                _device_code().forward_kernel[(len(walk.tiles) * nheads_q,)](
                    *_with_strides(q, k, v, out),
                    *(lse, lse if max_scores is None else max_scores, _walk(walk, slices)),
                    *(total_q, nheads_q, problem.qhead_per_kvhead),
                    (_score_factors(problem), program.numbering, program.captured),
                    S=sizes_of(problem, config.q_tile_rows, config.q_block_cols),
                    SCORES=program.functions.scores,
                    HAS_MAX_SCORES=max_scores is not None,
                    **config.forward._asdict(),
                )
        return merge_prior(ForwardOutput(out, lse), prior, out_dtype or q.dtype)

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
        q_walk, k_walk = plan.walks(plan_tiles(problem, self.name))
        config, program = triton_config(problem), score_arguments(score)
        (dout, dlse), (q, k, v, out, lse) = grads, saved
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        with torch.cuda.device_of(q):
            tensors = (*_with_strides(q, k, v, dout), lse.contiguous(), _delta(out, dout, dlse))
            rest = (problem.qhead_per_kvhead, problem.softmax_scale)
            scores = (_score_factors(problem), program.numbering, program.captured)
            functions = {"SCORES": program.functions.scores, "SLOPES": program.functions.slopes}
            if dq.numel():
                _device_code().dq_kernel[(len(q_walk.tiles) * problem.nheads_q,)](
                    *(*tensors, *_with_strides(dq), _walk(q_walk, slices)),
                    *(q.shape[0], problem.nheads_q, *rest, scores, program.totals),
                    S=sizes_of(problem, config.q_tile_rows, config.q_block_cols),
                    **functions,
                    ADD_GRADIENTS=program.functions.add_gradients,
                    **config.dq._asdict(),
                )
            if dk.numel():
                _device_code().dkdv_kernel[(len(k_walk.tiles) * problem.nheads_kv,)](
                    *(*tensors, *_with_strides(dk, dv), _walk(k_walk, slices)),
                    *(q.shape[0], problem.nheads_kv, *rest, scores),
                    S=sizes_of(problem, config.k_tile_rows, config.k_block_cols),
                    **functions,
                    **config.dkdv._asdict(),
                )
        return BackwardOutput(dq, dk, dv)

    def score_refusals(self, problem: AttnProblem, needs: ScoreNeeds) -> list[str]:
        program, dtypes, ranks, wants_table_gradients = needs
        reasons = []
        try:
            score_source(program.text, dtypes, ranks, program.differentiable_tables)
        except NoTritonCode as error:
            reasons = [f"has no code for the score_mod: {error}"]
        return [*reasons, *(refusals_of_atomics() if wants_table_gradients else [])]


def _device_code() -> ModuleType:
    """The module of the Triton functions, imported at first use: it needs Triton."""
    from magi_compile.kernels.triton import device as triton_device

    return triton_device


def _walk(walk: Walk, slices: AttnSlices | None) -> tuple[Tensor, ...]:
    """A walk as the kernels take it; where there are no bits, something that nobody reads is in their place."""
    bits = None if slices is None else slices.bits
    return *walk, walk.runs if bits is None else bits


def _delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """sum(dout * out) - dlse, fp32 `[nheads_q, total_q]`."""
    total_q, nheads_q, head_dim_v = out.shape
    delta = out.new_empty(nheads_q, total_q, dtype=torch.float32)
    if delta.numel():
        num_tiles = -(-total_q // DELTA_ROWS)
        _device_code().delta_kernel[(num_tiles * nheads_q,)](
            *_with_strides(out, dout, delta if dlse is None else dlse),
            *(delta, total_q, nheads_q),
            ROWS=DELTA_ROWS,
            DIM_V=head_dim_v,
            PADDED_DIM_V=_padded(head_dim_v),
            HAS_DLSE=dlse is not None,
        )
    return delta


def _with_strides(*tensors: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Each tensor with its strides."""
    return [(tensor, tensor.stride()) for tensor in tensors]


def _padded(head_dim: int) -> int:
    """The power of two that holds `head_dim`; 16 is the least that tensor cores multiply."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _score_factors(problem: AttnProblem) -> tuple[float, float]:
    """The factors of scores before and after the cap or the score program, to be in base 2."""
    log2_e = math.log2(math.e)
    if problem.has_score:
        return problem.softmax_scale, log2_e
    if problem.softcap:
        return problem.softmax_scale / problem.softcap, problem.softcap * log2_e
    return problem.softmax_scale * log2_e, 1.0
