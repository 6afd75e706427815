"""Tiles in splits: which ones are cut, that the splits make up the tile, and that their results make up its result."""

import ctypes
import heapq
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import PlanTiles, forward_splits
from magi_compile.kernels.sm90.forward import split_kv as module
from magi_compile.kernels.sm90.forward.split_kv import (
    SplitLayout,
    cut_params,
    cut_tiles,
    split_variant,
)
from magi_compile.kernels.sm90.runtime.calls import Launch, addresses_of
from magi_compile.kernels.sm90.runtime.structs import Pointer
from magi_compile.masks import library
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan.cost import (
    BLOCK_COST,
    MASK_COST,
    MERGE_COST,
    MERGE_LAUNCH_COST,
    SPLIT_COST,
    TILE_COST,
)
from magi_compile.plan.tiles import build_tile_plan
from tests.kernels.support.one_thread import compile_for_one_thread
from tests.kernels.support.split_walk import SplitWalk
from tests.plan.walked import seen
from tests.support.cases import random_disjoint
from tests.support.pairwise import pairwise

SIZES = PlanTiles(64, 16, 64, 32)
NUM_SMS, LEAST_BLOCKS = 16, 4
NOT_A_SPLIT = -(2**31)  # as in csrc/sm90/common/tile_plan.cuh


@pytest.fixture(scope="module")
def run_on_host(tmp_path_factory):
    body = "ffa::Cutter(*params).run();"
    return compile_for_one_thread(tmp_path_factory, split_variant(), "SplitTilesParams", body)


@pytest.fixture
def cut(run_on_host, monkeypatch):
    """`cut(slices, max_splits, ...)`: the plan, whole and in splits."""

    def run(
        slices, max_splits, sizes=SIZES, num_sms=NUM_SMS, least_blocks=LEAST_BLOCKS, exact=True
    ):
        monkeypatch.setattr(module, "SPLIT_LEAST_BLOCKS", least_blocks)
        plan = build_tile_plan(slices, **sizes._asdict(), exact=exact)
        tiles, runs = plan.q_tiles, plan.q_runs
        size = SplitLayout.of(len(tiles), len(runs), max_splits).size
        splits = torch.full((size,), -7, dtype=torch.int32)
        counts = (tiles.shape[0], runs.shape[0], splits.shape[0])
        packed = cut_params((Pointer(0), Pointer(1), Pointer(2)), counts, sizes, num_sms)
        params = Launch(None, 1, 1, packed).params_at(addresses_of([tiles, runs, splits]))
        run_on_host((ctypes.c_char * len(params)).from_buffer_copy(params))
        return tiles, runs, plan.q_edges, SplitWalk.of(tiles, runs, splits)

    return run


def blocks_of(tile, runs):
    return sum(run[7] for run in runs[tile[2] : tile[3]])


def computed(tiles, runs, edges, block_cols, shape):
    """How often each pair of row and column is computed, block by block, as a kernel does it."""
    pairs = torch.zeros(shape, dtype=torch.int32)
    for row_begin, row_end, run_begin, run_end in tiles.tolist():
        rows = torch.arange(row_begin, row_end)
        for run in runs[run_begin:run_end].tolist():
            first, num_blocks, lead, trail = run[6:10]
            live = seen(run, rows, shape[1], edges)
            assert lead + trail <= num_blocks
            for j in range(num_blocks):
                at = slice(first + j * block_cols, first + (j + 1) * block_cols)
                is_edge = j < lead or j >= num_blocks - trail
                assert is_edge or bool(live[:, at].all())
                assert bool(live[:, at].any())
                pairs[row_begin:row_end, at] += live[:, at]
    return pairs


def end_of(tiles, runs, is_split, num_sms):
    """When the SMs of a head have drawn and walked all tiles."""
    ends = [0] * num_sms
    for tile, split in zip(tiles.tolist(), is_split, strict=True):
        if tile[0] < tile[1]:
            walked = runs[tile[2] : tile[3]].tolist()
            cost = sum(BLOCK_COST * run[7] + MASK_COST * (run[8] + run[9]) for run in walked)
            heapq.heappushpop(ends, ends[0] + cost + TILE_COST + SPLIT_COST * split)
    return max(ends)


MASKS = {
    "full": AttnSlices.full(1000),
    "causal": library.causal([1500]).slices,
    "documents": library.document_causal([700, 30, 5, 64, 401]).slices,
    "global_window": library.global_sliding_window([1600]).slices,
    "cross": AttnSlices.from_lists([(0, 70)], [(0, 1300)], [0]),
    "some_rows": AttnSlices.from_lists(
        [(70, 90), (300, 410)], [(3, 900), (40, 1111)], [0, 1], 500, 1200
    ),
    "random": random_disjoint(400, 900, 3, num_cuts=6).slices(),
    "nothing": AttnSlices.from_lists([], [], [], 100, 700),
}


