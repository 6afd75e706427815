"""The plan by `csrc/sm90/tile_plan.cu`: what `build_tile_plan` gives in padded form, in one launch."""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import flag_addresses, raise_pending
from magi_compile.kernels.cuda.launch import current_stream, launch, load_function
from magi_compile.kernels.cuda.nvrtc import Variant
from magi_compile.kernels.heuristics import PlanTiles
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan import cost
from magi_compile.plan.stairs import NUM_LANES, num_edge_rows
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS, TilePlan, padded_sizes

_THREADS = 1024
# The fields of TilePlanParams before its walks, and those of a Walk: addresses, then sizes.
_SLICES, _WALK, _WALK_SIZES = struct.Struct("<4Q"), struct.Struct("<4Q"), struct.Struct("<8i")


class _Walk(NamedTuple):
    """The sizes of one walk."""

    num_edge_rows: int
    num_tiles: int
    num_runs: int
    num_scratch: int  # int32s, an even number
    packed: bytes


class Launch(NamedTuple):
    """What the kernel is called with, and what holds the memory that `params` points to."""

    params: bytes
    plan: TilePlan
    held: tuple[Tensor, ...]


@cache
def planner_variant() -> Variant:
    """The kernel to compile."""
    costs = {name: str(getattr(cost, name)) for name in ("BLOCK_COST", "MASK_COST", "TILE_COST")}
    return Variant(
        "tile_plan.cu", "ffa_tile_plan", tuple((f"FFA_{k}", v) for k, v in costs.items())
    )


def plan_on_device(slices: AttnSlices, sizes: PlanTiles) -> TilePlan:
    """The plan of `slices` on their GPU, on torch's current stream; nothing waits for the device.

    Raises:
        MaskDataError: where more slices overlap than the plan can hold; with a later call.
    """
    device = slices.q_ranges.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return plan_on_device(slices, sizes)
    raise_pending()
    prepared = prepare(slices, sizes)
    function = load_function(planner_variant(), device.index)
    stream = current_stream(device)
    launch(function, 2, _THREADS, prepared.params, stream, shared_bytes=_THREADS // 32 * 4)
    return prepared.plan


def prepare(slices: AttnSlices, sizes: PlanTiles) -> Launch:
    """The memory for a plan, and the parameters of the kernel, on the device of `slices`."""
    device = slices.q_ranges.device
    lists = (slices.q_ranges, slices.k_ranges, slices.mask_types)
    q_ranges, k_ranges, mask_types = (x.contiguous() for x in lists)
    num_slices = mask_types.shape[0]
    flag, walks = _route(num_slices, slices.seqlen_q, slices.seqlen_k, sizes, device)
    num_scratch = sum(walk.num_scratch for walk in walks)
    scratch = torch.empty(num_scratch, dtype=torch.int32, device=device)
    params = _SLICES.pack(q_ranges.data_ptr(), k_ranges.data_ptr(), mask_types.data_ptr(), flag)
    tensors: list[Tensor] = []
    address = scratch.data_ptr()
    for walk in walks:
        tiles = torch.empty((walk.num_tiles, len(TILE_FIELDS)), dtype=torch.int32, device=device)
        runs = torch.empty((walk.num_runs, len(RUN_FIELDS)), dtype=torch.int32, device=device)
        edges = torch.empty((walk.num_edge_rows, NUM_LANES, 2), dtype=torch.int32, device=device)
        tensors += (tiles, runs, edges)
        params += _WALK.pack(*(x.data_ptr() for x in tensors[-3:]), address) + walk.packed
        address += 4 * walk.num_scratch
    return Launch(params, TilePlan(*tensors), (q_ranges, k_ranges, mask_types, scratch))


@lru_cache(maxsize=1024)
def _route(
    num_slices: int, seqlen_q: int, seqlen_k: int, sizes: PlanTiles, device: torch.device
) -> tuple[int, tuple[_Walk, ...]]:
    """What depends on sizes alone: the address of the flag, and both walks."""
    walks = []
    q_edge_rows = num_edge_rows(max(num_slices, 1), seqlen_q, sizes.q_tile_rows)
    for total_rows, edge_rows, tile_rows, block_cols in (
        (seqlen_q, q_edge_rows, sizes.q_tile_rows, sizes.q_block_cols),
        (seqlen_k, seqlen_k, sizes.k_tile_rows, sizes.k_block_cols),
    ):
        room = padded_sizes(max(num_slices, 1), total_rows, tile_rows)
        num_sorted = 1 << max(room.num_tiles - 1, 0).bit_length()
        num_scratch = (
            2 * num_sorted
            + 15 * room.num_runs
            + 2 * (total_rows // 32 + 1)
            + 5 * room.num_regions
            + 2
            + 10 * room.num_tiles
            + 17 * num_slices
            + num_slices // 32
            + 3
        )
        packed = _WALK_SIZES.pack(
            *(room.num_tiles, room.num_runs, room.num_regions),
            *(total_rows, tile_rows, block_cols),
            *(num_sorted, num_slices),
        )
        num_scratch += num_scratch % 2
        walks.append(_Walk(edge_rows, room.num_tiles, room.num_runs, num_scratch, packed))
    (flag,) = flag_addresses(device, [(room.message, "")])
    return flag, tuple(walks)
