"""The launches of the backward kernels of `csrc/sm90/backward`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, BackwardOutput, Grads, Saved
from magi_compile.kernels.heuristics import (
    BACKWARD_ROWS,
    BackwardPasses,
    backward_config,
    backward_passes,
    backward_sections,
    has_table,
    map_intervals,
    map_passes,
    may_ask,
)
from magi_compile.kernels.mapped import (
    intervals_offset,
    shape_of_lists_in,
    table_offset,
    walk_shapes,
)
from magi_compile.kernels.overlap import KeyTensors, SavedQueries
from magi_compile.kernels.sm90.backward.order import turns_of_tiles
from magi_compile.kernels.sm90.backward.table_gradients import (
    GradientsPlaces,
    table_gradients_launch,
)
from magi_compile.kernels.sm90.backward.variants import (
    STREAM_THREADS,
    backward_variants,
    keeps_slopes,
    rounds_dq,
)
from magi_compile.kernels.sm90.backward.workspace import DQ_GROUP_ROWS, STATS_BYTES, Scratch
from magi_compile.kernels.sm90.forward.launch import given_score, scale_fields
from magi_compile.kernels.sm90.params import (
    BACKWARD,
    POSTPROCESS,
    PREPROCESS,
    QUERY_LINES,
    params_of,
)
from magi_compile.kernels.sm90.runtime.calls import Buffer, Call, Launch, addresses_of, allocate
from magi_compile.kernels.sm90.runtime.driver import (
    INT64_ELEMENTS,
    Layout,
    are_tma_layouts,
    current_stream,
    l2_bytes,
    load_function,
    num_sms,
    on_device,
    routed,
    rows_map,
)
from magi_compile.kernels.sm90.runtime.structs import Pointer, TensorMap
from magi_compile.kernels.sm90.scores.arguments import ScoreArguments
from magi_compile.plan.tiles import TILE_FIELDS, Walk
from magi_compile.score.program import ScoreCall

_ROWS = torch.contiguous_format
_STORE_ROWS = 16  # each warp stores its own rows
_BLOCKS_PER_SM = 8  # of the kernel after
_MOST_TILES_HANDED_ON = 2**15 - 1  # an entry of an agenda has 16 bits for its slot

# The buffers of a backward pass. Keys and their gradients may come late; what every pass makes comes last.
_DOUT, _DLSE, _Q, _OUT, _LSE, _TILES, _RUNS, _EDGES, _BITS, _TURNS = range(10)
_K, _V, _DK, _DV, _DQ, _SCRATCH = range(10, 16)


class _Shape(NamedTuple):
    """The shape of a backward pass, without its keys and addresses."""

    layouts: tuple[Layout, ...]  # of dout, q and out
    problem: AttnProblem
    deterministic: bool
    num_tiles: int
    has_dlse: bool
    score: ScoreArguments | None
    device_index: int

    @property
    def total_q(self) -> int:
        return self.layouts[1][0][0]


class _Pass:
    """The launches of a pass."""

    def __init__(self, shape: _Shape):
        problem = self._problem = shape.problem
        self._shape = shape
        # Of a block map, the agenda is that of a mean head, whose tiles lie behind those of all.
        heads = 0 if problem.block_map is None else problem.block_map.heads
        self._first_mean_tile = shape.num_tiles * heads
        self._tiles_of_head = shape.num_tiles if heads > 1 else 0
        source = None if shape.score is None else shape.score.source
        self._config = backward_config(problem, keeps_slopes=keeps_slopes(source))
        self._num_sms = num_sms(shape.device_index)
        # Thread blocks, or clusters of them, of which each works on a tile; that has a part for each query head at
        # most.
        places = self._num_sms // self._config.num_ctas
        self._grid = min(shape.num_tiles * problem.nheads_q, places)
        self._section_heads = backward_sections(problem, shape.num_tiles, places)
        cache = l2_bytes(shape.device_index)
        self._passes = backward_passes(problem, shape.num_tiles, self._section_heads, places, cache)
        self._map_passes = map_passes(problem, shape.total_q, cache)
        if shape.deterministic or shape.num_tiles > _MOST_TILES_HANDED_ON:
            self._passes, self._map_passes = BackwardPasses(), min(self._map_passes, 1)
        elif problem.block_map is not None:
            self._passes = BackwardPasses()
        group = problem.qhead_per_kvhead
        num_passes = self._map_passes or (group if self._passes.most_heads > 0 else 1)
        padded_q = _padded(shape.total_q)
        self._scratch = scratch = Scratch.of(
            *(problem, self._config, padded_q, shape.num_tiles),
            *(self._section_heads, self._grid, num_passes),
        )
        rounds = rounds_dq(self._config, shape.deterministic)
        self._wanted = _in_scratch(scratch.wanted) if rounds else None
        self.row_groups = padded_q // DQ_GROUP_ROWS
        variants = backward_variants(problem, shape.deterministic, score=source)
        self._functions = [load_function(variant, shape.device_index) for variant in variants]
        # dq and scratch memory
        self.made = (
            Buffer.of(shape.layouts[1][0], problem.dtype),
            Buffer.of((scratch.size // 4,), torch.float32),
        )
        self.first = self._first()
        self.last = self._last(may_start_early=False), self._last(may_start_early=True)
        self.main = lru_cache(_MAX_KEYS)(self._main)
        self.whole = lru_cache(_MAX_KEYS)(self._whole)

    def _whole(self, keys: tuple[Layout, ...], device_index: int) -> Call | None:
        """All of a pass, over k and v of such layouts; each launch begins while the one in front of it ends."""
        main = self.main(keys, True, device_index)
        if main is None:
            return None
        made = (*(Buffer.of(shape, self._problem.dtype) for shape, _ in keys), *self.made)
        score = self._shape.score
        if score is None or score.gradients is None:
            return Call(made, (self.first, main, self.last[True]))
        of_tables = self._of_tables(score, keys, device_index)
        return Call(made, (self.first, *of_tables, main, self.last[True]))

    def _of_tables(
        self, score: ScoreArguments, keys: tuple[Layout, ...], device_index: int
    ) -> tuple[Launch, ...]:
        """The kernel of gradients of captured tensors, which needs the statistics of rows."""
        of_dout, of_q, _ = self._shape.layouts
        return table_gradients_launch(
            (of_q, of_dout, *keys),
            self._problem,
            score,
            GradientsPlaces((_Q, _DOUT, _K, _V), _LSE, _in_scratch(self._scratch.stats), _BITS),
            device_index,
        )

    def _dq_items(self) -> dict[str, Any]:
        return {
            "sums": {"data": _in_scratch(0), "row_groups": self.row_groups},
            "dq": Pointer(_DQ),
            "total_q": self._shape.total_q,
            "num_heads": self._problem.nheads_q,
            "qhead_per_kvhead": self._problem.qhead_per_kvhead,
            "softmax_scale": self._problem.softmax_scale,
        }

    def _agenda(self) -> dict[str, Any]:
        places = self._scratch
        return {
            "entries": _in_scratch(places.entries),
            "num_entries": _in_scratch(places.num_entries),
            "counters": _in_scratch(places.counters),
            "arrivals": _in_scratch(places.arrivals),
            "partials": _in_scratch(places.partials),
            "num_heads": self._problem.nheads_kv,
            "heads_per_section": self._section_heads,
        }

    def _agenda_writer(self) -> dict[str, Any]:
        places, passes = self._scratch, self._passes
        return {
            "tiles": Pointer(_TILES, self._first_mean_tile * len(TILE_FIELDS) * 4),
            "runs": Pointer(_RUNS),
            "agenda": self._agenda(),
            "scratch": _in_scratch(places.workspace),
            "num_tiles": self._shape.num_tiles,
            "num_slots": places.num_slots,
            "qhead_per_kvhead": self._problem.qhead_per_kvhead,
            "num_blocks": self._grid,
            "is_one_way": self._shape.deterministic,
            "most_heads_of_pass": passes.most_heads,
            "blocks_of_cache": passes.cached_blocks,
            "least_visits_of_pass": passes.least_visits,
            "passes_of_map": self._map_passes,
        }

    def _first(self) -> Launch:
        """The statistics of rows, and the agenda of tiles."""
        problem, places, shape = self._problem, self._scratch, self._shape
        (_, dout_stride), _, (_, out_stride) = shape.layouts
        params = PREPROCESS.pack(
            out=Pointer(_OUT),
            dout=Pointer(_DOUT),
            lse=Pointer(_LSE),
            dlse=Pointer(_DLSE) if shape.has_dlse else None,
            stats=_in_scratch(places.stats),
            dq=self._dq_items()["sums"],
            done=_in_scratch(places.done),
            wanted=self._wanted,
            dq_progress=_in_scratch(places.progress),
            out_row_stride=out_stride[0],
            out_head_stride=out_stride[1],
            dout_row_stride=dout_stride[0],
            dout_head_stride=dout_stride[1],
            total_q=shape.total_q,
            lse_factor=self._lse_factor(),
            agenda=self._agenda_writer(),
        )
        # One at least for the agenda, and one for what else is counted.
        least_blocks = -(-2 // problem.nheads_q)
        grid = (max(-(-shape.total_q // BACKWARD_ROWS), least_blocks), problem.nheads_q)
        return Launch(
            *(self._functions[0], grid, STREAM_THREADS, params),
            shared_bytes=STREAM_THREADS // 32 * 4,
        )

    def _lse_factor(self) -> float:
        """The factor of lse for the start of scores or, where a soft-cap or a score program changes these, for
        exponents of base 2."""
        score = self._shape.score
        is_changed = self._problem.softcap if score is None else not score.source.is_shift
        return -math.log2(math.e) if is_changed else -1 / self._problem.softmax_scale

    def _main(
        self, keys: tuple[Layout, ...], may_start_early: bool, device_index: int
    ) -> Launch | None:
        """The main kernel, over k and v of such layouts; None where TMA cannot read them."""
        if not are_tma_layouts(keys, self._problem.dtype):
            return None
        problem, config, shape, places = self._problem, self._config, self._shape, self._scratch
        of_dout, of_q, _ = shape.layouts
        of_k, of_v = keys
        of_dk, of_dv = (_contiguous(layout) for layout in keys)
        dtype, cols = problem.dtype, config.block_cols
        rows = config.tile_rows // config.num_ctas
        score = shape.score
        asks = may_ask(problem)
        num_words = None if score is None else len(score.words) + 1
        struct = params_of(BACKWARD, problem.has_bits or asks, num_words)
        fields: dict[str, Any] = {}
        if problem.has_bits or asks or score is not None:
            fields |= {"bits": Pointer(_BITS) if problem.has_bits else None, "table": None}
        totals = shape.total_q, of_k[0][0]
        if map_intervals(problem) > 0:
            fields["bits"] = Pointer(_TURNS, intervals_offset(problem, *totals))
        if has_table(problem):
            fields["table"] = Pointer(_EDGES, table_offset(problem, *totals, by_keys=True))
        if score is not None:
            fields["score"] = score.fields
        params = struct.pack(
            **fields,
            q=rows_map(Pointer(_Q), *of_q, dtype, cols),
            dout=rows_map(Pointer(_DOUT), *of_dout, dtype, cols),
            k=rows_map(Pointer(_K), *of_k, dtype, rows),
            v=rows_map(Pointer(_V), *of_v, dtype, rows),
            stats=_stats_map(_in_scratch(places.stats), problem.nheads_q, shape.total_q, cols),
            dk=rows_map(Pointer(_DK), *of_dk, dtype, _STORE_ROWS),
            dv=rows_map(Pointer(_DV), *of_dv, dtype, _STORE_ROWS),
            dk_rows=Pointer(_DK),
            dv_rows=Pointer(_DV),
            dq=self._dq_items(),
            visits={
                "done": _in_scratch(places.done),
                "wanted": self._wanted,
                "turns": Pointer(_TURNS) if shape.deterministic else None,
            },
            dq_progress=_in_scratch(places.progress),
            runs=Pointer(_RUNS),
            edges=Pointer(_EDGES),
            qhead_per_kvhead=problem.qhead_per_kvhead,
            **scale_fields(problem),
            tiles_of_head=self._tiles_of_head,
            tiles=Pointer(_TILES),
            agenda=self._agenda(),
            query_lines=self._query_lines(of_k[0][0]),
        )
        return Launch(
            *(self._functions[1], self._grid * config.num_ctas, config.num_threads, params),
            may_start_early=may_start_early,
            cluster=config.num_ctas,
        )

    def _query_lines(self, total_k: int) -> dict[str, Any]:
        """The lines that say whose turn it is, where additions of a block map have an order."""
        if self._problem.block_map is None or not self._shape.deterministic:
            return dict.fromkeys(QUERY_LINES.fields, 0) | {"words": None}
        lists = shape_of_lists_in(self._problem, self._shape.total_q, total_k)
        by_queries, by_keys = walk_shapes(lists, self._problem)
        lines_of_entry = by_queries.num_tiles * by_queries.num_lines
        return {
            "words": Pointer(_TURNS),
            "seqlen": lists.seqlen_q,
            "rows": by_queries.tile_rows // by_queries.num_lines,
            "lines_of_entry": lines_of_entry,
            "lines_of_head": lists.batch * lines_of_entry if lists.heads > 1 else 0,
            "num_words": by_queries.num_words,
            "blocks_of_tile": by_keys.tile_rows // by_queries.block_cols,
            "tiles_of_entry": by_keys.num_tiles,
        }

    def _last(self, *, may_start_early: bool) -> Launch:
        """The last kernel, which rounds dq."""
        params = POSTPROCESS.pack(
            items=self._dq_items(), progress=_in_scratch(self._scratch.progress)
        )
        return Launch(
            *(self._functions[2], _BLOCKS_PER_SM * self._num_sms, STREAM_THREADS, params),
            shared_bytes=0,
            may_start_early=may_start_early,
        )


_MAX_KEYS = 64  # layouts of keys that are kept for each of queries


@lru_cache(maxsize=1024)
def _prepared(layouts: tuple[Layout, ...], problem: AttnProblem, *rest: Any) -> _Pass | None:
    """The prepared call for dout, q and out of such layouts, see `_Shape`; None where TMA cannot read them."""
    if not are_tma_layouts(layouts, problem.dtype):
        return None
    return _Pass(_Shape(layouts, problem, *rest))


def _tiles_of_head(tiles: Tensor, problem: AttnProblem) -> int:
    """The number of tiles of a head in a walk: of a block map, those of its heads lie behind one another, and then
    those of a mean head."""
    return int(tiles.shape[0]) // (1 if problem.block_map is None else problem.block_map.heads + 1)


def _in_scratch(offset: int) -> Pointer:
    return Pointer(_SCRATCH, offset)


def _padded(rows: int) -> int:
    return -(-rows // DQ_GROUP_ROWS) * DQ_GROUP_ROWS


def _contiguous(layout: Layout) -> Layout:
    shape, _ = layout
    return shape, Buffer.of(shape, torch.bfloat16).stride


def _stats_map(pointer: Pointer, nheads: int, total_q: int, box_rows: int) -> TensorMap:
    """The TMA descriptor of statistics `[nheads, padded_rows / 8]`, in boxes of those of `box_rows` queries.

    A row of a box has 256 elements at most, so they are as wide as elements can be.
    """
    head_bytes, box_bytes = (n * STATS_BYTES for n in (_padded(total_q), box_rows))
    sizes, box = (head_bytes // 8, 1, nheads), (box_bytes // 8, 1, 1)
    return TensorMap(
        pointer, INT64_ELEMENTS, sizes, (head_bytes, head_bytes), box, is_swizzled=False
    )


def backward(
    grads: Grads,
    saved: Saved,
    walk: Walk,
    problem: AttnProblem,
    *,
    bits: Tensor | None = None,
    score: ScoreCall | None = None,
    q_walk: Walk | None = None,
    deterministic: bool = False,
) -> BackwardOutput:
    """Gradients of attention over the k walk of a plan, and the bit blocks of its mask, on torch's current stream.

    dk and dv repeat bit for bit. dq is summed up by many thread blocks, in any order, or in that of the tiles where
    `deterministic` is set. Gradients of the captured tensors of `score` are added to its `sums`, contiguous and
    fp32, in any order, over the `q_walk`.
    """
    q, k, v, out, lse = saved
    if q.shape[0] == 0 or k.shape[0] == 0:
        return BackwardOutput(*(torch.zeros_like(x, memory_format=_ROWS) for x in (q, k, v)))
    with on_device(q.device):
        program, behind = given_score(score, problem, q, k, q_walk)
        given, prepared = _given(
            *(grads, (q, out, lse), walk, problem, deterministic),
            bits=bits,
            score=program,
            q_walk=q_walk,
        )
        (k, v), call = routed(prepared.whole, (k, v))
        dk, dv, dq, *_ = call.run([*given, k, v], q.device, behind)
    return BackwardOutput(dq, dk, dv)


def _given(
    grads: Grads,
    saved: tuple[Tensor, Tensor, Tensor],
    walk: Walk,
    problem: AttnProblem,
    deterministic: bool,
    bits: Tensor | None = None,
    score: ScoreArguments | None = None,
    q_walk: Walk | None = None,
) -> tuple[list[Tensor | None], _Pass]:
    """The buffers up to the turns, as kernels can read them, and what their layouts need; see `BackwardPass`.
    `saved` are q, out and lse."""
    (dout, dlse), (q, out, lse), (tiles, runs, edges) = grads, saved, walk
    rest = (_tiles_of_head(tiles, problem), dlse is not None, score)
    (dout, q, out), prepared = routed(_prepared, (dout, q, out), problem, deterministic, *rest)
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    turns = None
    if problem.block_map is not None:
        assert q_walk is not None
        turns = q_walk.edges  # the words, which say it too, and the intervals
    elif deterministic:
        turns = turns_of_tiles(tiles, runs, prepared.row_groups)
    return [dout, dlse, q, out, lse, tiles, runs, edges, bits, turns], prepared


class BackwardPass:
    """One backward pass in steps, on the stream and the device that are torch's current ones when it is made: see
    `magi_compile.kernels.overlap.BackwardSteps`. Each launch waits for the one in front of it to end, since work of
    other streams lies between.

    Args:
        grads: of the results.
        saved: of the forward pass.
        walk: of the keys.
        problem: what `HopperKernel.refusals` finds nothing against.
        deterministic: whether additions to dq have one order.
    """

    def __init__(
        self,
        grads: Grads,
        saved: SavedQueries,
        walk: Walk,
        problem: AttnProblem,
        deterministic: bool,
    ):
        self._device = device = saved.q.device
        with on_device(device):
            self._stream = current_stream(device)
            given, self._prepared = _given(grads, saved, walk, problem, deterministic)
            self._dq, _ = made = allocate(self._prepared.made, device, self._stream)
        self._held = [*given, *made]  # until all of it is enqueued
        self._addresses = addresses_of(given)
        self._addresses += (0, 0, 0, 0, *addresses_of(made))

    def begin(self) -> None:
        """Launches the kernel in front of the main one."""
        with on_device(self._device):
            self._prepared.first(self._addresses, self._stream)

    def main(self, keys: KeyTensors) -> None:
        """Launches the main kernel."""
        with on_device(self._device):
            (k, v), launch = routed(self._prepared.main, (keys.k, keys.v), False)
            self._held += (k, v)
            self._addresses[_K : _DV + 1] = addresses_of((k, v, keys.dk, keys.dv))
            launch(self._addresses, self._stream)

    def finish(self) -> Tensor:
        """Launches the kernel behind it."""
        with on_device(self._device):
            self._prepared.last[False](self._addresses, self._stream)
        self._held.clear()
        return self._dq
