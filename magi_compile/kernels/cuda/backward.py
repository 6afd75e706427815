"""The launches of the backward kernels of `csrc/sm90/bwd*`."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from cuda.bindings import driver
from torch import Tensor

from magi_compile.kernels.base import (
    AttnProblem,
    BackwardOutput,
    KeyTensors,
    Signals,
)
from magi_compile.kernels.cuda.backward_scratch import DQ_GROUP_ROWS, STATS_BYTES, Scratch
from magi_compile.kernels.cuda.backward_variants import (
    STREAM_THREADS,
    backward_variants,
    rounds_dq,
)
from magi_compile.kernels.cuda.backward_walks import TwoLists, turns_of_tiles
from magi_compile.kernels.cuda.launch import (
    TENSOR_MAP_BYTES,
    check,
    check_far_keys,
    current_stream,
    is_tma_layout,
    launch,
    load_function,
    num_sms,
    on_device,
    tensor_map,
    tma_compatible,
)
from magi_compile.kernels.heuristics import (
    BACKWARD_ROWS,
    BackwardConfig,
    BackwardPasses,
    BackwardSections,
    backward_config,
    backward_passes,
    backward_sections,
    plan_tiles,
)
from magi_compile.kernels.plan_sizes import check_sizes

_STORE_ROWS = 16  # each warp stores its own rows
_BLOCKS_PER_SM = 8  # of the kernel after
# What follows the seven tensor maps in BackwardParams: dk and dv, what the kernel behind it is told of dq too, other addresses,
# what a route knows, and lists of tiles, to the end of the struct.
_GRADIENTS, _DQ_ITEMS = struct.Struct("<2Q"), struct.Struct("<Qi4xQ3if")
_ADDRESSES, _SCALARS, _TILE_LIST = (
    struct.Struct("<8Q"),
    struct.Struct("<i2f4x"),
    struct.Struct("<6Q2i"),
)
_ALIGNMENT = 64  # of a struct with tensor maps
_MAX_KNOWN_MAPS = 256
_MOST_TILES_HANDED_ON = 2**15 - 1  # an entry of an agenda has 16 bits for its slot
_PREPROCESS = struct.Struct("<6Qi4x3Q4qif")
_AGENDA = struct.Struct("<7Q2iQ10iQ")  # what follows for each of them
_PROGRESS = struct.Struct("<Q")  # what follows them in PostprocessParams


class _Route(NamedTuple):
    """What the launches need besides addresses, for tensors of one layout."""

    preprocess: driver.CUfunction
    main: driver.CUfunction
    postprocess: driver.CUfunction
    config: BackwardConfig
    rounds_dq: bool
    grid: int  # of thread blocks, or of clusters of them
    num_sms: int
    sections: BackwardSections
    passes: BackwardPasses
    scalars: bytes
    scratch: Scratch
    maps: dict[tuple[object, ...], bytes]  # tensor maps, by where their tensors lie


@lru_cache(maxsize=1024)
def _route(
    problem: AttnProblem,
    deterministic: bool,
    layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    num_tiles: int,
    num_lists: int,
    device_index: int,
) -> _Route | None:
    """How tensors of such layouts (the shape and the strides of q, dout and out) are launched; None where TMA can not
    read them."""
    if not all(is_tma_layout(shape, stride, problem.dtype) for shape, stride in layouts):
        return None
    variants = backward_variants(problem, deterministic, has_far_tiles=num_lists > 1)
    before, main, after = (load_function(variant, device_index) for variant in variants)
    config = backward_config(problem)
    score_scale = problem.softcap or problem.softmax_scale
    sms = num_sms(device_index)
    scalars = _SCALARS.pack(
        problem.qhead_per_kvhead,
        score_scale * math.log2(math.e),
        problem.softmax_scale / problem.softcap if problem.softcap else 0.0,
    )
    # Thread blocks, or clusters of them, of which each works on a tile; that has a part for each query head at most.
    places = sms // config.num_ctas
    grid = min(num_tiles * problem.nheads_q, places)
    sections = backward_sections(problem, num_tiles, places, num_lists)
    passes = backward_passes(problem, num_tiles, sections, places)
    if deterministic or num_lists > 1 or num_tiles > _MOST_TILES_HANDED_ON:
        passes = BackwardPasses()
    padded_q = _padded(layouts[0][0][0])
    scratch = Scratch.of(
        problem, padded_q, num_tiles, num_lists, sections.heads, grid, passes.most_heads > 0
    )
    rounds = rounds_dq(config, deterministic)
    return _Route(
        *(before, main, after, config, rounds, grid, sms, sections),
        *(passes, scalars, scratch, {}),
    )


def _padded(rows: int) -> int:
    return -(-rows // DQ_GROUP_ROWS) * DQ_GROUP_ROWS


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_tiles: Tensor,
    k_runs: Tensor,
    k_edges: Tensor,
    problem: AttnProblem,
    *,
    deterministic: bool = False,
) -> BackwardOutput:
    """Gradients of attention over the k walk of a plan, on torch's current stream.

    dk and dv repeat bit for bit. dq is summed up by many thread blocks, in any order, or in that of the tiles where
    `deterministic` is set.
    """
    dk, dv = (x.new_empty(x.shape) for x in (k, v))
    if q.shape[0] == 0 or k.shape[0] == 0:
        return BackwardOutput(torch.zeros_like(q), dk.zero_(), dv.zero_())
    with on_device(q.device):
        # Each launch begins while the one in front of it ends.
        launches = _Launches(
            *(dout, dlse, q, out, lse, [k_tiles], k_runs, k_edges, problem, deterministic)
        )
        launches.main(KeyTensors(k, v, dk, dv), may_start_early=True)
        return BackwardOutput(launches.end(may_start_early=True), dk, dv)


def backward_in_phases(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    arrive: Callable[[], Sequence[Tensor]],
    depart: Callable[[Tensor, Tensor], None],
    out: Tensor,
    lse: Tensor,
    k_tiles: Tensor,
    k_runs: Tensor,
    k_edges: Tensor,
    problem: AttnProblem,
    *,
    deterministic: bool = False,
) -> Tensor:
    """`backward` with work of other streams between its launches, see `PhasedKernel`; returns dq."""
    with on_device(q.device):
        launches = _Launches(
            *(dout, dlse, q, out, lse, [k_tiles], k_runs, k_edges, problem, deterministic)
        )
        keys = KeyTensors(*arrive())
        launches.main(keys)
        depart(keys.dk, keys.dv)
        return launches.end()


def backward_early(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    keys: KeyTensors,
    signals: Signals,
    arrive: Callable[[], object],
    depart: Callable[[], object],
    out: Tensor,
    lse: Tensor,
    lists: TwoLists,
    problem: AttnProblem,
) -> Tensor:
    """`backward` with far keys that are still under way, see `EarlyKernel`; returns dq.

    Near tiles are worked on until far keys are there, and once more when far tiles are done. The main kernel is launched twice:
    what the first one finds not there, it leaves to the second, behind their arrival.
    """
    check_far_keys(keys.k, keys.v)
    check_sizes(lists.sizes, plan_tiles(problem))
    with on_device(q.device):
        tiles = [lists.near, lists.far]
        launches = _Launches(
            *(dout, dlse, q, out, lse, tiles, lists.runs, lists.edges, problem, False)
        )
        launches.main(keys, signals)
        arrive()
        launches.main(keys, signals)
        # Another stream then waits for what the kernel says, which is enqueued by now, even if streams share a queue.
        depart()
        return launches.end()


class _Launches:
    """One backward pass on torch's current stream, kernel by kernel; the first one is launched here.

    Args:
        tiles: near ones, and far ones if there are some.
        runs: of all tiles.
        edges: of the rows of all tiles.
    """

    def __init__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Sequence[Tensor],
        runs: Tensor,
        edges: Tensor,
        problem: AttnProblem,
        deterministic: bool,
    ):
        self._stream = current_stream(q.device)
        inputs, self._route = _routed((dout, q, out), tiles, problem, deterministic)
        self._inputs = dout, q, out = inputs
        self._dq = q.new_empty(q.shape)
        total_q, nheads_q, _ = q.shape
        row_groups = _padded(total_q) // DQ_GROUP_ROWS
        route, places = self._route, self._route.scratch
        self._scratch = q.new_empty(places.size // 4, dtype=torch.float32)
        self._sums = sums = self._scratch.data_ptr()
        self._items = _DQ_ITEMS.pack(
            sums,
            row_groups,
            self._dq.data_ptr(),
            total_q,
            nheads_q,
            problem.qhead_per_kvhead,
            problem.softmax_scale,
        )
        done, progress = sums + places.done, sums + places.progress
        wanted = sums + places.wanted if route.rounds_dq else 0
        self._turns = turns_of_tiles(tiles[0], runs, row_groups) if deterministic else None
        self._visits = (done, wanted, _address(self._turns), progress)
        self._runs, self._edges = runs, edges
        lse = lse.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        before = _PREPROCESS.pack(
            out.data_ptr(),
            dout.data_ptr(),
            lse.data_ptr(),
            _address(dlse),
            sums + places.stats,
            sums,
            row_groups,
            done,
            wanted,
            progress,
            *out.stride()[:2],
            *dout.stride()[:2],
            total_q,
            -math.log2(math.e) if problem.softcap else -1 / problem.softmax_scale,
        )
        self._lists = []
        for i, place in enumerate(places.agendas):
            agenda = (
                *(sums + x for x in (place.entries, place.num_entries, place.counters)),
                *(sums + places.arrivals, sums + places.partials),
                *(problem.nheads_kv, route.sections.heads),
            )
            self._lists.append(_TILE_LIST.pack(tiles[i].data_ptr(), *agenda))
            before += _AGENDA.pack(
                tiles[i].data_ptr(),
                runs.data_ptr(),
                *agenda,
                sums + place.workspace,
                tiles[i].shape[0],
                i * places.num_slots,
                places.num_slots,
                problem.qhead_per_kvhead,
                route.grid,
                deterministic,
                *route.passes,
                route.sections.at_once,
                tiles[0].data_ptr() if i > 0 else 0,
            )
        # One for each agenda at least, and one for what else is counted.
        least_blocks = -(-(len(self._lists) + 1) // nheads_q)
        launch(
            route.preprocess,
            (max(-(-total_q // BACKWARD_ROWS), least_blocks), nheads_q),
            STREAM_THREADS,
            before,
            self._stream,
            shared_bytes=STREAM_THREADS // 32 * 4,
        )

    def main(
        self,
        keys: KeyTensors,
        signals: Signals | None = None,
        *,
        may_start_early: bool = False,
    ) -> None:
        """Launches the main kernel."""
        dout, q, _ = self._inputs
        k, v = (tma_compatible(x) for x in keys[:2])
        route, stats = self._route, self._sums + self._route.scratch.stats
        addresses = tuple(x.data_ptr() for x in (q, dout, k, v, keys.dk, keys.dv))
        place = (*addresses, stats, k.shape, k.stride(), v.stride())
        maps = route.maps.get(place)
        if maps is None:
            if len(route.maps) >= _MAX_KNOWN_MAPS:
                route.maps.clear()
            cols = route.config.block_cols
            stats_map = _stats_map(stats, q.shape[1], _padded(q.shape[0]), cols)
            keys = KeyTensors(k, v, keys.dk, keys.dv)
            maps = _tensor_maps(q, dout, keys, stats_map, route.config)
            route.maps[place] = maps
        walked = self._runs.data_ptr(), self._edges.data_ptr()
        params = b"".join(
            (
                maps,
                _GRADIENTS.pack(*addresses[4:]),
                self._items,
                _ADDRESSES.pack(*self._visits, *walked, *(signals or (0, 0))),
                route.scalars,
                *self._lists,
            )
        )
        launch(
            route.main,
            route.grid * route.config.num_ctas,
            route.config.num_threads,
            params.ljust(-(-len(params) // _ALIGNMENT) * _ALIGNMENT, b"\0"),
            self._stream,
            may_start_early=may_start_early,
            cluster=route.config.num_ctas,
        )

    def end(self, *, may_start_early: bool = False) -> Tensor:
        """Launches the last kernel; dq."""
        after = self._items + _PROGRESS.pack(self._visits[-1])
        launch(
            *(self._route.postprocess, _BLOCKS_PER_SM * self._route.num_sms, STREAM_THREADS),
            *(after, self._stream),
            shared_bytes=0,
            may_start_early=may_start_early,
        )
        return self._dq


def _routed(
    inputs: tuple[Tensor, ...], tiles: Sequence[Tensor], problem: AttnProblem, deterministic: bool
) -> tuple[tuple[Tensor, ...], _Route]:
    """dout, q and out as TMA can read them, and how they are launched."""
    dout, q, out = inputs
    layouts = tuple((x.shape, x.stride()) for x in (q, dout, out))
    num_tiles, num_lists = tiles[0].shape[0], len(tiles)
    route = _route(problem, deterministic, layouts, num_tiles, num_lists, q.device.index)
    if route is None or any(x.data_ptr() % 16 for x in inputs):
        compatible = tuple(tma_compatible(x) for x in inputs)
        return _routed(compatible, tiles, problem, deterministic)
    return inputs, route


def _tensor_maps(
    q: Tensor, dout: Tensor, keys: KeyTensors, stats_map: bytes, config: BackwardConfig
) -> bytes:
    k, v, dk, dv = keys
    return b"".join(
        (
            tensor_map(q, config.block_cols),
            tensor_map(dout, config.block_cols),
            tensor_map(k, config.tile_rows // config.num_ctas),
            tensor_map(v, config.tile_rows // config.num_ctas),
            stats_map,
            tensor_map(dk, _STORE_ROWS),
            tensor_map(dv, _STORE_ROWS),
        )
    )


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@lru_cache(maxsize=4096)
def _stats_map(address: int, nheads: int, padded_rows: int, box_rows: int) -> bytes:
    """The TMA descriptor of statistics `[nheads, padded_rows / 8]`, in boxes of those of `box_rows` queries.

    A row of a box has 256 elements at most, so they are as wide as elements can be.
    """
    head_bytes, box_bytes = (n * STATS_BYTES for n in (padded_rows, box_rows))
    encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_INT64,
        3,
        address,
        [driver.cuuint64_t(n) for n in (head_bytes // 8, 1, nheads)],
        [driver.cuuint64_t(head_bytes)] * 2,
        [driver.cuuint32_t(n) for n in (box_bytes // 8, 1, 1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(check(encoded).getPtr(), TENSOR_MAP_BYTES)
