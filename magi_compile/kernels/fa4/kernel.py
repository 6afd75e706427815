"""Attention over slices by flash-attn-4: NVIDIA Blackwell and Hopper, through its own masks or through block lists and a mask_mod."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
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
    BlockLists,
    Intervals,
    blocks_of,
    lists_of,
    row_intervals,
    searched_bounds,
    transposed,
    unrolled_bounds,
)
from magi_compile.kernels.fa4.native import Native, native_mask
from magi_compile.kernels.heuristics import (
    FA4_HEAD_DIMS,
    FA4_LEAST_ROWS,
    PlanTiles,
    fa4_group_is_packed,
    plan_tiles,
)
from magi_compile.kernels.merge import merge_prior
from magi_compile.kernels.plan_sizes import check_sizes
from magi_compile.kernels.triton import TritonKernel
from magi_compile.masks.slices import AttnSlices

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
    """The facts of a plan that the host knows; an int64 tensor on a CPU. Where it `is_native`, all from `num_documents`
    on is of `Native`, with -1 for None; else `most_keys` and `most_queries` say how many intervals a row of bounds has
    at most.
    """

    q_tile_rows: int
    q_block_cols: int
    k_tile_rows: int
    k_block_cols: int
    is_native: int
    most_keys: int = 0
    most_queries: int = 0
    num_documents: int = 1
    longest: int = 0
    left: int = -1
    right: int = -1

    @property
    def tiles(self) -> PlanTiles:
        return PlanTiles(*self[:4])


class _Plan(NamedTuple):
    """A plan: int32 tensors on the device, and on the host `facts`, where that of Triton's kernel has its tile sizes.

    `k_*` are what a query sees, for the forward, and `q_*` what a key is seen by, for the backward. A native mask has no lists, and
    its bounds are `cu_seqlens`.
    """

    k_bounds: Tensor
    k_counts: Tensor
    k_indices: Tensor
    facts: Tensor
    q_bounds: Tensor
    q_counts: Tensor
    q_indices: Tensor


class Fa4Kernel:
    """flash-attn-4 behind the kernel interface. Its wheels are Python: kernels compile at first use, some seconds each.

    Planning waits for the device a few times, so no graph holds a plan: eager code keeps it with the slices, a compiled graph makes it
    again in each call. What cannot wait, the capture of a CUDA graph, and backward passes that have to repeat bit for bit are left
    to Triton's kernel.
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
                f"has no exact soft-cap, got softcap={problem.softcap}: {PACKAGE} takes tanh from an approximation of 11 bits"
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
            "kernel 'triton' runs what a CUDA graph captures, and the backward under torch.use_deterministic_algorithms(True)",
        ]

    def plan(self, slices: AttnSlices, problem: AttnProblem) -> list[Tensor]:
        """Waits for the device, up to five times."""
        is_there = slices.device.type == problem.device_type
        device = slices.device if is_there else torch.device(problem.device_type)
        if slices.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._triton.plan(slices, problem)
        tiles = plan_tiles(problem, self.name)
        rects = slices.untrimmed_rects().trimmed()
        by_query = row_intervals(rects, slices.seqlen_q, slices.seqlen_k)
        native = native_mask(by_query, FA4_LEAST_ROWS)
        if native is not None:
            plan = _native_plan(native, tiles, slices.q_ranges)
        else:
            by_key = row_intervals(rects.transposed(), slices.seqlen_k, slices.seqlen_q)
            plan = _listed_plan(by_query, by_key, tiles)
        return [x if x is plan.facts else x.to(device) for x in plan]

    def pack(self, plan: list[Tensor]) -> list[Tensor]:
        return plan

    def unpack(self, packed: list[Tensor]) -> list[Tensor]:
        return packed

    def plan_key(self, problem: AttnProblem) -> Hashable:
        return plan_tiles(problem, self.name)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: AttnSlices | None,
        plan: list[Tensor],
        problem: AttnProblem,
        *,
        prior: ForwardOutput | None = None,
        out_dtype: torch.dtype | None = None,
        max_scores: Tensor | None = None,
    ) -> ForwardOutput:
        assert max_scores is None
        if _is_of_triton(plan):
            return self._triton.forward(
                q, k, v, slices, plan, problem, prior=prior, out_dtype=out_dtype
            )
        facts, mask = _read(plan, problem)
        total_q, nheads_q, _ = q.shape
        out = output_like(q, problem.head_dim_v)
        lse = q.new_empty(nheads_q, total_q, dtype=torch.float32)
        if q.numel() and k.numel():
            packed = facts.num_documents > 1
            with torch.cuda.device_of(q):
                _interface()._flash_attn_fwd(
                    *(_batched(x, packed) for x in (q, k, v)),
                    softmax_scale=problem.softmax_scale,
                    pack_gqa=None if fa4_group_is_packed(problem) else False,
                    return_lse=True,
                    out=_batched(out, packed),
                    lse=_batched(lse, packed),
                    **_forward_mask(facts, mask, problem),
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
        plan: list[Tensor],
        problem: AttnProblem,
        *,
        deterministic: bool | None = None,
    ) -> BackwardOutput:
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic and not _is_of_triton(plan):
            assert slices is not None
            plan = self._triton.plan(slices, problem)
        if _is_of_triton(plan):
            return self._triton.backward(
                grads, saved, slices, plan, problem, deterministic=deterministic
            )
        facts, mask = _read(plan, problem)
        (dout, dlse), (q, k, v, out, lse) = grads, saved
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        if q.numel() and k.numel():
            packed = facts.num_documents > 1
            tensors = (q, k, v, out.to(q.dtype), dout.to(q.dtype), lse.contiguous())
            with torch.cuda.device_of(q):
                _interface()._flash_attn_bwd(
                    *(_batched(x, packed) for x in tensors),
                    softmax_scale=problem.softmax_scale,
                    dq=_batched(dq, packed),
                    dk=_batched(dk, packed),
                    dv=_batched(dv, packed),
                    dlse=None if dlse is None else _batched(dlse.float().contiguous(), packed),
                    **_backward_mask(facts, mask),
                )
        else:
            for gradient in (dq, dk, dv):
                gradient.zero_()
        return BackwardOutput(dq, dk, dv)