@pytest.mark.parametrize(
    ("mask", "max_splits", "exact"),
    pairwise(MASKS, [2, 10, 64], [True, False], others_are_slow=True),
)
def test_splits_make_up_their_tiles(mask, max_splits, exact, cut):
    slices = MASKS[mask]
    tiles, runs, edges, plan = cut(slices, max_splits, exact=exact)
    shape = (slices.seqlen_q, slices.seqlen_k)
    assert plan.num_splits == max_splits
    assert torch.equal(
        computed(plan.tiles, plan.runs, edges, SIZES.q_block_cols, shape), slices.to_dense().int()
    )
    # The tiles in their order, each whole or as many splits as its cut says.
    cuts = {tuple(c[:2]): c[2:] for c in plan.cuts.tolist() if c[3] > 0}
    expected, taken = [], 0
    for tile in tiles[tiles[:, 0] < tiles[:, 1]].tolist():
        row, num_splits = cuts.get(tuple(tile[:2]), (0, 1))
        if num_splits > 1:
            assert row == taken * SIZES.q_tile_rows
            assert blocks_of(tile, runs.tolist()) >= LEAST_BLOCKS * num_splits
            taken += num_splits
        for i in range(num_splits):
            shift = row + i * SIZES.q_tile_rows - tile[0] if num_splits > 1 else NOT_A_SPLIT
            expected.append((*tile[:2], shift))
    assert taken <= max_splits
    actual = zip(*plan.tiles[:, :2].unbind(1), plan.shifts, strict=True)
    padding = [(0, 0, NOT_A_SPLIT)] * (len(plan.tiles) - len(expected))
    assert [tuple(map(int, x)) for x in actual] == expected + padding
    assert plan.cuts[len(cuts) :].eq(0).all()


@pytest.mark.parametrize("max_splits", [10, 64])
@pytest.mark.parametrize("mask", MASKS)
def test_splits_end_no_later_than_whole_tiles(mask, max_splits, cut):
    tiles, runs, _, plan = cut(MASKS[mask], max_splits)
    is_split = (plan.shifts != NOT_A_SPLIT).tolist()
    merged = any(is_split) * MERGE_LAUNCH_COST + MERGE_COST * sum(is_split) / NUM_SMS
    whole = end_of(tiles, runs, [False] * len(tiles), NUM_SMS)
    in_splits = end_of(plan.tiles, plan.runs, is_split, NUM_SMS)
    # Splits are of whole blocks, of which some need the mask: that much is not known when they are cut.
    if any(is_split):
        assert in_splits + merged <= 0.95 * whole + 2 * BLOCK_COST
    else:
        assert in_splits == whole


def test_one_tile_becomes_a_split_for_every_sm(cut):
    *_, plan = cut(AttnSlices.from_lists([(0, 60)], [(0, 16 * 16 * 40)], [0]), 64)
    assert plan.splits_of_cuts == [NUM_SMS]


def test_a_split_has_enough_blocks(cut):
    *_, plan = cut(AttnSlices.from_lists([(0, 60)], [(0, 16 * 40)], [0]), 64, least_blocks=8)
    assert plan.splits_of_cuts == [5]


def test_whole_waves_stay_whole(cut):
    *_, plan = cut(AttnSlices.full(64 * 2 * NUM_SMS), 64)
    assert plan.splits_of_cuts == []


@pytest.mark.parametrize(
    ("num_tiles", "num_blocks", "expected"), [(16, 39, [2] * 16), (22, 52, [])]
)
def test_what_gains_little_stays_whole(num_tiles, num_blocks, expected, cut):
    """More busy SMs are slower ones, and a merge takes its time: self-attention of 3K and 4K for four heads."""
    slices = AttnSlices.from_lists([(0, 64 * num_tiles)], [(0, 16 * num_blocks)], [0])
    *_, plan = cut(slices, 132, num_sms=33, least_blocks=8)
    assert plan.splits_of_cuts == expected


@pytest.mark.parametrize("num_sms", [16, 132])
def test_tiles_behind_those_that_are_tried_stay_whole(num_sms, cut):
    """A long one and 299 short ones, of which the first 128 or 256 are tried."""
    cells = [(64 * i, 64 * i + 64) for i in range(300)]
    keys = [(0, 16 * 4000), *[(0, 16 * 8)] * 299]
    tiles, *_, plan = cut(AttnSlices.from_lists(cells, keys, [0] * 300), 528, num_sms=num_sms)
    num_splits, *_ = plan.splits_of_cuts
    assert len(plan.splits_of_cuts) == 1
    assert num_splits >= num_sms // 2
    whole = plan.tiles[num_splits : num_splits + 299]
    assert torch.equal(whole[:, :2], tiles[1:300, :2])


