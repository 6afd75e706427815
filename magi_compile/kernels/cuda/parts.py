"""Long tiles in parts, where tiles and heads are too few to keep the SMs busy: some tiles of the q walk are cut along their
blocks, the forward leaves what it finds in fp32, and one more launch merges it.

How many parts there may be follows from shapes; which tiles are cut, the GPU decides (`csrc/sm90/tile_parts.cu`).
"""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from cuda.bindings import driver
from torch import Tensor

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.cuda.forward import ELEMENTS, Places, enqueue_at
from magi_compile.kernels.cuda.launch import current_stream, launch, load_function, num_sms
from magi_compile.kernels.cuda.nvrtc import Variant
from magi_compile.kernels.heuristics import (
    PART_LEAST_BLOCKS,
    PARTS_MOST_TILES,
    PlanTiles,
    forward_config,
    forward_parts,
)
from magi_compile.plan import cost
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS

CUT_FIELDS = ("row_begin", "row_end", "part_row", "num_parts")  # as in csrc/sm90/plan.cuh
_CUT_THREADS, _MOST_SMS = 512, 160  # as in csrc/sm90/tile_parts.cu
_MERGE_THREADS, _MERGE_BLOCKS = 256, 4  # blocks of an SM
_CUT_PARAMS = struct.Struct("<6Q7i4x")
_MERGE_ADDRESSES, _MERGE_SCALARS = struct.Struct("<5Q"), struct.Struct("<5i4x")


