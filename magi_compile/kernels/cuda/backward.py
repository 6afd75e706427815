"""The backward kernels of `csrc/sm90/bwd*`: their variants and their launches."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from cuda.bindings import driver
from torch import Tensor

from magi_compile.kernels.base import (
    AttnProblem,
    BackwardOutput,
    FarKeys,
    KeyTensors,
    Signals,
)
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
# What follows the tensor maps of q, dout and statistics in BackwardParams: what the kernel behind it is told of dq too, other
# addresses, and what a route knows, to where keys begin; and what follows the maps of keys and gradients in Keys.
_DQ_ITEMS = struct.Struct("<Qi4xQ4if4x")
_ADDRESSES, _SCALARS = struct.Struct("<6Q"), struct.Struct("<i2f20x")
_KEYS = struct.Struct("<9Q2i48x")
_MAX_KNOWN_MAPS = 256
_PREPROCESS = struct.Struct("<6Qi4x3Q4qif")
_AGENDA = struct.Struct("<7Q2iQ6i")  # what follows for each of them
_PROGRESS = struct.Struct("<Q")  # what follows them in PostprocessParams
_WARPS = BackwardConfig.num_threads // 32  # each leaves it two items at most


@lru_cache(maxsize=1024)
def backward_variants(
    problem: AttnProblem, deterministic: bool = False, has_far_keys: bool = False
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
        "FFA_ROUNDS_DQ": str(_rounds_dq(config, deterministic, has_far_keys)).lower(),
        "FFA_HAS_FAR_KEYS": str(has_far_keys).lower(),
    }
    return (
        _variant(
            "bwd_preprocess.cu",
            "ffa_backward_preprocess",
            {**rows, **cols, "FFA_NUM_AGENDAS": 1 + has_far_keys},
        ),
        _variant("bwd.cu", "ffa_backward", main),
        _variant(
            "bwd_postprocess.cu",
            "ffa_backward_postprocess",
            {**element, "FFA_THREADS": _STREAM_THREADS},
        ),
    )


def _rounds_dq(config: BackwardConfig, deterministic: bool, has_far_keys: bool) -> bool:
    """Whether the main kernel makes dq; else the one behind it does."""
    return config.rounds_dq and not deterministic and not has_far_keys


class Walk(NamedTuple):
    """The k walk of a plan."""

    tiles: Tensor
    runs: Tensor


class _AgendaPlace(NamedTuple):
    """Where in scratch the agenda of some keys lies, in bytes."""

    entries: int
    counters: int
    num_entries: int
    workspace: int  # what its writer needs


class _Scratch(NamedTuple):
    """Where in one allocation things lie, in bytes.

    First the sums of dq `[nheads_q, padded_q, head_dim]` in fp32, the statistics `[nheads_q, padded_q / 8]` of
    csrc/sm90/bwd_stats.cuh, and dk and dv of the parts of tiles in fp32, if there may be some; then an agenda for each plan of
    tiles; then how many parts have arrived, the visits of csrc/sm90/dq_accumulator.cuh that are done and those that are
    wanted, and the progress of csrc/sm90/dq_rounding.cuh.
    """

    num_slots: int  # of each agenda: how many parts of tiles there is room for
    stats: int
    partials: int
    agendas: tuple[_AgendaPlace, ...]
    arrivals: int
    done: int
    wanted: int
    progress: int
    size: int

    @staticmethod
    def of(
        problem: AttnProblem,
        padded_q: int,
        num_tiles: Sequence[int],
        heads_per_section: int,
        grid: int,
    ) -> _Scratch:
        group, nheads_q = problem.qhead_per_kvhead, problem.nheads_q
        num_items = [n * problem.nheads_kv // heads_per_section for n in num_tiles]
        most_slots = max(_MOST_PARTIALS // len(num_tiles) // heads_per_section, 1)
        num_slots = min(max(num_items) * group, most_slots) if group > 1 else 0
        num_partials = len(num_tiles) * num_slots * heads_per_section
        stats = nheads_q * padded_q * problem.head_dim
        partials = stats + nheads_q * padded_q * _STATS_BYTES // 4
        end = partials + num_partials * 2 * BackwardConfig.tile_rows * problem.head_dim
        agendas = []
        for tiles, items in zip(num_tiles, num_items, strict=True):
            words = (
                (items + num_slots) * _ENTRY_BYTES // 4,
                3 + tiles * problem.nheads_kv // grid,
                1,
                3 * tiles + 1 + (items if group > 1 else 0),
            )
            *places, end = accumulate(words, initial=end)
            agendas.append(_AgendaPlace(*(4 * x for x in places)))
            end += -end % (_ENTRY_BYTES // 4)
        words = (
            num_partials * _ARRIVALS,
            nheads_q * padded_q // _DQ_GROUP_ROWS,
            padded_q // _DQ_GROUP_ROWS + 1,
            3 + 2 * _WARPS * grid,
        )
        arrivals, *rest = (4 * x for x in accumulate(words, initial=end))
        return _Scratch(num_slots, 4 * stats, 4 * partials, tuple(agendas), arrivals, *rest)


class _Route(NamedTuple):
    """What the launches need besides addresses, for tensors of one layout."""

    preprocess: driver.CUfunction
    main: driver.CUfunction
    postprocess: driver.CUfunction
    config: BackwardConfig
    rounds_dq: bool
    grid: int
    num_sms: int
    heads_per_section: int
    scalars: bytes
    scratch: _Scratch
    maps: dict[tuple[object, ...], bytes]  # tensor maps, by where their tensors lie


@lru_cache(maxsize=1024)
def _route(
    problem: AttnProblem,
    deterministic: bool,
    layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    num_tiles: tuple[int, ...],
    device_index: int,
) -> _Route | None:
    """How tensors of such layouts (the shape and the strides of q, dout and out) are launched; None where TMA can not
    read them."""
    if not all(is_tma_layout(shape, stride, problem.dtype) for shape, stride in layouts):
        return None
    has_far_keys = len(num_tiles) > 1
    variants = backward_variants(problem, deterministic, has_far_keys)
    before, main, after = (load_function(variant, device_index) for variant in variants)
    config = backward_config(problem)
    score_scale = problem.softcap or problem.softmax_scale
    sms = num_sms(device_index)
    scalars = _SCALARS.pack(
        problem.qhead_per_kvhead,
        score_scale * math.log2(math.e),
        problem.softmax_scale / problem.softcap if problem.softcap else 0.0,
    )
    # A tile has a part for each query head at most.
    grid = min(sum(num_tiles) * problem.nheads_q, sms)
    heads = backward_heads_per_section(problem, sum(num_tiles), sms)
    scratch = _Scratch.of(problem, _padded(layouts[0][0][0]), num_tiles, heads, grid)
    rounds_dq = _rounds_dq(config, deterministic, has_far_keys)
    return _Route(before, main, after, config, rounds_dq, grid, sms, heads, scalars, scratch, {})


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
    with _current(q.device):
        # Each launch begins while the one in front of it ends.
        walks = [Walk(k_tiles, k_runs)]
        launches = _Launches(dout, dlse, q, out, lse, walks, problem, deterministic)
        launches.main([KeyTensors(k, v, dk, dv)], may_start_early=True)
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
    problem: AttnProblem,
    *,
    deterministic: bool = False,
) -> Tensor:
    """`backward` with work of other streams between its launches, see `PhasedKernel`; returns dq."""
    with _current(q.device):
        walks = [Walk(k_tiles, k_runs)]
        launches = _Launches(dout, dlse, q, out, lse, walks, problem, deterministic)
        keys = KeyTensors(*arrive())
        launches.main([keys])
        depart(keys.dk, keys.dv)
        return launches.end()


def backward_early(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: FarKeys,
    out: Tensor,
    lse: Tensor,
    near_walk: Walk,
    far_walk: Walk,
    problem: AttnProblem,
) -> BackwardOutput:
    """`backward` of near keys and of far ones that are still under way, see `EarlyKernel`; returns dq, and dk and dv of the
    near ones.

    Near keys are worked on until far ones are there, and once more when these are done. Where the main kernel can not see
    that they arrive, it waits for them. Otherwise it is launched twice: what the first one finds not there, it leaves to
    the second, behind their arrival.
    """
    near = KeyTensors(k, v, *(x.new_empty(x.shape) for x in (k, v)))
    with _current(q.device):
        launches = _Launches(dout, dlse, q, out, lse, [near_walk, far_walk], problem, False)
        if far.signals is not None:
            launches.main([near, far.tensors()], far.signals)
        keys = far.arrive()
        launches.main([near, keys], far.signals)
        # Its stream may wait for what the kernel says: by then the kernel is enqueued, even if streams share a queue.
        far.depart(keys.dk, keys.dv)
        return BackwardOutput(launches.end(), near.dk, near.dv)


def _current(device: torch.device) -> AbstractContextManager[object]:
    is_current = device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


class _Launches:
    """One backward pass on torch's current stream, kernel by kernel; the first one is launched here.

    Args:
        walks: of near keys, and of far ones if there are some.
    """

    def __init__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        walks: Sequence[Walk],
        problem: AttnProblem,
        deterministic: bool,
    ):
        self._stream = current_stream(q.device)
        self._walks = walks
        # All are kept until the last launch.
        self._inputs, self._route = _routed((dout, q, out), walks, problem, deterministic)
        dout, q, out = self._inputs
        self._dq = q.new_empty(q.shape)
        total_q, nheads_q, _ = q.shape
        padded_q = _padded(total_q)
        row_groups = padded_q // _DQ_GROUP_ROWS
        route, places = self._route, self._route.scratch
        self._scratch = q.new_empty(places.size // 4, dtype=torch.float32)
        self._sums = sums = self._scratch.data_ptr()
        of_all = (places.arrivals, places.partials)
        self._agendas = [
            (
                *(sums + x for x in (at.entries, at.num_entries, at.counters, *of_all)),
                *(problem.nheads_kv, route.heads_per_section),
            )
            for at in places.agendas
        ]
        self._items = _DQ_ITEMS.pack(
            sums,
            row_groups,
            self._dq.data_ptr(),
            total_q,
            nheads_q,
            route.heads_per_section * problem.qhead_per_kvhead,
            problem.qhead_per_kvhead,
            problem.softmax_scale,
        )
        done, progress = sums + places.done, sums + places.progress
        wanted = sums + places.wanted if route.rounds_dq else 0
        self._turns = turns_of_tiles(*walks[0], row_groups) if deterministic else None
        self._visits = (done, wanted, _address(self._turns), progress)
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
        agendas = [
            _AGENDA.pack(
                walk.tiles.data_ptr(),
                walk.runs.data_ptr(),
                *agenda,
                sums + at.workspace,
                walk.tiles.shape[0],
                i * places.num_slots,
                places.num_slots,
                problem.qhead_per_kvhead,
                route.grid,
                deterministic,
            )
            for i, (walk, agenda, at) in enumerate(
                zip(walks, self._agendas, places.agendas, strict=True)
            )
        ]
        launch(
            route.preprocess,
            (-(-total_q // BACKWARD_ROWS), nheads_q),
            _STREAM_THREADS,
            b"".join((before, *agendas)),
            self._stream,
            shared_bytes=_STREAM_THREADS // 32 * 4,
        )

    def main(
        self,
        keys: Sequence[KeyTensors],
        signals: Signals | None = None,
        *,
        may_start_early: bool = False,
    ) -> None:
        """Launches the main kernel over near keys, and over far ones if there are some."""
        at_signals = (0, 0) if signals is None else (signals.have_arrived, signals.are_complete)
        params = b"".join(
            (
                self._query_maps(),
                self._items,
                _ADDRESSES.pack(*self._visits, *at_signals),
                self._route.scalars,
                *map(self._keys, keys, self._walks, self._agendas),
            )
        )
        launch(
            *(self._route.main, self._route.grid, self._route.config.num_threads, params),
            self._stream,
            may_start_early=may_start_early,
        )

    def end(self, *, may_start_early: bool = False) -> Tensor:
        """Launches the last kernel; dq."""
        after = self._items + _PROGRESS.pack(self._visits[-1])
        launch(
            *(self._route.postprocess, _BLOCKS_PER_SM * self._route.num_sms, _STREAM_THREADS),
            *(after, self._stream),
            shared_bytes=0,
            may_start_early=may_start_early,
        )
        return self._dq

    def _query_maps(self) -> bytes:
        dout, q, _ = self._inputs
        stats, cols = self._sums + self._route.scratch.stats, self._route.config.block_cols

        def make() -> bytes:
            nheads, padded_q = q.shape[1], _padded(q.shape[0])
            stats_map = _stats_map(stats, nheads, padded_q, cols)
            return tensor_map(q, cols) + tensor_map(dout, cols) + stats_map

        return self._known((q.data_ptr(), dout.data_ptr(), stats), make)

    def _keys(self, keys: KeyTensors, walk: Walk, agenda: tuple[int, ...]) -> bytes:
        k, v = (tma_compatible(x) for x in (keys.k, keys.v))
        dk, dv, rows = keys.dk, keys.dv, self._route.config.tile_rows
        addresses = tuple(x.data_ptr() for x in (k, v, dk, dv))

        def make() -> bytes:
            boxes = ((k, rows), (v, rows), (dk, _STORE_ROWS), (dv, _STORE_ROWS))
            return b"".join(tensor_map(x, box_rows) for x, box_rows in boxes)

        return self._known((*addresses, k.shape, k.stride(), v.stride()), make) + _KEYS.pack(
            *addresses[2:],
            walk.tiles.data_ptr(),
            walk.runs.data_ptr(),
            *agenda,
        )

    def _known(self, place: tuple[object, ...], make: Callable[[], bytes]) -> bytes:
        maps = self._route.maps
        if place not in maps:
            if len(maps) >= _MAX_KNOWN_MAPS:
                maps.clear()
            maps[place] = make()
        return maps[place]


def _routed(
    inputs: tuple[Tensor, ...], walks: Sequence[Walk], problem: AttnProblem, deterministic: bool
) -> tuple[tuple[Tensor, ...], _Route]:
    """dout, q and out as TMA can read them, and how they are launched."""
    dout, q, out = inputs
    layouts = tuple((x.shape, x.stride()) for x in (q, dout, out))
    num_tiles = tuple(walk.tiles.shape[0] for walk in walks)
    route = _route(problem, deterministic, layouts, num_tiles, q.device.index)
    if route is None or any(x.data_ptr() % 16 for x in inputs):
        compatible = tuple(tma_compatible(x) for x in inputs)
        return _routed(compatible, walks, problem, deterministic)
    return inputs, route


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
