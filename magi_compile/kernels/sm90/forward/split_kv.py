"""Long tiles in splits, where tiles and heads are too few to keep the SMs busy: some tiles of the q walk are cut along
their blocks, the forward leaves what it finds in fp32, and one more launch merges it.

How many splits there may be follows from shapes; which tiles are cut, the GPU decides
(`csrc/sm90/planner/split_tiles.cu`).
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.heuristics import (
    SPLIT_LEAST_BLOCKS,
    SPLIT_NUMBERS,
    SPLITS_MOST_TILES,
    forward_config,
    forward_splits,
)
from magi_compile.kernels.plan import Plan, PlanTiles
from magi_compile.kernels.sm90.forward.launch import (
    EDGES,
    ELEMENTS,
    LSE,
    NO_REMOTE_KEYS,
    NO_RESULTS,
    OTHER,
    OUT,
    RUNS,
    ForwardShape,
    forward_launch,
    results_of,
)
from magi_compile.kernels.sm90.params import MERGE, SPLIT_TILES
from magi_compile.kernels.sm90.runtime.calls import Buffer, Call, Launch
from magi_compile.kernels.sm90.runtime.driver import (
    Layout,
    are_tma_layouts,
    load_function,
    num_sms,
    on_device,
    routed,
)
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import Packed, Pointer
from magi_compile.plan import cost
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS, Walk

CUT_FIELDS = (
    "row_begin",
    "row_end",
    "split_row",
    "num_splits",
)  # as in csrc/sm90/common/tile_plan.cuh
_CUT_THREADS, _MOST_SMS = 512, 160  # as in csrc/sm90/planner/split_tiles.cu
_MERGE_THREADS, _MERGE_BLOCKS = 256, 4  # blocks of an SM


class SplitLayout(NamedTuple):
    """The offsets in the one int32 tensor of a plan, in words: runs come first. All ints or SymInts."""

    num_splits: int  # that there is room for, an even number
    num_tiles: int
    tiles: int
    cuts: int
    shifts: int
    size: int

    @staticmethod
    def of(num_tiles: int, num_runs: int, num_splits: int) -> SplitLayout:
        """For splits of so many tiles and runs: see SplitTilesParams."""
        num_tiles = num_tiles + num_splits
        tiles = len(RUN_FIELDS) * (2 * num_runs + num_splits)
        cuts = tiles + len(TILE_FIELDS) * num_tiles
        shifts = cuts + len(CUT_FIELDS) * (num_splits // 2)
        return SplitLayout(num_splits, num_tiles, tiles, cuts, shifts, shifts + num_tiles)

    @staticmethod
    @lru_cache(maxsize=1024)
    def of_size(num_tiles: int, num_runs: int, size: int) -> SplitLayout:
        """With as many splits as there is room for."""
        of_none, of_two = SplitLayout.of(num_tiles, num_runs, 0).size, SplitLayout.of(0, 0, 2).size
        return SplitLayout.of(num_tiles, num_runs, 2 * ((size - of_none) // of_two))


@cache
def split_variant() -> Variant:
    """The kernel that cuts tiles."""
    names = ("BLOCK", "MASK", "TILE", "SPLIT", "MERGE", "MERGE_LAUNCH")
    defines = {f"FFA_{name}_COST": getattr(cost, f"{name}_COST") for name in names}
    defines["FFA_MOST_TILES"] = SPLITS_MOST_TILES
    defines |= {f"FFA_{name.upper()}": value for name, value in SPLIT_NUMBERS.items()}
    return Variant.of("planner/split_tiles.cu", "ffa_split_tiles", defines)


@cache
def merge_variant(head_dim_v: int, dtype: torch.dtype) -> Variant:
    """The kernel that merges splits."""
    defines = {"FFA_ELEMENT": ELEMENTS[dtype], "FFA_COLS_OF_V": head_dim_v}
    return Variant.of("forward/combine.cu", "ffa_forward_merge", defines)


def has_splits(plan: Plan) -> bool:
    """True if tiles of a plan may be cut; its tensors may be fake."""
    return plan.splits is not None and _compat.size_at_hand(plan.splits.shape[0]) > 0


def cut_tiles(
    q_tiles: Tensor, q_runs: Tensor, seqlen_k: int, sizes: PlanTiles, problem: AttnProblem
) -> Tensor:
    """The q walk of a plan with tiles in splits, int32, in a `SplitLayout`, on torch's current stream; empty where
    `problem` needs none, and on a CPU. Of fake tensors a fake one."""
    device, counts = q_tiles.device, (q_tiles.shape[0], q_runs.shape[0])
    size = _size(problem, seqlen_k, *counts, device)
    if _compat.is_fake(q_tiles) or size == 0:
        return torch.empty(size, dtype=torch.int32, device=device)
    pointers = Pointer(0), Pointer(1), Pointer(2)
    with on_device(device):
        launch = cut_launch(pointers, (*counts, size), sizes, problem, device.index)
        call = Call((Buffer.of((size,), torch.int32),), (launch,))
        (splits,) = call.run([q_tiles, q_runs], device)
    return splits


def _size(
    problem: AttnProblem, seqlen_k: int, num_tiles: int, num_runs: int, device: torch.device
) -> int:
    """The number of words that the splits of a plan take."""
    if device.type != "cuda" or problem.has_score:  # nothing merges splits under a score program
        return 0
    num_splits = forward_splits(problem, seqlen_k, num_tiles, num_sms(device.index))
    return torch.sym_min(1, num_splits) * SplitLayout.of(num_tiles, num_runs, num_splits).size


size_of_splits = lru_cache(maxsize=1024)(_size)


def cut_launch(
    pointers: tuple[Pointer, Pointer, Pointer],
    counts: tuple[int, int, int],
    sizes: PlanTiles,
    problem: AttnProblem,
    device_index: int,
) -> Launch:
    """The launch that cuts tiles.

    Args:
        pointers: to tiles, to runs, and to where the splits go.
        counts: of tiles, of runs, and of the words of the splits.
        sizes: of tiles.
        problem: what is computed.
        device_index: of the GPU.

    Returns:
        The launch.
    """
    sms_of_head = num_sms(device_index) // problem.nheads_q
    return Launch(
        *(load_function(split_variant(), device_index), 1, _CUT_THREADS),
        cut_params(pointers, counts, sizes, sms_of_head),
        shared_bytes=_CUT_THREADS // 32 * 4,
    )


def cut_params(
    pointers: tuple[Pointer, Pointer, Pointer],
    counts: tuple[int, int, int],
    sizes: PlanTiles,
    sms_of_head: int,
) -> Packed:
    """The parameters of the kernel that cuts tiles, see `cut_launch`."""
    tiles, runs, (buffer, begin) = pointers
    num_tiles, num_runs, size = counts
    layout = SplitLayout.of_size(num_tiles, num_runs, size)

    def at(words: int) -> Pointer:
        return Pointer(buffer, begin + 4 * words)

    return SPLIT_TILES.pack(
        tiles=tiles,
        runs=runs,
        split_runs=at(0),
        split_tiles=at(layout.tiles),
        cuts=at(layout.cuts),
        split_shifts=at(layout.shifts),
        num_tiles=num_tiles,
        num_runs=num_runs,
        max_splits=layout.num_splits,
        num_sms=min(sms_of_head, _MOST_SMS),
        least_blocks=SPLIT_LEAST_BLOCKS,
        tile_rows=sizes.q_tile_rows,
        block_cols=sizes.q_block_cols,
    )


def forward_in_splits(
    qkv: tuple[Tensor, ...],
    walk: Walk,
    splits: Tensor,
    problem: AttnProblem,
    bits: Tensor | None = None,
    max_scores: Tensor | None = None,
) -> ForwardOutput:
    """Attention of q over the `splits` of the q walk of a plan, which are not empty, on torch's current stream;
    see `forward`."""
    assert (max_scores is not None) == problem.has_max_scores
    tiles, runs, edges = walk
    sizes = (tiles.shape[0], runs.shape[0], splits.shape[0], edges.shape[0] > 0)
    device = qkv[0].device
    with on_device(device):
        qkv, call = routed(_call, qkv, problem, *sizes)
        out, lse, *_ = call.run([*qkv, None, splits, edges, None, None, bits, max_scores], device)
    return ForwardOutput(out, lse)


@lru_cache(maxsize=1024)
def _call(
    layouts: tuple[Layout, ...],
    problem: AttnProblem,
    num_tiles: int,
    num_runs: int,
    size: int,
    has_stairs: bool,
    device_index: int,
) -> Call | None:
    """The prepared call for tensors q, k and v of such layouts, with splits of `size` words in place of runs; None
    where TMA cannot read them."""
    if not are_tma_layouts(layouts, problem.dtype):
        return None
    out, lse = results_of(layouts[0], problem)
    total_q, nheads_q, head_dim_v = out.shape
    layout = SplitLayout.of_size(num_tiles, num_runs, size)
    tile_rows, num_cuts = forward_config(problem).tile_rows, layout.num_splits // 2
    split_rows = layout.num_splits * tile_rows
    num_words = split_rows * nheads_q * head_dim_v  # of their outputs, in front of their lses
    of_splits = Buffer.of((num_words + split_rows * nheads_q,), torch.float32)
    at_out, at_lse = Pointer(OTHER), Pointer(OTHER, 4 * num_words)
    shape = ForwardShape(layouts, problem, layout.num_tiles, has_stairs, None, device_index)
    ticket, walk = forward_launch(
        *(shape, out, OTHER + 1),
        **NO_RESULTS
        | {"out_rows": Pointer(OUT), "lse": Pointer(LSE)}
        | {"wide_out": at_out, "wide_lse": at_lse},
        wide_rows=split_rows,
        tiles=Pointer(RUNS, 4 * layout.tiles),
        runs=Pointer(RUNS),
        edges=Pointer(EDGES),
        split_shifts=Pointer(RUNS, 4 * layout.shifts),
        remote_begin=NO_REMOTE_KEYS,
    )
    params = MERGE.pack(
        split_out=at_out,
        split_lse=at_lse,
        out=Pointer(OUT),
        lse=Pointer(LSE),
        cuts=Pointer(RUNS, 4 * layout.cuts),
        out_row_stride=out.stride[0],
        out_head_stride=out.stride[1],
        num_cuts=num_cuts,
        tile_rows=tile_rows,
        num_heads=nheads_q,
        total_q=total_q,
        split_rows=split_rows,
    )
    num_threads = num_cuts * tile_rows * nheads_q * head_dim_v // 4
    merge = Launch(
        load_function(merge_variant(head_dim_v, problem.dtype), device_index),
        min(-(-num_threads // _MERGE_THREADS), _MERGE_BLOCKS * num_sms(device_index)),
        _MERGE_THREADS,
        params,
        shared_bytes=0,
        may_start_early=True,
    )
    return Call((out, lse, of_splits, *ticket), (walk, merge))
