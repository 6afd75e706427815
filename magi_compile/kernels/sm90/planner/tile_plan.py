"""The plan by `csrc/sm90/planner/tile_plan.cu`: what `build_tile_plan` gives in padded form, in one launch."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from magi_compile._checks import flag_addresses, raise_pending
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.plan import Plan, PlanLayout, PlanTiles, shape_of, strides_of, unpack
from magi_compile.kernels.sm90.forward.split_kv import (
    cut_launch,
    has_splits,
    size_of_splits,
    split_variant,
)
from magi_compile.kernels.sm90.params import TILE_PLAN
from magi_compile.kernels.sm90.runtime.calls import Buffer, Call, Launch
from magi_compile.kernels.sm90.runtime.driver import load_function, on_device
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import Pointer
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan import cost
from magi_compile.plan.bit_runs import room_for_bits
from magi_compile.plan.padding import size_to_sort
from magi_compile.plan.stairs import num_edge_rows
from magi_compile.plan.tiles import PaddedSizes, padded_sizes

_THREADS, _THREADS_WITH_BITS = 1024, 512


@cache
def planner_variant(has_bits: bool = False) -> Variant:
    """The kernel to compile; `has_bits` where slices may have bit blocks."""
    costs = {f"FFA_{x}": getattr(cost, x) for x in ("BLOCK_COST", "MASK_COST", "TILE_COST")}
    return Variant.of("planner/tile_plan.cu", "ffa_tile_plan", {**costs, "FFA_HAS_BITS": has_bits})


def plan_variants(plan: Plan, problem: AttnProblem) -> tuple[Variant, ...]:
    """The kernels that make a plan like this one."""
    planner = planner_variant(problem.has_bits)
    return (planner, split_variant()) if has_splits(plan) else (planner,)


def plan_on_device(
    slices: AttnSlices, sizes: PlanTiles, problem: AttnProblem | None = None
) -> Plan:
    """The plan of `slices` on their GPU, on torch's current stream, in one piece of memory;
    nothing waits for the device.

    Args:
        slices: of the mask.
        sizes: of tiles.
        problem: for which tiles of the q walk are cut into splits; None: they stay whole.

    Returns:
        The plan, packed.

    Raises:
        MaskDataError: where more slices overlap than the plan can hold; with a later call.
    """
    raise_pending()
    device = slices.q_ranges.device
    lengths = (slices.mask_types.shape[0], slices.seqlen_q, slices.seqlen_k)
    with on_device(device):
        call = _call(*lengths, slices.bits is not None, sizes, problem, device)
        packed, shape, _ = call.run([x.contiguous() for x in slices.lists], device)
    return unpack([packed, shape])


# The buffers of the call: slices, then what it makes.
_Q_RANGES, _K_RANGES, _MASK_TYPES, _PACKED, _SHAPE, _SCRATCH = range(6)


@lru_cache(maxsize=1024)
def _call(
    num_slices: int,
    seqlen_q: int,
    seqlen_k: int,
    has_bits: bool,
    sizes: PlanTiles,
    problem: AttnProblem | None,
    device: torch.device,
) -> Call:
    """The call that makes the plan."""
    rooms = _rooms(num_slices, seqlen_q, seqlen_k, sizes, has_bits=has_bits)
    q_room, k_room = rooms
    layout = _layout(rooms, seqlen_k, problem, device)
    num_splits = layout.splits
    (flag,) = flag_addresses(device, [(q_room.padded.message, "")])
    offsets, num_scratch, walks = layout.offsets, 0, []
    for room, first in ((q_room, 0), (k_room, 4)):
        tiles, runs, edges = (Pointer(_PACKED, 4 * x) for x in offsets[first : first + 3])
        walks.append(
            room.fields(num_slices, tiles, runs, edges, Pointer(_SCRATCH, 4 * num_scratch))
        )
        num_scratch += room.num_scratch(num_slices)
    params = TILE_PLAN.pack(
        q_ranges=Pointer(_Q_RANGES),
        k_ranges=Pointer(_K_RANGES),
        mask_types=Pointer(_MASK_TYPES),
        flag=flag,
        walks=walks,
    )
    function = load_function(planner_variant(has_bits), device.index)
    num_threads = _THREADS_WITH_BITS if has_bits else _THREADS
    launches = [Launch(function, 2, num_threads, params, shared_bytes=num_threads // 32 * 4)]
    if num_splits:
        assert problem is not None
        tiles, runs, _, cut = (Pointer(_PACKED, 4 * x) for x in offsets[:4])
        counts = (layout.q_tiles, layout.q_runs, num_splits)
        launches.append(cut_launch((tiles, runs, cut), counts, sizes, problem, device.index))
    shape = shape_of(sizes, layout)
    made = (
        Buffer.of((offsets[-1],), torch.int32),
        Buffer(shape, strides_of(shape), torch.int32),
        Buffer.of((num_scratch,), torch.int32),
    )
    return Call(made, tuple(launches))


def plan_of_sizes(
    num_slices: int,
    seqlen_q: int,
    seqlen_k: int,
    sizes: PlanTiles,
    problem: AttnProblem,
    device: torch.device,
) -> Plan:
    """A plan with tensors where `plan_on_device` gives some for so many slices, and empty ones elsewhere.

    Args:
        num_slices: how many.
        seqlen_q: rows of queries.
        seqlen_k: keys.
        sizes: of tiles.
        problem: for which it is.
        device: a GPU.

    Returns:
        The plan, on the device "meta".
    """
    rooms = _rooms(num_slices, seqlen_q, seqlen_k, sizes, has_bits=problem.has_bits)
    layout = _layout(rooms, seqlen_k, problem, device)
    return _plan_on_meta(sizes, PlanLayout(*(min(rows, 1) for rows in layout)))


@cache
def _plan_on_meta(sizes: PlanTiles, layout: PlanLayout) -> Plan:
    shape = shape_of(sizes, layout)
    memory = torch.empty(layout.offsets[-1], dtype=torch.int32, device="meta")
    return unpack([memory, memory.new_empty_strided(shape, strides_of(shape))])


class _WalkRoom(NamedTuple):
    """The sizes of one walk."""

    total_rows: int
    tile_rows: int
    block_cols: int
    num_edge_rows: int
    padded: PaddedSizes
    num_bit_runs: int

    @property
    def num_runs(self) -> int:
        return self.padded.num_runs + self.num_bit_runs

    @property
    def num_sorted(self) -> int:
        """The room to sort tiles."""
        return size_to_sort(self.padded.num_tiles)

    def num_scratch(self, num_slices: int) -> int:
        """In int32s, an even number."""
        count = (
            2 * self.num_sorted
            + 15 * self.num_runs
            + 2 * (self.total_rows // 32 + 1)
            + 5 * self.padded.num_regions
            + 2
            + 10 * self.padded.num_tiles
            + 17 * num_slices
            + num_slices // 32
            + 3
        )
        return count + count % 2

    def fields(
        self, num_slices: int, tiles: Pointer, runs: Pointer, edges: Pointer, scratch: Pointer
    ) -> dict[str, Any]:
        """Those of a Walk."""
        return {
            "tiles": tiles,
            "runs": runs,
            "edges": edges if self.num_edge_rows else None,
            "scratch": scratch,
            "num_tiles": self.padded.num_tiles,
            "max_runs": self.num_runs,
            "max_bit_runs": self.num_bit_runs,
            "max_regions": self.padded.num_regions,
            "total_rows": self.total_rows,
            "tile_rows": self.tile_rows,
            "block_cols": self.block_cols,
            "num_sorted": self.num_sorted,
            "num_slices": num_slices,
        }


def _rooms(
    num_slices: int, seqlen_q: int, seqlen_k: int, sizes: PlanTiles, *, has_bits: bool
) -> tuple[_WalkRoom, _WalkRoom]:
    """The room of the q walk and of the k walk."""
    least = max(num_slices, 1)
    q_bits, k_bits = (
        room_for_bits(num_slices, rows) if has_bits else 0
        for rows in (sizes.q_tile_rows, sizes.k_tile_rows)
    )
    q_edge_rows = num_edge_rows(least, seqlen_q, sizes.q_tile_rows)
    return (
        _WalkRoom(
            *(seqlen_q, sizes.q_tile_rows, sizes.q_block_cols, q_edge_rows),
            padded_sizes(least, seqlen_q, sizes.q_tile_rows),
            q_bits,
        ),
        _WalkRoom(
            *(seqlen_k, sizes.k_tile_rows, sizes.k_block_cols, seqlen_k),
            padded_sizes(least, seqlen_k, sizes.k_tile_rows),
            k_bits,
        ),
    )


def _layout(
    rooms: tuple[_WalkRoom, _WalkRoom],
    seqlen_k: int,
    problem: AttnProblem | None,
    device: torch.device,
) -> PlanLayout:
    q_counts, k_counts = (
        (room.padded.num_tiles, room.num_runs, room.num_edge_rows) for room in rooms
    )
    num_splits = size_of_splits(problem, seqlen_k, *q_counts[:2], device) if problem else 0
    return PlanLayout(*q_counts, num_splits, *k_counts)
