"""The plan by `csrc/sm90/tile_plan.cu`: what `build_tile_plan` gives in padded form, in one launch."""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import require
from magi_compile.kernels.cuda.launch import launch, load_function
from magi_compile.kernels.cuda.nvrtc import Variant
from magi_compile.kernels.heuristics import PlanTiles
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan import cost
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS, PaddedSizes, TilePlan, padded_sizes

_THREADS = 1024
# The fields of TilePlanParams, and those of a Walk.
_SLICES, _WALK = struct.Struct("<4Q"), struct.Struct("<3Q8i")


class Launch(NamedTuple):
    """What the kernel is called with, and what holds the memory that `params` points to."""

    params: bytearray
    plan: TilePlan
    fits: Tensor  # bool [2], of the q walk and the k walk: whether the runs had room
    inputs: AttnSlices
    scratch: list[Tensor]
    room: PaddedSizes


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
    with torch.cuda.device(device):
        prepared = prepare(slices, sizes)
        function = load_function(planner_variant(), device.index)
        stream = torch.cuda.current_stream(device).cuda_stream
        launch(function, 2, _THREADS, prepared.params, stream, shared_bytes=_THREADS // 32 * 4)
    require([prepared.room.check(prepared.fits.all())])
    return prepared.plan


def prepare(slices: AttnSlices, sizes: PlanTiles) -> Launch:
    """The memory for a plan, and the parameters of the kernel, on the device of `slices`."""
    device = slices.q_ranges.device
    inputs = AttnSlices(
        slices.q_ranges.contiguous(),
        slices.k_ranges.contiguous(),
        slices.mask_types.contiguous(),
        slices.seqlen_q,
        slices.seqlen_k,
    )
    num_slices = slices.mask_types.shape[0]
    fits = torch.empty(2, dtype=torch.bool, device=device)
    tensors: list[Tensor] = []
    scratch: list[Tensor] = []
    walks = b""
    for total_rows, tile_rows, block_cols in (
        (slices.seqlen_q, sizes.q_tile_rows, sizes.q_block_cols),
        (slices.seqlen_k, sizes.k_tile_rows, sizes.k_block_cols),
    ):
        room = padded_sizes(max(num_slices, 1), total_rows, tile_rows)
        num_sorted = 1 << max(room.num_tiles - 1, 0).bit_length()
        tiles = torch.empty(room.num_tiles, len(TILE_FIELDS), dtype=torch.int32, device=device)
        runs = torch.empty(room.num_runs, len(RUN_FIELDS), dtype=torch.int32, device=device)
        words = (
            2 * num_sorted
            + 5 * room.num_runs
            + 2 * (total_rows // 32 + 1)
            + 2 * room.num_regions
            + 1
            + 7 * room.num_tiles
            + num_slices
        )
        scratch.append(torch.empty(words, dtype=torch.int32, device=device))
        tensors += (tiles, runs)
        walks += _WALK.pack(
            tiles.data_ptr(),
            runs.data_ptr(),
            scratch[-1].data_ptr(),
            *(room.num_tiles, room.num_runs, room.num_regions),
            *(total_rows, tile_rows, block_cols),
            *(num_sorted, num_slices),
        )
    pointers = (t.data_ptr() for t in (inputs.q_ranges, inputs.k_ranges, inputs.mask_types, fits))
    params = bytearray(_SLICES.pack(*pointers) + walks)
    return Launch(params, TilePlan(*tensors), fits, inputs, scratch, room)
