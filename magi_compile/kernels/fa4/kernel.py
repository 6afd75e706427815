"""Attention over slices by flash-attn-4: NVIDIA Blackwell and Hopper,
through its own masks or through block lists and a mask_mod."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

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
from magi_compile.kernels.fa4.intervals import (
    Intervals,
    blocks_of,
    intervals_of_rects,
    searched_bounds,
    unrolled_bounds,
)
from magi_compile.kernels.fa4.native import native_mask
from magi_compile.kernels.heuristics import (
    FA4_HEAD_DIMS,
    FA4_LEAST_ROWS,
    fa4_group_is_packed,
    plan_tiles,
)
from magi_compile.kernels.merge import merge_prior
from magi_compile.kernels.plan import Plan, PlanTiles, check_tiles, other_kernel
from magi_compile.kernels.triton import TritonKernel
from magi_compile.masks.evaluation.block_lists import counts_and_order
from magi_compile.masks.slices import AttnSlices
from magi_compile.score.program import ScoreCall

PACKAGE = "flash-attn-4"
# The functions that it is called by are not public: the versions that the tests have run against.
VERSIONS = ("4.0.0b36",)
ARCHS = ((9, 0), (10, 0), (10, 3))
DTYPES = (torch.bfloat16, torch.float16)

# A mask_mod compares with up to this many intervals of a row one by one, and searches among more.
_MOST_UNROLLED = 4
# How far beyond the last row kernels look up intervals, whose results nobody reads: to the end of the largest tile.
_PADDING = 256


class _Facts(NamedTuple):
    """The facts of a plan that the host knows; in a plan an int64 tensor on a CPU, the first of `Plan.others`.

    Behind it are cu_seqlens, without elements for a single document, where the package has the mask itself
    (`is_native`); else bounds, counts and indices of what a query sees, for the forward, and the same of what a key is
    seen by.
    """

    is_native: int
    tiles: PlanTiles
    most_keys: int = 0  # else: the most intervals of a row of bounds
    most_queries: int = 0
    longest: int = 0  # native: the fields of `Native`, -1 for None
    left: int = -1
    right: int = -1

    def with_tensors(self, *tensors: Tensor) -> Plan:
        """The plan of these facts."""
        is_native, tiles, *rest = self
        return Plan(others=(torch.tensor([is_native, *tiles, *rest], device="cpu"), *tensors))

    @classmethod
    def read(cls, plan: Plan, problem: AttnProblem) -> tuple[_Facts, list[Tensor]]:
        """The facts of a plan, whose blocks must be those of `problem`, and its other tensors."""
        if not plan.others:
            raise other_kernel(Fa4Kernel.name)
        on_host, *tensors = plan.others
        is_native, *rest = on_host.tolist()
        facts = cls(is_native, PlanTiles(*rest[:4]), *rest[4:])
        check_tiles(facts.tiles, plan_tiles(problem, Fa4Kernel.name))
        return facts, tensors


def _is_of_triton(plan: Plan) -> bool:
    return plan.q_walk is not None


class Fa4Kernel:
    """flash-attn-4 behind the kernel interface. Its wheels are Python: kernels compile at first use, some seconds each.

    Planning waits for the device a few times, so no graph holds a plan: eager code keeps it with the slices, a compiled
    graph makes it again in each call. What cannot wait, the capture of a CUDA graph, and backward passes that have to
    repeat bit for bit are left to Triton's kernel.
    """

    name = "fa4"
    plans_in_graph = False
    needs_slices = True  # for what is left to Triton's kernel
    prepares_calls = False

    def __init__(self) -> None:
        self._triton = TritonKernel()

    def refusals(self, problem: AttnProblem) -> list[str]:
        if problem.device_type != "cuda":
            return [f"needs a CUDA device, got {problem.device_type!r}"]
        reasons = []
        if problem.device_arch not in ARCHS:
            reasons.append(f"needs compute capability 9.0, 10.0 or 10.3, got {problem.device_arch}")
        if problem.dtype not in DTYPES:
            reasons.append(f"needs bfloat16 or float16, got {problem.dtype}")
        if problem.head_dim not in FA4_HEAD_DIMS:
            reasons.append(f"needs a head_dim of {FA4_HEAD_DIMS}, got {problem.head_dim}")
        if problem.head_dim_v != problem.head_dim:
            reasons.append(
                f"needs head_dim_v equal to head_dim {problem.head_dim}, got {problem.head_dim_v}"
            )
        if problem.softcap:
            reasons.append(
                f"has no exact soft-cap, got softcap={problem.softcap}: {PACKAGE} takes tanh from an "
                "approximation of 11 bits"
            )
        if problem.has_bits:
            reasons.append("has no bit blocks, which masks need whose rows see many intervals")
        if problem.has_max_scores:
            reasons.append(f"has no largest scores of rows: {PACKAGE} does not return them")
        # Importing the package takes seconds: only for those who can use it.
        return reasons or list(_why_no_package())

    def notes(self, problem: AttnProblem) -> list[str]:
        return [
            "has not run on Blackwell; makes the plan again in every call of a compiled graph, and waits for it",
            "kernel 'triton' runs what a CUDA graph captures, and the backward under "
            "torch.use_deterministic_algorithms(True)",
        ]

    def plan(self, slices: AttnSlices, problem: AttnProblem) -> Plan:
        """Waits for the device, up to five times."""
        if slices.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._triton.plan(slices, problem)
        tiles = plan_tiles(problem, self.name)
        rects = slices.untrimmed_rects().trimmed()
        by_query = intervals_of_rects(rects, slices.seqlen_q, slices.seqlen_k)
        native = native_mask(by_query, FA4_LEAST_ROWS)
        if native is not None:
            left, right = (-1 if limit is None else limit for limit in (native.left, native.right))
            facts = _Facts(1, tiles, longest=native.longest, left=left, right=right)
            documents = native.cu_seqlens
            tensors = [slices.q_ranges.new_empty(0) if documents is None else documents]
        else:
            by_key = intervals_of_rects(rects.transposed(), slices.seqlen_k, slices.seqlen_q)
            facts = _Facts(0, tiles, by_query.most, by_key.most)
            q_blocks = blocks_of(by_query, tiles.q_tile_rows, tiles.q_block_cols)
            k_blocks = blocks_of(by_query, tiles.k_block_cols, tiles.k_tile_rows).mT
            lists = [_bounds(by_query), *counts_and_order(q_blocks)]
            tensors = [*lists, _bounds(by_key), *counts_and_order(k_blocks)]
        is_there = slices.device.type == problem.device_type
        device = slices.device if is_there else torch.device(problem.device_type)
        return facts.with_tensors(*(x.to(device) for x in tensors))

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
        assert score is None
        assert max_scores is None
        if _is_of_triton(plan):
            return self._triton.forward(
                q, k, v, slices, plan, problem, prior=prior, out_dtype=out_dtype
            )
        facts, tensors = _Facts.read(plan, problem)
        out = output_like(q, problem.head_dim_v)
        lse = q.new_empty(problem.nheads_q, q.shape[0], dtype=torch.float32)
        if q.numel() and k.numel():
            mask = _mask(facts, tensors, problem, by_key=False)
            with torch.cuda.device_of(q):
                _interface()._flash_attn_fwd(
                    *_batched(mask, q, k, v),
                    softmax_scale=problem.softmax_scale,
                    pack_gqa=None if fa4_group_is_packed(problem) else False,
                    return_lse=True,
                    **dict(zip(("out", "lse"), _batched(mask, out, lse), strict=True)),
                    **mask,
                )
        else:
            out.zero_()
            lse.fill_(-torch.inf)
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
        assert score is None
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic and not _is_of_triton(plan):
            assert slices is not None
            plan = self._triton.plan(slices, problem)
        if _is_of_triton(plan):
            return self._triton.backward(
                grads, saved, slices, plan, problem, deterministic=deterministic
            )
        facts, tensors = _Facts.read(plan, problem)
        (dout, dlse), (q, k, v, out, lse) = grads, saved
        if not (q.numel() and k.numel()):
            return BackwardOutput(*(x.new_zeros(x.shape) for x in (q, k, v)))
        results = BackwardOutput(*(x.new_empty(x.shape) for x in (q, k, v)))
        mask = _mask(facts, tensors, problem, by_key=True)
        rest = (out.to(q.dtype), dout.to(q.dtype), lse.contiguous())
        options = dict(zip(results._fields, _batched(mask, *results), strict=True))
        of_lse = [None] if dlse is None else _batched(mask, dlse.float().contiguous())
        with torch.cuda.device_of(q):
            _interface()._flash_attn_bwd(
                *_batched(mask, q, k, v, *rest),
                softmax_scale=problem.softmax_scale,
                dlse=of_lse[0],
                **options,
                **mask,
            )
        return results


def _bounds(intervals: Intervals) -> Tensor:
    bounds_of = unrolled_bounds if intervals.most <= _MOST_UNROLLED else searched_bounds
    return bounds_of(intervals, intervals.num_rows + _PADDING)


def _batched(mask: dict[str, Any], *tensors: Tensor) -> list[Tensor]:
    """Each as a batch of one, or for packed documents as it is."""
    return [x if "cu_seqlens_q" in mask else x.unsqueeze(0) for x in tensors]


def _mask(
    facts: _Facts, tensors: list[Tensor], problem: AttnProblem, *, by_key: bool
) -> dict[str, Any]:
    """The mask as arguments of the forward, or of the backward, whose lists are `by_key`."""
    if facts.is_native:
        left, right = (None if limit < 0 else limit for limit in (facts.left, facts.right))
        arguments: dict[str, Any] = {"causal": left is None and right == 0}
        if not arguments["causal"]:
            arguments |= {"window_size_left": left, "window_size_right": right}
        if tensors[0].numel():
            for side in "qk":
                arguments[f"cu_seqlens_{side}"] = tensors[0]
                arguments[f"max_seqlen_{side}"] = facts.longest
        return arguments
    mods = importlib.import_module("magi_compile.kernels.fa4.mask_mods")
    sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
    bounds, counts, indices = tensors[3:] if by_key else tensors[:3]
    most, tiles = facts.most_queries if by_key else facts.most_keys, facts.tiles
    if most > _MOST_UNROLLED:
        mask_mod = mods.searched((2 * most).bit_length(), by_key=by_key)
    elif by_key or problem.device_arch == (9, 0):
        mask_mod = mods.unrolled(max(most, 1), by_key=by_key)
    else:  # a thread of the forward for Blackwell has one query and many keys
        mask_mod = mods.unrolled_of_32_keys(max(most, 1))
    block_size = (
        (tiles.k_block_cols, tiles.k_tile_rows)
        if by_key
        else (tiles.q_tile_rows, tiles.q_block_cols)
    )
    # For all heads of a batch of one.
    lists = (x[kind][None, None] for kind in range(2) for x in (counts, indices))
    sparse = sparsity.BlockSparseTensorsTorch(*lists, block_size=block_size)
    return {"mask_mod": mask_mod, "aux_tensors": [bounds], "block_sparse_tensors": sparse}


@cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


@cache
def _why_no_package() -> tuple[str, ...]:
    """The reason why the package cannot be used, if there is one."""
    expected = " or ".join(VERSIONS)
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return (f"{PACKAGE} is not installed: pip install {PACKAGE}=={VERSIONS[-1]}",)
    if found not in VERSIONS:
        return (f"needs {PACKAGE} {expected}, got {found}",)
    try:
        _interface()
    except Exception as error:
        return (f"{PACKAGE} cannot be imported: {type(error).__name__}: {error}",)
    return ()
