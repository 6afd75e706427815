"""A forward pass that begins before some of its keys are there:
two launches side by side that share the tiles of one plan.

    in front of the arrival    tiles that see local keys alone, then, of others, the local split, which leaves in fp32;
                               once the other launch runs, what that one takes
    behind the arrival         tiles that see remote keys, merged with their local split, if there is one; the others

Local keys are there from the start, remote keys are not. Nothing waits inside a kernel for them, so that thread blocks
never hold SMs that the remote keys need to get here: a block that finds nothing to do ends, and one of the other launch
takes its place. The first launch leaves at least one SM to the other, which by beginning says that remote keys are
there. How long they take need not be known; a tile that is cut in two costs another pass over its rows, and no more are
than it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.heuristics import forward_config, plan_tiles
from magi_compile.kernels.plan import PlanTiles, check_tiles
from magi_compile.kernels.sm90.forward.launch import (
    EDGES,
    LSE,
    OTHER,
    OUT,
    RUNS,
    TILES,
    forward_fields,
    forward_variant,
    results_of,
    schedule_of,
)
from magi_compile.kernels.sm90.params import EARLY_FORWARD, EARLY_TILES
from magi_compile.kernels.sm90.runtime.calls import Buffer, Call, Launch, addresses_of, allocate
from magi_compile.kernels.sm90.runtime.driver import (
    Layout,
    are_tma_layouts,
    check_remote_keys,
    current_stream,
    load_function,
    num_sms,
    on_device,
    routed,
)
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import Pointer
from magi_compile.plan import cost
from magi_compile.plan.padding import size_to_sort
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS, Walk

#: In place of the number of a split, as in csrc/sm90/common/tile_plan.cuh.
NO_SPLIT = -1
#: Of how many tiles one at most is cut in two: bounds the memory of their splits.
TILES_OF_A_SPLIT = 2

# More buffers: in place of prior outputs, which are made here, and behind the output and its lse.
_REMOTE_K, _REMOTE_V = 6, 7
_SPLIT_OUT, _SPLIT_LSE, _COUNTERS, _REMOTE_SPLITS, _LOCAL_TILES, _SPLIT_TILES = range(
    OTHER, OTHER + 6
)
# In words, the counters of a call: a ticket of each list, then how many splits were begun, then how many warps have
# stored each.
_NUM_BEGUN, _NUM_STORED = 3, 4
_NO_BLOCK = 2**31 - 1  # begins behind the arrival
_LISTS_THREADS = 512  # as in csrc/sm90/planner/early_tiles.cu


class EarlyPlan(NamedTuple):
    """The q walk of a plan, by what it needs of remote keys. Lists are longest first, with padding behind."""

    remote_tiles: Tensor  # int32 [num_tiles, 4]: those that see remote keys
    # int32 [num_tiles, 2], of these: the first remote run, and which split the local runs are, or NO_SPLIT
    remote_splits: Tensor
    local_tiles: Tensor  # int32 [num_tiles, 4]: those that do not
    split_tiles: Tensor  # int32 [num_splits, 4]: local runs of tiles that see both
    runs: Tensor  # int32 [num_runs, 12], the local ones of each tile first
    edges: Tensor  # int32 [total_q, NUM_LANES, 2]
    remote_begin: int
    tiles: PlanTiles  # that it was made for


def early_plan(walk: Walk, tiles: PlanTiles, remote_begin: int) -> EarlyPlan:
    """Cuts the q walk of a plan, on its GPU, on torch's current stream; nothing waits for the device.

    Args:
        walk: with at least one tile; no run has both local and remote columns.
        tiles: their sizes.
        remote_begin: the first remote column.

    Returns:
        The plan of an early forward.
    """
    q_tiles, q_runs, edges = walk
    device = q_tiles.device
    with on_device(device):
        call = _lists_call(q_tiles.shape[0], q_runs.shape[0], remote_begin, device.index)
        runs, remote, remote_splits, local, splits, _ = call.run([q_tiles, q_runs], device)
    return EarlyPlan(remote, remote_splits, local, splits, runs, edges, remote_begin, tiles)


@cache
def early_tiles_variant() -> Variant:
    """The kernel that cuts the walk."""
    defines = {f"FFA_{name}_COST": getattr(cost, f"{name}_COST") for name in ("BLOCK", "MASK")}
    return Variant.of("planner/early_tiles.cu", "ffa_early_tiles", defines)


@lru_cache(maxsize=1024)
def _lists_call(num_tiles: int, num_runs: int, remote_begin: int, device_index: int) -> Call:
    """The call that cuts a walk of such sizes: of its tiles and runs it makes runs, the lists, and what it notes."""
    num_splits = min(num_tiles // TILES_OF_A_SPLIT + 1, num_tiles)
    num_sorted = size_to_sort(num_tiles)
    made = (
        Buffer.of((num_runs, len(RUN_FIELDS)), torch.int32),
        Buffer.of((num_tiles, len(TILE_FIELDS)), torch.int32),
        Buffer.of((num_tiles, 2), torch.int32),
        Buffer.of((num_tiles, len(TILE_FIELDS)), torch.int32),
        Buffer.of((num_splits, len(TILE_FIELDS)), torch.int32),
        Buffer.of((2 * num_sorted + 3 * num_tiles,), torch.int32),
    )
    names = ("tiles", "runs", "parted_runs", "remote_tiles", "remote_splits", "local_tiles")
    pointers = {name: Pointer(i) for i, name in enumerate((*names, "split_tiles", "order"))}
    for i, name in enumerate(("run_mid", "split_of", "before")):
        pointers[name] = Pointer(len(names) + 1, 4 * (2 * num_sorted + i * num_tiles))
    params = EARLY_TILES.pack(
        **pointers,
        num_tiles=num_tiles,
        num_splits=num_splits,
        num_sorted=num_sorted,
        remote_begin=remote_begin,
    )
    function = load_function(early_tiles_variant(), device_index)
    shared_bytes = _LISTS_THREADS // 32 * 4
    return Call(made, (Launch(function, 1, _LISTS_THREADS, params, shared_bytes=shared_bytes),))


class EarlyForward:
    """Attention of `q` over local and remote keys, on torch's current stream and on another that it then waits for, in
    steps: see `magi_compile.kernels.overlap.ForwardSteps`.

    Args:
        q: `[total_q, nheads_q, head_dim]`, not empty.
        keys: local keys `[total_local, nheads_kv, head_dim]` and their values, not empty.
        remote: remote keys and values; not empty.
        plan: of the mask over local and remote keys.
        problem: what `HopperKernel.refusals` finds nothing against.
        free_sms: that are left to what brings remote keys; one at least computes.
        deterministic: no tile is cut in two, so that the result does not depend on when remote keys come, bit by bit.
        max_scores: see `forward`.

    Raises:
        ValueError: if TMA cannot read `remote` as it lies, or if `plan` is for other tiles than those of `problem`.
    """

    def __init__(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        remote: Sequence[Tensor],
        plan: EarlyPlan,
        problem: AttnProblem,
        *,
        free_sms: int = 0,
        deterministic: bool = False,
        max_scores: Tensor | None = None,
    ):
        assert (max_scores is not None) == problem.has_max_scores
        check_remote_keys(*remote)
        check_tiles(plan.tiles, plan_tiles(problem))
        if deterministic:
            plan = plan._replace(split_tiles=plan.split_tiles[:0])
        num_tiles, num_splits = plan.remote_tiles.shape[0], plan.split_tiles.shape[0]
        has_stairs = plan.edges.shape[0] > 0
        sizes = (num_tiles, num_splits, plan.remote_begin, max(free_sms, 1), has_stairs)
        self._device = q.device
        with on_device(q.device):
            (q, *local_and_remote), self._call = routed(_call, (q, *keys, *remote), problem, *sizes)
            k, v, *remote = local_and_remote
            self._stream = current_stream(q.device)
            self._made = allocate(self._call.made, q.device, self._stream)
            self._here, self._beside = _compat.current_stream(q.device), _stream(q.device)
        given = (q, k, v, plan.remote_tiles, plan.runs, plan.edges, *remote, None, max_scores)
        walk = (plan.remote_splits, plan.local_tiles, plan.split_tiles)
        self._held = (*given, *self._made, *walk)  # until all of it is enqueued
        self._addresses = addresses_of(self._held)

    def begin(self) -> None:
        """Launches the kernel in front of the arrival."""
        self._beside.wait_stream(self._here)
        with on_device(self._device):
            self._call.in_front(self._addresses, self._stream)

    def beside(self) -> AbstractContextManager[object]:
        """Makes the other stream the current one."""
        return _compat.on_stream(self._beside)

    def main(self) -> None:
        """Launches the kernel behind the arrival."""
        with on_device(self._device):
            self._call.behind(self._addresses, current_stream(self._device))

    def finish(self) -> ForwardOutput:
        """Makes the stream of the call wait for both."""
        self._here.wait_stream(self._beside)
        out, lse, *_ = self._made
        return ForwardOutput(out, lse)


class _EarlyCall(NamedTuple):
    """Both launches, and what they need: the output and its lse, those of splits, and counters."""

    made: tuple[Buffer, ...]
    in_front: Launch
    behind: Launch


@lru_cache(maxsize=1024)
def _call(
    layouts: tuple[Layout, ...],
    problem: AttnProblem,
    num_tiles: int,
    num_splits: int,
    remote_begin: int,
    free_sms: int,
    has_stairs: bool,
    device_index: int,
) -> _EarlyCall | None:
    """The prepared call for tensors q, k, v and remote keys and values of such layouts; None where TMA cannot read
    them."""
    if not are_tma_layouts(layouts, problem.dtype):
        return None
    _, (local_shape, _), _, (remote_shape, _), _ = layouts
    nheads_q, head_dim_v = problem.nheads_q, problem.head_dim_v
    config, sms = forward_config(problem), num_sms(device_index)
    split_rows, num_counters = num_splits * config.tile_rows, _NUM_STORED + num_splits * nheads_q
    made = (
        *results_of(layouts[0], problem),
        Buffer.of((split_rows, nheads_q, head_dim_v), torch.float32),
        Buffer.of((nheads_q, split_rows), torch.float32),
        Buffer.of((num_counters,), torch.int32, zeros=num_counters),
    )

    def counter(number: int) -> Pointer:
        return Pointer(_COUNTERS, 4 * number)

    local, remote = local_shape[0], remote_shape[0]
    lists = [
        {"tiles": Pointer(buffer), "ticket": counter(number)}
        | schedule_of(problem, total_k, num, sms)
        for number, (buffer, num, total_k) in enumerate(
            (
                (TILES, num_tiles, local + remote),
                (_LOCAL_TILES, num_tiles, local),
                (_SPLIT_TILES, num_splits, local),
            )
        )
    ]

    def launch(num_free: int, first_behind: int) -> Launch:
        grid = min(num_tiles * nheads_q, max(1, sms - num_free))
        schedule = schedule_of(problem, local + remote, num_tiles, max(1, sms - num_free))
        params = EARLY_FORWARD.pack(
            **forward_fields(layouts, problem, config, made[0], (_REMOTE_K, _REMOTE_V)),
            out_rows=Pointer(OUT),
            lse=Pointer(LSE),
            wide_out=Pointer(_SPLIT_OUT),
            wide_lse=Pointer(_SPLIT_LSE),
            prior_out=Pointer(_SPLIT_OUT),
            prior_lse=Pointer(_SPLIT_LSE),
            wide_rows=split_rows,
            runs=Pointer(RUNS),
            edges=Pointer(EDGES),
            split_shifts=None,
            schedule=schedule | {"tiles": Pointer(TILES), "ticket": None},
            remote_begin=remote_begin,
            lists=lists,
            remote_tiles=Pointer(_REMOTE_SPLITS),
            num_begun_splits=counter(_NUM_BEGUN),
            num_stored=counter(_NUM_STORED),
            split_rows=config.tile_rows,
            first_behind=first_behind,
        )
        variant = forward_variant(problem, config, has_stairs=has_stairs, is_early=True)
        return Launch(load_function(variant, device_index), grid, config.num_threads, params)

    return _EarlyCall(made, launch(free_sms, _NO_BLOCK), launch(0, 0))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the launches behind arrivals."""
    return torch.cuda.Stream(device, priority=-1)