# plans


def _native_plan(native: Native, tiles: PlanTiles, like: Tensor) -> _Plan:
    nothing = like.new_zeros(0)
    documents = nothing if native.cu_seqlens is None else native.cu_seqlens
    left, right = (-1 if limit is None else limit for limit in (native.left, native.right))
    facts = _Facts(
        *tiles,
        is_native=1,
        num_documents=max(len(documents) - 1, 1),
        longest=native.longest,
        left=left,
        right=right,
    )
    return _Plan(documents, nothing, nothing, _on_host(facts), nothing, nothing, nothing)


def _listed_plan(by_query: Intervals, by_key: Intervals, tiles: PlanTiles) -> _Plan:
    q_lists = lists_of(blocks_of(by_query, tiles.q_tile_rows, tiles.q_block_cols))
    backward_blocks = blocks_of(by_query, tiles.k_block_cols, tiles.k_tile_rows)
    k_lists = lists_of(transposed(backward_blocks))
    facts = _Facts(*tiles, is_native=0, most_keys=by_query.most, most_queries=by_key.most)
    return _Plan(_bounds(by_query), *q_lists, _on_host(facts), _bounds(by_key), *k_lists)


def _on_host(facts: _Facts) -> Tensor:
    return torch.tensor(facts, dtype=torch.int64, device="cpu")


def _bounds(intervals: Intervals) -> Tensor:
    bounds_of = unrolled_bounds if intervals.most <= _MOST_UNROLLED else searched_bounds
    return bounds_of(intervals, intervals.num_rows + _PADDING)


def _is_of_triton(plan: list[Tensor]) -> bool:
    """True if Triton's kernel has made a plan: there its tile sizes are a shape."""
    return plan[3].dim() > 1


def _read(plan: list[Tensor], problem: AttnProblem) -> tuple[_Facts, _Plan]:
    mask = _Plan(*plan)
    facts = _Facts(*mask.facts.tolist())
    check_sizes(facts.tiles, plan_tiles(problem, Fa4Kernel.name))
    return facts, mask


# arguments of flash-attn-4


def _batched(x: Tensor, packed: bool) -> Tensor:
    """A batch of one, or for packed documents all of them as they are."""
    return x if packed else x.unsqueeze(0)


def _forward_mask(facts: _Facts, mask: _Plan, problem: AttnProblem) -> dict[str, Any]:
    if facts.is_native:
        return _native_arguments(facts, mask)
    many_keys = problem.device_arch != (9, 0)  # what the forward for Hopper does not take
    blocks = facts.tiles.q_tile_rows, facts.tiles.q_block_cols
    return {
        "mask_mod": _mask_mod(facts.most_keys, by_key=False, many_keys=many_keys),
        "aux_tensors": [mask.k_bounds],
        "block_sparse_tensors": _sparse(BlockLists(mask.k_counts, mask.k_indices), blocks),
    }


def _backward_mask(facts: _Facts, mask: _Plan) -> dict[str, Any]:
    if facts.is_native:
        return _native_arguments(facts, mask)
    blocks = facts.tiles.k_block_cols, facts.tiles.k_tile_rows
    # A thread of the backward has one key, or few, and many queries.
    return {
        "mask_mod": _mask_mod(facts.most_queries, by_key=True, many_keys=False),
        "aux_tensors": [mask.q_bounds],
        "block_sparse_tensors": _sparse(BlockLists(mask.q_counts, mask.q_indices), blocks),
    }


def _native_arguments(facts: _Facts, mask: _Plan) -> dict[str, Any]:
    left, right = (None if limit < 0 else limit for limit in (facts.left, facts.right))
    arguments: dict[str, Any] = {"causal": left is None and right == 0}
    if not arguments["causal"]:
        arguments |= {"window_size_left": left, "window_size_right": right}
    if facts.num_documents > 1:
        for side in "qk":
            arguments[f"cu_seqlens_{side}"] = mask.k_bounds
            arguments[f"max_seqlen_{side}"] = facts.longest
    return arguments


def _mask_mod(most: int, *, by_key: bool, many_keys: bool) -> Callable[..., Any]:
    """The mask_mod that shows the columns of up to `most` intervals of a row: a query, or a key if `by_key`."""
    mods = importlib.import_module("magi_compile.kernels.fa4.mask_mods")
    if most > _MOST_UNROLLED:
        return mods.searched((2 * most).bit_length(), by_key=by_key)
    most = max(most, 1)
    return mods.unrolled_of_32_keys(most) if many_keys else mods.unrolled(most, by_key=by_key)


def _sparse(lists: BlockLists, block_size: tuple[int, int]) -> Any:
    """The lists for all heads of a batch of one."""
    (partial, full), (partial_indices, full_indices) = (
        x.unflatten(0, (2, 1, 1)).unbind(0) for x in lists
    )
    tensors = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    return tensors(partial, partial_indices, full, full_indices, block_size=block_size)


# the package


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
