"""The forward kernel, as it is, on a CPU: instructions of Hopper GPUs stand in `ptx_on_a_cpu.cuh`, and the host's code
launches it there. Slow, so masks are small; what depends on time or on registers, only a GPU can tell."""

import itertools
import struct
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile import _compat
from magi_compile.kernels.base import new_max_scores
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.sm90.forward import launch as module
from magi_compile.kernels.sm90.forward import overlap as early
from magi_compile.kernels.sm90.forward import split_kv
from magi_compile.kernels.sm90.runtime.driver import SHARED_BYTES
from magi_compile.masks.slices import AttnSlices, MaskType
from magi_compile.plan.tiles import RUN_FIELDS, build_tile_plan
from tests.kernels.sm90.forward.test_overlap import local_and_remote
from tests.kernels.support.bits import BIT_CASES, BitCase, random_table
from tests.kernels.support.early_lists import early_plan_on_cpu
from tests.kernels.support.max_scores import assert_max_scores_close
from tests.kernels.support.on_a_cpu import compile_once, launching
from tests.kernels.support.split_walk import SplitWalk
from tests.support.cases import (
    Case,
    HeadShape,
    block_diffusion,
    one,
    random_disjoint,
    steps,
    varlen,
    windows,
)
from tests.support.numerics import assert_attention_close
from tests.support.pairwise import pairwise