class PartLayout(NamedTuple):
    """Where in the one int32 tensor of a plan things lie, in words: runs come first. All ints or SymInts."""

    num_parts: int  # that there is room for, an even number
    num_tiles: int
    tiles: int
    cuts: int
    shifts: int
    size: int

    @staticmethod
    def of(num_tiles: int, num_runs: int, num_parts: int) -> PartLayout:
        """For parts of so many tiles and runs: see TilePartsParams."""
        num_tiles = num_tiles + num_parts
        tiles = len(RUN_FIELDS) * (2 * num_runs + num_parts)
        cuts = tiles + len(TILE_FIELDS) * num_tiles
        shifts = cuts + len(CUT_FIELDS) * (num_parts // 2)
        return PartLayout(num_parts, num_tiles, tiles, cuts, shifts, shifts + num_tiles)

    @staticmethod
    @lru_cache(maxsize=1024)
    def of_size(num_tiles: int, num_runs: int, size: int) -> PartLayout:
        """With as many parts as there is room for."""
        of_none, of_two = PartLayout.of(num_tiles, num_runs, 0).size, PartLayout.of(0, 0, 2).size
        return PartLayout.of(num_tiles, num_runs, 2 * ((size - of_none) // of_two))


class _Route(NamedTuple):
    """What a call needs besides addresses."""

    layout: PartLayout
    part_rows: int
    part_lse: int  # where it begins in the memory of parts, in words, behind their outputs
    part_words: int
    merge: driver.CUfunction
    merge_grid: int
    merge_scalars: bytes


@cache
def parts_variant() -> Variant:
    """The kernel that cuts tiles."""
    names = ("BLOCK", "MASK", "TILE", "PART", "MERGE", "MERGE_LAUNCH")
    defines = {f"FFA_{name}_COST": getattr(cost, f"{name}_COST") for name in names}
    defines["FFA_MOST_TILES"] = PARTS_MOST_TILES
    return Variant(
        "tile_parts.cu", "ffa_tile_parts", tuple((k, str(v)) for k, v in defines.items())
    )


@cache
def merge_variant(head_dim: int, dtype: torch.dtype) -> Variant:
    """The kernel that merges parts."""
    defines = (("FFA_ELEMENT", ELEMENTS[dtype]), ("FFA_HEAD_DIM", str(head_dim)))
    return Variant("fwd_merge.cu", "ffa_forward_merge", defines)


def cut_tiles(
    q_tiles: Tensor, q_runs: Tensor, seqlen_k: int, sizes: PlanTiles, problem: AttnProblem
) -> Tensor:
    """The q walk of a plan with tiles in parts, int32, in a `PartLayout`; empty where `problem` needs none.

    On torch's current stream; nothing waits for the device, and fake tensors have a fake result.
    """
    device = q_tiles.device
    is_fake = _compat.is_fake(q_tiles)
    size_of = _size if is_fake else _known_size
    size = size_of(problem, seqlen_k, q_tiles.shape[0], q_runs.shape[0], device)
    parts = torch.empty(size, dtype=torch.int32, device=device)
    if is_fake or size == 0:
        return parts
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return cut_tiles(q_tiles, q_runs, seqlen_k, sizes, problem)
    sms_of_head = num_sms(device.index) // problem.nheads_q
    params = pack_cut(q_tiles, q_runs, parts, sizes, sms_of_head)
    function, stream = load_function(parts_variant(), device.index), current_stream(device)
    launch(function, 1, _CUT_THREADS, params, stream, shared_bytes=_CUT_THREADS // 32 * 4)
    return parts


def _size(
    problem: AttnProblem, seqlen_k: int, num_tiles: int, num_runs: int, device: torch.device
) -> int:
    """How many words the parts of a plan take."""
    if device.type != "cuda":
        return 0
    num_parts = forward_parts(problem, seqlen_k, num_tiles, num_sms(device.index))
    return torch.sym_min(1, num_parts) * PartLayout.of(num_tiles, num_runs, num_parts).size


_known_size = lru_cache(maxsize=1024)(_size)


def pack_cut(
    q_tiles: Tensor, q_runs: Tensor, parts: Tensor, sizes: PlanTiles, sms_of_head: int
) -> bytes:
    """The parameters of the kernel that fills `parts`."""
    num_tiles, num_runs = q_tiles.shape[0], q_runs.shape[0]
    layout = PartLayout.of_size(num_tiles, num_runs, parts.shape[0])
    at = parts.data_ptr()
    return _CUT_PARAMS.pack(
        q_tiles.data_ptr(),
        q_runs.data_ptr(),
        at,
        at + 4 * layout.tiles,
        at + 4 * layout.cuts,
        at + 4 * layout.shifts,
        num_tiles,
        num_runs,
        layout.num_parts,
        min(sms_of_head, _MOST_SMS),
        PART_LEAST_BLOCKS,
        sizes.q_tile_rows,
        sizes.q_block_cols,
    )


@lru_cache(maxsize=1024)
def _route(
    problem: AttnProblem,
    total_q: int,
    num_tiles: int,
    num_runs: int,
    size: int,
    device_index: int,
) -> _Route:
    layout = PartLayout.of_size(num_tiles, num_runs, size)
    tile_rows, nheads_q = forward_config(problem).tile_rows, problem.nheads_q
    part_rows, num_cuts = layout.num_parts * tile_rows, layout.num_parts // 2
    part_lse = part_rows * nheads_q * problem.head_dim
    num_threads = num_cuts * tile_rows * nheads_q * problem.head_dim // 4
    return _Route(
        layout,
        part_rows,
        part_lse,
        part_lse + part_rows * nheads_q,
        load_function(merge_variant(problem.head_dim, problem.dtype), device_index),
        min(-(-num_threads // _MERGE_THREADS), _MERGE_BLOCKS * num_sms(device_index)),
        _MERGE_SCALARS.pack(num_cuts, tile_rows, nheads_q, total_q, part_rows),
    )


def forward_in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    q_runs: Tensor,
    q_edges: Tensor,
    parts: Tensor,
    problem: AttnProblem,
) -> ForwardOutput:
    """Attention of `q [total_q, nheads_q, head_dim]` over the `parts` of a plan, which are not empty, on torch's current
    stream; see `forward`."""
    device = q.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return forward_in_parts(q, k, v, q_tiles, q_runs, q_edges, parts, problem)
    total_q, nheads_q, _ = q.shape
    num_tiles, num_runs = q_tiles.shape[0], q_runs.shape[0]
    route = _route(problem, total_q, num_tiles, num_runs, parts.shape[0], device.index)
    layout = route.layout
    out = q.new_empty(q.shape)
    lse = q.new_empty((nheads_q, total_q), dtype=torch.float32)
    of_parts = q.new_empty(route.part_words, dtype=torch.float32)
    part_out, at, at_out, at_lse = (x.data_ptr() for x in (of_parts, parts, out, lse))
    part_lse = part_out + 4 * route.part_lse
    places = Places(
        out=at_out,
        lse=at_lse,
        wide_out=part_out,
        wide_lse=part_lse,
        prior_out=0,
        prior_lse=0,
        wide_rows=route.part_rows,
        runs=at,
        edges=q_edges.data_ptr(),
        part_shifts=at + 4 * layout.shifts,
        tiles=at + 4 * layout.tiles,
    )
    enqueue_at(q, k, v, None, out, layout.num_tiles, places, problem)
    addresses = _MERGE_ADDRESSES.pack(part_out, part_lse, at_out, at_lse, at + 4 * layout.cuts)
    launch(
        *(route.merge, route.merge_grid, _MERGE_THREADS, addresses + route.merge_scalars),
        current_stream(device),
        shared_bytes=0,
        may_start_early=True,
    )
    return ForwardOutput(out, lse)