def test_only_the_last_wave_is_cut(cut):
    """19 equal tiles: the last three are shared out, and the other 16 are not."""
    tiles, runs, _, plan = cut(AttnSlices.from_lists([(0, 64 * 19)], [(0, 16 * 200)], [0]), 64)
    assert len(plan.splits_of_cuts) == 3
    is_split = (plan.shifts != NOT_A_SPLIT).tolist()
    whole = end_of(tiles, runs, [False] * len(tiles), NUM_SMS)
    assert end_of(plan.tiles, plan.runs, is_split, NUM_SMS) < 0.63 * whole


def test_a_tile_that_sees_far_more_than_the_others(cut):
    cells = [(0, 64), *((64 * i, 64 * i + 64) for i in range(1, 50))]
    keys = [(0, 16 * 400), *[(0, 16 * 8)] * 49]
    tiles, runs, _, plan = cut(AttnSlices.from_lists(cells, keys, [0] * 50), 64)
    assert len(plan.splits_of_cuts) == 1
    is_split = (plan.shifts != NOT_A_SPLIT).tolist()
    share = end_of(tiles[1:], runs, [False] * (len(tiles) - 1), 1) / NUM_SMS + 400 * BLOCK_COST / 16
    assert end_of(plan.tiles, plan.runs, is_split, NUM_SMS) < 1.25 * share


def problem(nheads_q, head_dim=128):
    return AttnProblem("cuda", (9, 0), torch.bfloat16, nheads_q, 1, head_dim, head_dim, 0.1)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("nheads_q", [1, 8, 32, 64, 66])
@pytest.mark.parametrize("num_tiles", [1, 5, 40, 400])
def test_room_for_splits(nheads_q, num_tiles, head_dim):
    """At most four splits for every SM: what they leave in fp32 takes no more memory than that."""
    most_tiles = {1: 512, 8: 512, 32: 12, 64: 6, 66: 6}[nheads_q]
    for seqlen_k in (0, 5000, 1 << 20):
        room = forward_splits(problem(nheads_q, head_dim), seqlen_k, num_tiles, num_sms=132)
        assert 0 <= room * nheads_q <= 4 * 132
        assert room % 2 == 0
        assert (room > 0) == (seqlen_k > 0 and num_tiles <= most_tiles)


@pytest.mark.parametrize(
    ("nheads_q", "seqlen", "is_any"),
    [
        *[
            (8, 1024, False),
            (8, 2048, False),
            (8, 4096, True),
            (8, 65536, True),
            (8, 1 << 20, False),
        ],
        *[(32, 4096, False), (32, 16384, False), (64, 4096, False), (64, 1 << 20, False)],
        *[(128, 4096, False), (133, 4096, False)],
    ],
)
def test_where_there_may_be_splits(nheads_q, seqlen, is_any):
    num_tiles = math.ceil(seqlen / 192)
    assert (forward_splits(problem(nheads_q), seqlen, num_tiles, num_sms=132) > 0) == is_any


def test_no_rows_no_splits():
    assert forward_splits(problem(8), 1 << 20, 0, num_sms=132) == 0


def test_on_a_cpu_there_are_none():
    plan = build_tile_plan(AttnSlices.full(5000), **SIZES._asdict())
    splits = cut_tiles(plan.q_tiles, plan.q_runs, 5000, SIZES, problem(1))
    assert splits.shape == (0,)


@pytest.mark.parametrize("seqlen_k", [1000, 5000])
def test_symbolic_shapes_are_the_real_ones(seqlen_k, monkeypatch):
    """One graph for all lengths: it has no guard on whether there is room for splits."""
    monkeypatch.setattr(module, "num_sms", lambda device: 132)
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)

    def symbol(size):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        return mode.from_tensor(torch.empty(size), symbolic_context=context).shape[0]

    num_tiles, num_runs, total_k = symbol(30), symbol(70), symbol(seqlen_k)
    with mode:
        tiles = torch.empty((num_tiles, 4), dtype=torch.int32, device="cuda:0")
        runs = torch.empty((num_runs, 12), dtype=torch.int32, device="cuda:0")
        splits = cut_tiles(tiles, runs, total_k, SIZES, problem(8))
    num_splits = forward_splits(problem(8), seqlen_k, 30, num_sms=132)
    words = SplitLayout.of(30, 70, num_splits).size if num_splits else 0
    assert not isinstance(splits.shape[0], int)
    assert not shape_env.guards
    assert int(splits.shape[0]) == words
    assert (num_splits > 0) == (seqlen_k == 5000)
