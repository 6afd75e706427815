"""The Hopper forward kernel with tiles in splits, against the fp64 oracle."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.sm90 import HopperKernel
from magi_compile.kernels.sm90.forward.launch import forward as forward_whole
from magi_compile.masks.slices import MaskType
from tests.kernels.support.bits import BitCase, random_table
from tests.kernels.support.prior import check_prior
from tests.kernels.support.split_walk import SplitWalk
from tests.support.cases import Case, HeadShape, one, sliding_window, varlen
from tests.support.numerics import assert_attention_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

HEADS = {
    64: HeadShape(4, 2, 64, 64),
    96: HeadShape(4, 1, 96, 96),
    128: HeadShape(4, 1, 128, 128),
    192: HeadShape(2, 1, 192, 192),
    256: HeadShape(2, 2, 256, 256),
}
ALONE = HeadShape(1, 1, 128, 128)
FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL = MaskType
CROSS = one(FULL, 130, 9000)
LONG = one(CAUSAL, 4097)
DOCUMENTS = varlen("documents", [1200, 1, 90, 4057, 300], CAUSAL)
HOLES = Case(
    "holes",
    1111,
    5003,
    [(0, 100, 50, 5000, FULL), (120, 700, 0, 3000, CAUSAL), (720, 1100, 2000, 4100, INV_CAUSAL)],
)
GLOBAL = Case(
    "global",
    4000,
    4000,
    [(0, 3, 0, 4000, FULL), (3, 303, 3, 303, CAUSAL), (303, 4000, 3, 4000, BI_CAUSAL)],
)
BITS = BitCase.of("bits", random_table(1, 1, 130, 9000, 0))
CASES = [
    *(replace(CROSS, heads=heads) for heads in (*HEADS.values(), ALONE)),
    *(replace(case, heads=h) for case in (LONG, HOLES) for h in (*HEADS.values(), ALONE)),
    *(replace(case, heads=HEADS[128]) for case in (DOCUMENTS, GLOBAL)),
    replace(one(FULL, 500, 6000), heads=HeadShape(64, 8, 128, 128)),
    replace(HOLES, heads=HEADS[128], softcap=5.0),
    *(replace(BITS, heads=heads) for heads in HEADS.values()),
]


@pytest.fixture(scope="module")
def kernel():
    return HopperKernel()


def prepared(case, dtype=torch.bfloat16):
    inputs = case.inputs(dtype, "cuda")
    return case.slices("cuda"), case.problem(dtype, "cuda"), inputs


def forward(kernel, inputs, slices, problem):
    return kernel.forward(*inputs[:3], slices, kernel.plan(slices, problem), problem)


def num_splits(plan):
    tiles, runs, _ = plan.q_walk
    return sum(SplitWalk.of(tiles, runs, plan.splits).splits_of_cuts)


def assert_same(expected, actual):
    assert torch.equal(expected.out, actual.out)
    assert torch.equal(expected.lse, actual.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_the_oracle(kernel, case, dtype):
    slices, problem, inputs = prepared(case, dtype)
    plan = kernel.plan(slices, problem)
    assert num_splits(plan) > 1
    result = kernel.forward(*inputs[:3], slices, plan, problem)
    assert_attention_close(result, inputs, slices, problem)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["as_q", "fp32"])
def test_a_prior(kernel, out_dtype):
    check_prior(kernel, replace(HOLES, heads=HEADS[128]), torch.bfloat16, out_dtype, "cuda")


@pytest.mark.parametrize(
    "case", [CASES[2], CASES[6], CASES[-6], CASES[-3]], ids=lambda case: case.id
)
def test_runs_are_bitwise_equal(kernel, case):
    slices, problem, inputs = prepared(case)
    plan = kernel.plan(slices, problem)
    first = kernel.forward(*inputs[:3], slices, plan, problem)
    for _ in range(100):
        assert_same(first, kernel.forward(*inputs[:3], slices, plan, problem))
    assert_same(first, forward(kernel, inputs, slices, problem))  # cut anew


def test_strided_inputs(kernel):
    slices, problem, inputs = prepared(replace(LONG, heads=ALONE))
    expected = forward(kernel, inputs, slices, problem)
    packed = torch.stack(inputs[:3], 1)
    assert_same(expected, forward(kernel, packed.unbind(1), slices, problem))
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in inputs[:3]]  # TMA cannot
    assert_same(expected, forward(kernel, odd, slices, problem))


def test_in_a_cuda_graph(kernel):
    """The plan too: which tiles are cut follows the mask of the replay."""
    slices, problem, inputs = prepared(replace(LONG, heads=HEADS[128]))
    expected = {}
    for mask_type in (FULL, CAUSAL):
        slices.mask_types.fill_(mask_type)
        expected[mask_type] = forward(kernel, inputs, slices, problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(kernel, inputs, slices, problem)
    for mask_type in (CAUSAL, FULL, CAUSAL):
        slices.mask_types.fill_(mask_type)
        captured.out.fill_(torch.nan)
        graph.replay()
        assert_same(expected[mask_type], captured)


def test_whole_tiles_do_as_without_room_for_splits(kernel):
    """The tiles of a window are too short to be cut, though there is room."""
    slices, problem, inputs = prepared(replace(sliding_window(3600, 300), heads=HEADS[128]))
    plan = kernel.plan(slices, problem)
    assert plan.splits.numel() > 0
    assert num_splits(plan) == 0
    assert_same(
        forward_whole(inputs[:3], plan.q_walk, problem),
        kernel.forward(*inputs[:3], slices, plan, problem),
    )


def test_no_room_for_splits_where_tiles_are_many(kernel):
    slices, problem, _ = prepared(replace(LONG, heads=HeadShape(64, 8, 128, 128)))
    assert kernel.plan(slices, problem).splits.numel() == 0