NUM_SMS = 3
MOST_THREADS = 512  # of a block on this CPU; what launches more does with fewer
SHAPES = {
    "64": (HeadShape(2, 1, 64, 64), 0.0),
    "128": (HeadShape(2, 1, 128, 128), 0.0),
    "128-softcap": (HeadShape(2, 1, 128, 128), 5.0),
    "192": (HeadShape(1, 1, 192, 192), 0.0),
    "80": (HeadShape(2, 1, 80, 80), 0.0),
    "192-128": (HeadShape(1, 1, 192, 128), 0.0),
}
CASES = [
    random_disjoint(230, 180, 0, num_cuts=4),
    varlen("documents", [110, 1, 50, 60], MaskType.CAUSAL),
    one(MaskType.FULL, 200, 170),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_once(tmp_path_factory)


@pytest.fixture
def launches(compiled, monkeypatch):
    """Launches happen on this CPU; their numbers of thread blocks."""
    found = []

    def launch(function, grid, block, params, stream, options):
        function(grid, min(block, MOST_THREADS), params)
        if options.shared_bytes == SHARED_BYTES:
            found.append(grid)

    with launching(monkeypatch, compiled, NUM_SMS, launch):
        yield found


def prepared(case, shape):
    heads, softcap = SHAPES[shape]
    case = replace(case, heads=heads, softcap=softcap)
    problem = replace(case.problem(torch.bfloat16), device_type="cuda", device_arch=(9, 0))
    return problem, case.inputs(torch.bfloat16)


# A long tile, of whose blocks the last 64 rows see some only, and a short one.
UNEVEN = Case(
    "uneven",
    250,
    1300,
    [(0, 140, 0, 1200, MaskType.FULL), (140, 250, 1100, 1300, MaskType.CAUSAL)],
)


@pytest.mark.parametrize(
    ("case", "shape"),
    [(CASES[0], "128"), (UNEVEN, "64"), (UNEVEN, "128"), (CASES[0], "80"), (UNEVEN, "192-128")],
    ids=lambda x: getattr(x, "name", x),
)
def test_one_launch(case, shape, launches):
    problem, inputs = prepared(case, shape)
    slices = case.slices()
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    result = module.forward(inputs[:3], plan.q_walk, problem)
    assert_attention_close(result, inputs, slices, problem)
    assert launches == [NUM_SMS]


def test_values_wider_than_keys(launches):
    case = replace(UNEVEN, heads=HeadShape(1, 1, 64, 112))
    problem = replace(case.problem(torch.bfloat16), device_type="cuda", device_arch=(9, 0))
    inputs, slices = case.inputs(torch.bfloat16), case.slices()
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    result = module.forward(inputs[:3], plan.q_walk, problem)
    assert_attention_close(result, inputs, slices, problem)


@pytest.mark.parametrize("shape", ["64", "128", "192"])
@pytest.mark.parametrize(("left", "right"), [(70, 0), (70, 30), (0, 40)])
def test_a_window_of_several_slices(left, right, shape, launches):
    """One band, which both begins and ends with a row in the middle of a tile."""
    case = windows("windows", [30, 210, 90], left, right)
    problem, inputs = prepared(case, shape)
    slices = case.slices()
    assert len(slices) > 3
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    assert int((plan.q_runs[:, 0] < plan.q_runs[:, 1]).sum()) <= 6
    result = module.forward(inputs[:3], plan.q_walk, problem)
    assert_attention_close(result, inputs, slices, problem)


@pytest.mark.parametrize("shape", ["64", "128", "192"])
@pytest.mark.parametrize(
    "case",
    [
        steps("steps", [100, 70, 7, 150]),
        varlen("short", [1, 30, 2, 50, 9, 40, 100, 3, 20], MaskType.CAUSAL),
        block_diffusion("block_diffusion", [70, 7, 110], 12),
    ],
    ids=lambda case: case.name,
)
def test_stairs(case, shape, launches):
    """Rows look up what they see."""
    problem, inputs = prepared(case, shape)
    slices = case.slices()
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    assert (plan.q_runs[:, RUN_FIELDS.index("lane")] > 0).any()
    result = module.forward(inputs[:3], plan.q_walk, problem)
    assert_attention_close(result, inputs, slices, problem)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", BIT_CASES, ids=lambda case: case.name)
def test_bits(case, shape, launches):
    """Blocks of bits, alone and beside others in one tile."""
    problem, inputs = prepared(case, shape)
    slices = case.slices()
    sizes = plan_tiles(problem)
    plan = build_tile_plan(slices, **sizes._asdict(), exact=False)
    assert (plan.q_runs[:, RUN_FIELDS.index("bits")] > 0).any()
    result = module.forward(inputs[:3], plan.q_walk, problem, bits=slices.bits)
    assert_attention_close(result, inputs, slices, problem)


def test_bits_in_turns(launches):
    """Over so many blocks, some of them hidden from one of two warpgroups, that these take turns."""
    case = BitCase.of("long", random_table(1, 1, 200, 1200, 7))
    problem, inputs = prepared(case, "64")
    slices = case.slices()
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    result = module.forward(inputs[:3], plan.q_walk, problem, bits=slices.bits)
    assert_attention_close(result, inputs, slices, problem)


@pytest.fixture
def run_early(compiled, monkeypatch):
    """Attention with remote keys that arrive between two launches, or during the first one, of which the blocks from
    `first_behind` on begin behind that; `timing` other than 0 is a random one."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(early, "_stream", lambda device: stream)
    monkeypatch.setattr(_compat, "current_stream", lambda device: stream)
    monkeypatch.setattr(_compat, "on_stream", lambda stream: nullcontext())

    def run(inputs, slices, problem, cut, first_behind=None, timing=0, **options):
        tiles = plan_tiles(problem)
        walk = build_tile_plan(local_and_remote(slices, cut), **tiles._asdict(), exact=False)
        plan = early_plan_on_cpu(compiled, walk.q_walk, tiles, cut + 1)
        # As they arrive: side by side, and there are others behind.
        rows, heads, columns = (
            len(inputs.k) - cut,
            inputs.k.shape[1],
            [x.shape[2] for x in inputs[1:3]],
        )
        packed = torch.full((rows + 5, heads, sum(columns)), torch.nan).bfloat16()
        remote = packed[:-5].split(columns, 2)
        grids = []

        def arrive():
            for target, source in zip(remote, (inputs.k, inputs.v), strict=True):
                target.copy_(source[cut:])

        def launch(function, grid, block, params, stream, options):
            if first_behind is not None and not grids:
                arrive()
                grid, params = NUM_SMS, bytes(params[:-4]) + struct.pack("<i", first_behind)
            function(grid, block, params, NUM_SMS, timing)
            grids.append(grid)

        local = [
            torch.cat([x[:cut], torch.full_like(x[:9], torch.nan)])[:cut]
            for x in (inputs.k, inputs.v)
        ]
        with launching(monkeypatch, compiled, NUM_SMS, launch):
            steps = early.EarlyForward(inputs.q, local, remote, plan, problem, **options)
            steps.begin()
            with steps.beside():
                arrive()
                steps.main()
            result = steps.finish()
        return result, grids, plan

    return run


EARLY = [
    *((CASES[0], shape) for shape in SHAPES),
    (CASES[1], "128"),
    (CASES[2], "128"),
    (one(MaskType.CAUSAL, 700, 400), "128"),
]


@pytest.mark.parametrize(("case", "shape"), EARLY, ids=lambda x: getattr(x, "name", x))
def test_remote_keys_between_two_launches(case, shape, run_early):
    problem, inputs = prepared(case, shape)
    cut = case.seqlen_k // 2 + 3  # not at the end of a block
    result, grids, _ = run_early(inputs, case.slices(), problem, cut)
    assert_attention_close(result, inputs, case.slices(), problem)
    assert grids == [NUM_SMS - 1, NUM_SMS]


@pytest.mark.parametrize(
    ("first_behind", "timing", "case"),
    pairwise([0, 1, 2], [0, 1, 2], [case for case, _ in EARLY[-3:]], others_are_slow=True),
    ids=lambda x: getattr(x, "name", x),
)
def test_remote_keys_during_a_launch(case, timing, first_behind, run_early):
    problem, inputs = prepared(case, "128")
    result, _, _ = run_early(
        inputs, case.slices(), problem, case.seqlen_k // 3, first_behind, timing
    )
    assert_attention_close(result, inputs, case.slices(), problem)


@pytest.mark.parametrize("timing", [1, 2, 3])
def test_remote_keys_during_a_launch_over_sections_of_heads(timing, run_early, monkeypatch):
    monkeypatch.setattr(module, "heads_per_section", lambda problem, *_: problem.nheads_q // 2)
    case = replace(CASES[0], heads=HeadShape(4, 2, 64, 64))
    problem = replace(case.problem(torch.bfloat16), device_type="cuda", device_arch=(9, 0))
    inputs = case.inputs(torch.bfloat16)
    result, _, _ = run_early(inputs, case.slices(), problem, 100, 2, timing)
    assert_attention_close(result, inputs, case.slices(), problem)


def test_without_splits_remote_keys_may_come_whenever_they_want(run_early):
    problem, inputs = prepared(CASES[1], "128")
    arguments = (inputs, CASES[1].slices(), problem, 120)
    expected, _, _ = run_early(*arguments, deterministic=True)
    assert_attention_close(expected, inputs, CASES[1].slices(), problem)
    for first_behind, timing in itertools.product(range(3), (1, 2)):
        found, _, _ = run_early(*arguments, first_behind, timing, deterministic=True)
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.lse, expected.lse)


def test_one_block_computes_where_all_are_to_be_left_free(run_early):
    problem, inputs = prepared(CASES[1], "128")
    result, grids, plan = run_early(inputs, CASES[1].slices(), problem, 120, free_sms=2 * NUM_SMS)
    assert_attention_close(result, inputs, CASES[1].slices(), problem)
    assert grids == [1, NUM_SMS]
    assert (plan.split_tiles[:, 0] < plan.split_tiles[:, 1]).any()


@pytest.fixture
def in_splits(launches, monkeypatch):
    """Attention with tiles in splits, and how many splits each cut tile has."""
    monkeypatch.setattr(split_kv, "num_sms", lambda device: 8)
    monkeypatch.setattr(split_kv, "SPLIT_LEAST_BLOCKS", 2)
    monkeypatch.setattr(
        split_kv, "_size", lambda problem, _, *counts: split_kv.SplitLayout.of(*counts[:2], 8).size
    )
    variant = split_kv.split_variant()
    free_merge = tuple((k, "0" if "MERGE" in k else v) for k, v in variant.defines)
    monkeypatch.setattr(split_kv, "split_variant", lambda: replace(variant, defines=free_merge))

    def run(inputs, slices, problem, max_scores=None):
        sizes = plan_tiles(problem)
        plan = build_tile_plan(slices, **sizes._asdict(), exact=False)
        walk = plan.q_walk
        words = split_kv.cut_tiles(*walk[:2], slices.seqlen_k, sizes, problem)
        result = split_kv.forward_in_splits(
            inputs[:3], walk, words, problem, slices.bits, max_scores
        )
        return result, SplitWalk.of(*walk[:2], words).splits_of_cuts

    return run


SPLITS = [
    (one(MaskType.FULL, 50, 700), "64", [3]),
    (one(MaskType.FULL, 50, 900), "128", [4]),
    (one(MaskType.CAUSAL, 250, 900), "128-softcap", [2, 2]),
    (one(MaskType.FULL, 30, 900), "192", [6]),
    (one(MaskType.FULL, 50, 900), "80", [4]),
    (one(MaskType.FULL, 30, 900), "192-128", [6]),
    (random_disjoint(230, 900, 0, num_cuts=4), "128", [2]),
    (BitCase.of("bits", random_table(1, 1, 100, 900, 6)), "64", [4]),
    (BitCase.of("bits", random_table(1, 1, 100, 900, 6)), "192", [7]),
    (Case("global", 400, 900, [(0, 20, 0, 900, 0), (30, 390, 30, 90, 1)]), "64", [3]),
]


@pytest.mark.parametrize(
    ("case", "shape", "expected"), SPLITS, ids=lambda x: getattr(x, "name", None)
)
def test_in_splits(case, shape, expected, in_splits):
    problem, inputs = prepared(case, shape)
    result, num_splits = in_splits(inputs, case.slices(), problem)
    assert num_splits == expected
    assert_attention_close(result, inputs, case.slices(), problem)
    again, _ = in_splits(inputs, case.slices(), problem)
    assert torch.equal(result.out, again.out)
    assert torch.equal(result.lse, again.lse)


@pytest.mark.parametrize(
    ("shape", "has_max_scores"),
    [("128", False), ("128", True), ("80", False), ("192-128", False)],
)
def test_a_wide_output_and_a_prior(shape, has_max_scores, launches):
    """Stages: every tile is a split that lies at its own rows."""
    case = CASES[1]
    problem, inputs = prepared(case, shape)
    problem = replace(problem, has_max_scores=has_max_scores)
    result, max_scores = None, new_max_scores(inputs.q) if has_max_scores else None
    for begin, end in ((0, 111), (111, case.seqlen_k)):
        stage = case.slices().restrict_k(begin, end)
        slices = AttnSlices(
            stage.q_ranges, stage.k_ranges - begin, stage.mask_types, stage.seqlen_q, end - begin
        )
        plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=True)
        result = module.forward(
            *(
                (inputs.q, inputs.k[begin:end], inputs.v[begin:end]),
                plan.q_walk,
                problem,
            ),
            prior=result,
            out_dtype=torch.float32 if result is None else None,
            max_scores=max_scores,
        )
    assert_attention_close(result, inputs, case.slices(), problem)
    if max_scores is not None:
        assert_max_scores_close(max_scores, inputs, case.slices(), problem)


def asked(case, shape):
    """A problem that asks for the largest scores, its inputs and its slices."""
    problem, inputs = prepared(case, shape)
    slices = case.slices()
    problem = replace(problem, has_bits=slices.bits is not None, has_max_scores=True)
    return problem, inputs, slices, new_max_scores(inputs.q)


# Scores that grow along the keys of a row, and that fall: the reference of the softmax follows them, or stays at the
# first block.
RISING, FALLING = "rising", "falling"
_SOME = list(zip(CASES, ("128-softcap", "64", "128"), strict=True))
MAX_SCORES = [
    *((case, shape, None) for case, shape in _SOME),
    *(
        pytest.param(case, shape, None, marks=pytest.mark.slow)
        for case, shape in itertools.product(CASES, ("64", "128", "128-softcap"))
        if (case, shape) not in _SOME
    ),
    (UNEVEN, "64", RISING),
    (UNEVEN, "64", FALLING),
    (UNEVEN, "128", None),
    (steps("steps", [100, 70, 7, 150]), "128", None),
    (CASES[0], "192", None),
    (BIT_CASES[0], "64", None),
    (BIT_CASES[0], "128-softcap", None),
]


@pytest.mark.parametrize(
    ("case", "shape", "trend"), MAX_SCORES, ids=lambda x: getattr(x, "name", x)
)
def test_max_scores(case, shape, trend, launches):
    problem, inputs, slices, max_scores = asked(case, shape)
    if trend:
        factor = torch.linspace(0.2, 1.8, len(inputs.k))[:, None, None]
        inputs.k.mul_(factor.flip(0) if trend == FALLING else factor)
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    result = module.forward(
        *(inputs[:3], plan.q_walk, problem), bits=slices.bits, max_scores=max_scores
    )
    assert_attention_close(result, inputs, slices, problem)
    assert_max_scores_close(max_scores, inputs, slices, problem)


@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_max_scores_of_one_sign(sign, launches):
    """All negative, all 0 (of either sign), all positive: as bits they are ordered in different ways."""
    problem, inputs, slices, max_scores = asked(CASES[0], "64")
    inputs.q.abs_()
    inputs.k.abs_().mul_(sign)
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    module.forward(inputs[:3], plan.q_walk, problem, max_scores=max_scores)
    assert_max_scores_close(max_scores, inputs, slices, problem)
    assert (max_scores[max_scores > -torch.inf].sign() == sign).all()


@pytest.mark.parametrize(
    ("case", "shape", "expected"),
    [SPLITS[number] for number in (0, 2, 4, 5)],
    ids=lambda x: getattr(x, "name", None),
)
def test_max_scores_in_splits(case, shape, expected, in_splits):
    problem, inputs, slices, max_scores = asked(case, shape)
    result, num_splits = in_splits(inputs, slices, problem, max_scores)
    assert num_splits == expected
    assert_attention_close(result, inputs, slices, problem)
    assert_max_scores_close(max_scores, inputs, slices, problem)


@pytest.mark.parametrize(
    ("case", "shape"), [EARLY[0], EARLY[-1]], ids=lambda x: getattr(x, "name", x)
)
def test_max_scores_of_remote_keys(case, shape, run_early):
    """Between two launches, and during the first."""
    for first_behind, timing in ((None, 0), (1, 1)):
        problem, inputs, slices, max_scores = asked(case, shape)
        cut = case.seqlen_k // 2 + 3
        given = (inputs, slices, problem, cut, first_behind, timing)
        result, *_ = run_early(*given, max_scores=max_scores)
        assert_attention_close(result, inputs, slices, problem)
        assert_max_scores_close(max_scores, inputs, slices, problem)
