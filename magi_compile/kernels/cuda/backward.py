"""The backward kernels of `csrc/sm90/bwd*`: their variants and their launches."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from cuda.bindings import driver
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, BackwardOutput
from magi_compile.kernels.cuda.forward import ELEMENTS
from magi_compile.kernels.cuda.launch import (
    TENSOR_MAP_BYTES,
    check,
    current_stream,
    is_tma_layout,
    launch,
    load_function,
    num_sms,
    tensor_map,
    tma_compatible,
)
from magi_compile.kernels.cuda.nvrtc import Variant
from magi_compile.kernels.heuristics import (
    BACKWARD_ROWS,
    BackwardConfig,
    backward_config,
    backward_heads_per_section,
)
from magi_compile.plan.tiles import RUN_FIELDS

_STORE_ROWS = 16  # each warp stores its own rows
_DQ_GROUP_ROWS = 16
_STREAM_THREADS = 256  # of a thread block before and after
_BLOCKS_PER_SM = 8  # of the kernel after
_STATS_BYTES = 12  # of a query, in csrc/sm90/bwd_stats.cuh
_ENTRY_BYTES, _ARRIVALS = 16, 8  # of csrc/sm90/bwd_agenda.cuh
_MOST_PARTIALS = 768  # parts of tiles, each for one head
_RUN_COL_END, _RUN_FIRST = (RUN_FIELDS.index(name) for name in ("col_end", "first"))
# What follows the seven tensor maps in BackwardParams: dk and dv, what the kernel behind it is told of dq too, other addresses,
# and what a route knows, to the end of the struct.
_GRADIENTS, _DQ_ITEMS = struct.Struct("<2Q"), struct.Struct("<Qi4xQ4if4x")
_ADDRESSES, _SCALARS = struct.Struct("<11Q"), struct.Struct("<3i2f20x")
_MAX_KNOWN_MAPS = 256
_PREPROCESS = struct.Struct("<6Qi4x3Q4qif7Q2iQ5i4x")
_PROGRESS = struct.Struct("<Q")  # what follows them in PostprocessParams
_WARPS = BackwardConfig.num_threads // 32  # each leaves it two items at most


@lru_cache(maxsize=1024)
def backward_variants(
    problem: AttnProblem, deterministic: bool = False
) -> tuple[Variant, Variant, Variant]:
    """The kernels to compile for `problem`: before, main, after."""
    config = backward_config(problem)
    element = {"FFA_ELEMENT": ELEMENTS[problem.dtype], "FFA_HEAD_DIM": problem.head_dim}
    rows = {**element, "FFA_ROWS": BACKWARD_ROWS}
    cols = {"FFA_BLOCK_COLS": config.block_cols}
    main = {
        **element,
        **cols,
        "FFA_STAGES": config.stages,
        "FFA_PRODUCER_REGISTERS": config.producer_registers,
        "FFA_DQ_REGISTERS": config.dq_registers,
        "FFA_CONSUMER_REGISTERS": config.consumer_registers,
        "FFA_HAS_SOFTCAP": str(problem.softcap != 0.0).lower(),
        "FFA_IS_DETERMINISTIC": str(deterministic).lower(),
        "FFA_ROUNDS_DQ": str(_rounds_dq(config, deterministic)).lower(),
    }
    return (
        _variant("bwd_preprocess.cu", "ffa_backward_preprocess", {**rows, **cols}),
        _variant("bwd.cu", "ffa_backward", main),
        _variant(
            "bwd_postprocess.cu",
            "ffa_backward_postprocess",
            {**element, "FFA_THREADS": _STREAM_THREADS},
        ),
    )


def _rounds_dq(config: BackwardConfig, deterministic: bool) -> bool:
    """Whether the main kernel makes dq; else the one behind it does."""
    return config.rounds_dq and not deterministic


class _Route(NamedTuple):
    """What the three launches need besides addresses, for tensors of one layout."""

    preprocess: driver.CUfunction
    main: driver.CUfunction
    postprocess: driver.CUfunction
    config: BackwardConfig
    grid: int
    num_sms: int
    heads_per_section: int
    scalars: bytes
    scratch: _Scratch
    maps: dict[tuple[object, ...], bytes]  # the seven tensor maps, by where their tensors lie


class _Scratch(NamedTuple):
    """Where in one allocation things lie, in bytes.

    First the sums of dq `[nheads_q, padded_q, head_dim]` in fp32, the statistics `[nheads_q, padded_q / 8]` of
    csrc/sm90/bwd_stats.cuh, and dk and dv of the parts of tiles in fp32, if there may be some; then the agenda, and
    integers: its counters and its length, how many parts have arrived, what its writer needs, the visits of
    csrc/sm90/dq_accumulator.cuh that are done and those that are wanted, and the progress of csrc/sm90/dq_rounding.cuh.
    """

    num_slots: int  # how many parts of tiles there is room for; all others are places
    stats: int
    partials: int
    entries: int
    counters: int
    num_entries: int
    arrivals: int
    workspace: int
    done: int
    wanted: int
    progress: int
    size: int

    @staticmethod
    def of(
        problem: AttnProblem, padded_q: int, num_tiles: int, heads_per_section: int, grid: int
    ) -> _Scratch:
        group = problem.qhead_per_kvhead
        num_items = num_tiles * problem.nheads_kv // heads_per_section
        most_slots = max(_MOST_PARTIALS // heads_per_section, 1)
        num_slots = min(num_items * group, most_slots) if group > 1 else 0
        num_partials = num_slots * heads_per_section
        num_waves = num_tiles * problem.nheads_kv // grid
        words = (
            problem.nheads_q * padded_q * problem.head_dim,
            problem.nheads_q * padded_q * _STATS_BYTES // 4,
            num_partials * 2 * BackwardConfig.tile_rows * problem.head_dim,
            (num_items + num_slots) * _ENTRY_BYTES // 4,
            2 + num_waves,
            1,
            num_partials * _ARRIVALS,
            3 * num_tiles + 1 + (num_items if group > 1 else 0),
            problem.nheads_q * padded_q // _DQ_GROUP_ROWS,
            padded_q // _DQ_GROUP_ROWS + 1,
            3 + 2 * _WARPS * grid,
        )
        return _Scratch(num_slots, *(4 * n for n in accumulate(words)))


@lru_cache(maxsize=1024)
def _route(
    problem: AttnProblem,
    variants: tuple[Variant, Variant, Variant],
    layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    num_tiles: int,
    device_index: int,
) -> _Route | None:
    """How tensors of such layouts (the shape and the strides of q, dout and out) are launched; None where TMA can not
    read them."""
    if not all(is_tma_layout(shape, stride, problem.dtype) for shape, stride in layouts):
        return None
    preprocess, main, postprocess = (load_function(variant, device_index) for variant in variants)
    config = backward_config(problem)
    score_scale = problem.softcap or problem.softmax_scale
    sms = num_sms(device_index)
    heads_per_section = backward_heads_per_section(problem, num_tiles, sms)
    scalars = _SCALARS.pack(
        problem.nheads_kv,
        heads_per_section,
        problem.qhead_per_kvhead,
        score_scale * math.log2(math.e),
        problem.softmax_scale / problem.softcap if problem.softcap else 0.0,
    )
    grid = min(num_tiles * problem.nheads_q, sms)  # a tile has a part for each query head at most
    scratch = _Scratch.of(problem, _padded(layouts[0][0][0]), num_tiles, heads_per_section, grid)
    kernels = (preprocess, main, postprocess)
    return _Route(*kernels, config, grid, sms, heads_per_section, scalars, scratch, {})


def _padded(rows: int) -> int:
    return -(-rows // _DQ_GROUP_ROWS) * _DQ_GROUP_ROWS


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
    keys = (k, v, dk, dv)
    dq = backward_in_phases(
        *(dout, dlse, q, lambda: keys, None, out, lse, k_tiles, k_runs, problem),
        deterministic=deterministic,
    )
    return BackwardOutput(dq, dk, dv)


def backward_in_phases(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    arrive: Callable[[], Sequence[Tensor]],
    depart: Callable[[Tensor, Tensor], None] | None,
    out: Tensor,
    lse: Tensor,
    k_tiles: Tensor,
    k_runs: Tensor,
    problem: AttnProblem,
    *,
    deterministic: bool = False,
) -> Tensor:
    """`backward` with work of other streams between its launches, see `PhasedKernel`; returns dq.

    Without `depart` there is none, so that each launch begins while the one in front of it ends.
    """
    total_q, nheads_q, _ = q.shape
    device = q.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return backward_in_phases(
                *(dout, dlse, q, arrive, depart, out, lse, k_tiles, k_runs, problem),
                deterministic=deterministic,
            )

    at_q, at_dout, at_out = (x.data_ptr() for x in (q, dout, out))
    layouts = tuple((x.shape, x.stride()) for x in (q, dout, out))
    variants = backward_variants(problem, deterministic)
    num_tiles = k_tiles.shape[0]
    route = _route(problem, variants, layouts, num_tiles, device.index)
    if route is None or (at_q | at_dout | at_out) % 16:
        dout, q, out = (tma_compatible(x) for x in (dout, q, out))
        return backward_in_phases(
            *(dout, dlse, q, arrive, depart, out, lse, k_tiles, k_runs, problem),
            deterministic=deterministic,
        )
    dq = q.new_empty(q.shape)
    padded_q = _padded(total_q)
    row_groups = padded_q // _DQ_GROUP_ROWS
    scratch = q.new_empty(route.scratch.size // 4, dtype=torch.float32)
    sums = scratch.data_ptr()
    places = (sums + at for at in route.scratch[1:-1])
    stats, partials, entries, counters, num_entries, arrivals, workspace, *of_dq = places
    done, wanted, progress = of_dq
    if not _rounds_dq(route.config, deterministic):
        wanted = 0
    agenda = (entries, num_entries, counters, arrivals, partials)
    turns = turns_of_tiles(k_tiles, k_runs, row_groups) if deterministic else None
    stream = current_stream(device)
    row_blocks = (-(-total_q // BACKWARD_ROWS), nheads_q)

    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    at_tiles, at_runs = k_tiles.data_ptr(), k_runs.data_ptr()
    before = _PREPROCESS.pack(
        at_out,
        at_dout,
        lse.data_ptr(),
        _address(dlse),
        stats,
        sums,
        row_groups,
        done,
        wanted,
        progress,
        *out.stride()[:2],
        *dout.stride()[:2],
        total_q,
        -math.log2(math.e) if problem.softcap else -1 / problem.softmax_scale,
        at_tiles,
        at_runs,
        *agenda,
        problem.nheads_kv,
        route.heads_per_section,
        workspace,
        num_tiles,
        route.scratch.num_slots,
        problem.qhead_per_kvhead,
        route.grid,
        deterministic,
    )
    launch(
        *(route.preprocess, row_blocks, _STREAM_THREADS, before, stream),
        shared_bytes=_STREAM_THREADS // 32 * 4,
    )

    k, v, dk, dv = arrive()
    k, v = (tma_compatible(x) for x in (k, v))
    at_dk, at_dv = dk.data_ptr(), dv.data_ptr()
    addresses = (at_q, at_dout, k.data_ptr(), v.data_ptr(), at_dk, at_dv, stats)
    place = (*addresses, k.shape, k.stride(), v.stride())
    maps = route.maps.get(place)
    if maps is None:
        if len(route.maps) >= _MAX_KNOWN_MAPS:
            route.maps.clear()
        stats_map = _stats_map(stats, nheads_q, padded_q, route.config.block_cols)
        maps = _tensor_maps(q, dout, k, v, dk, dv, stats_map, route.config)
        route.maps[place] = maps
    items = _DQ_ITEMS.pack(
        sums,
        row_groups,
        dq.data_ptr(),
        total_q,
        nheads_q,
        route.heads_per_section * problem.qhead_per_kvhead,
        problem.qhead_per_kvhead,
        problem.softmax_scale,
    )
    visits = (done, wanted, _address(turns))
    pointers = _ADDRESSES.pack(*visits, progress, at_tiles, at_runs, *agenda)
    params = maps + _GRADIENTS.pack(at_dk, at_dv) + items + pointers + route.scalars
    is_one_call = depart is None
    launch(
        *(route.main, route.grid, route.config.num_threads, params, stream),
        may_start_early=is_one_call,
    )
    if depart is not None:
        depart(dk, dv)

    after = items + _PROGRESS.pack(progress)
    launch(
        *(route.postprocess, _BLOCKS_PER_SM * route.num_sms, _STREAM_THREADS, after, stream),
        shared_bytes=0,
        may_start_early=is_one_call,
    )
    return dq


def _tensor_maps(
    q: Tensor,
    dout: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    stats_map: bytes,
    config: BackwardConfig,
) -> bytes:
    return b"".join(
        (
            tensor_map(q, config.block_cols),
            tensor_map(dout, config.block_cols),
            tensor_map(k, config.tile_rows),
            tensor_map(v, config.tile_rows),
            stats_map,
            tensor_map(dk, _STORE_ROWS),
            tensor_map(dv, _STORE_ROWS),
        )
    )


def turns_of_tiles(k_tiles: Tensor, k_runs: Tensor, row_groups: int) -> Tensor:
    """How many additions to each 16 query rows come from the tiles before, int32 `[num_tiles, row_groups]`.

    A run adds once to every 16 rows between its first and its last column. Runs of no tile hold anything.
    """
    num_tiles = k_tiles.shape[0]
    run = torch.arange(k_runs.shape[0], device=k_runs.device)
    tile = _tile_of_run(k_tiles, run)
    is_walked = (k_tiles[tile, 2] <= run) & (run < k_tiles[tile, 3])
    first = torch.where(is_walked, k_runs[:, _RUN_FIRST], 0) // _DQ_GROUP_ROWS
    last = torch.where(is_walked, k_runs[:, _RUN_COL_END] - 1, -1) // _DQ_GROUP_ROWS
    steps = torch.zeros(num_tiles * (row_groups + 1), dtype=torch.int32, device=k_runs.device)
    one = is_walked.int()
    steps.index_add_(0, tile * (row_groups + 1) + first, one)
    steps.index_add_(0, tile * (row_groups + 1) + last + 1, -one)
    additions = steps.view(num_tiles, row_groups + 1)[:, :row_groups].cumsum(1, dtype=torch.int32)
    return additions.cumsum(0, dtype=torch.int32) - additions


def _tile_of_run(k_tiles: Tensor, run: Tensor) -> Tensor:
    """The tile whose runs hold `run`; anything for padding. Tiles come in the order of their cost."""
    run_begin, run_end = k_tiles[:, 2].long(), k_tiles[:, 3].long()
    run_end = torch.where(run_begin < run_end, run_end, run.shape[0] + 1)
    run_end, order = run_end.sort()
    at = torch.searchsorted(run_end, run, right=True)
    return order[at.clamp(max=k_tiles.shape[0] - 1)]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _variant(source: str, entry: str, defines: dict[str, object]) -> Variant:
    return Variant(source, entry, tuple((name, str(value)) for name, value in defines.items()))


@lru_cache(maxsize=4096)
def _stats_map(address: int, nheads: int, padded_rows: int, box_rows: int) -> bytes:
    """The TMA descriptor of statistics `[nheads, padded_rows / 8]`, in boxes of those of `box_rows` queries.

    A row of a box has 256 elements at most, so they are as wide as elements can be.
    """
    head_bytes, box_bytes = (n * _STATS_BYTES for n in (padded_rows, box_rows))
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
