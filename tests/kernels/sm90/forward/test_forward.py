"""The Hopper forward kernel against the fp64 oracle."""

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.base import ForwardOutput, new_max_scores
from magi_compile.kernels.plan import pack, unpack
from magi_compile.masks.slices import AttnSlices, MaskType
from tests.kernels.support.bits import BIT_CASES
from tests.kernels.support.max_scores import TANH_ERROR, assert_max_scores_close, check_max_scores
from tests.kernels.support.prior import check_prior
from tests.support.cases import (
    MASKS,
    HeadShape,
    one,
    random_disjoint,
    sliding_window,
    varlen,
)
from tests.support.numerics import assert_attention_close

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0"),
]

HEADS = [
    HeadShape(4, 2, 64, 64),
    HeadShape(8, 1, 96, 96),
    HeadShape(4, 1, 128, 128),
    HeadShape(3, 3, 128, 128),
    HeadShape(2, 1, 192, 192),
    HeadShape(2, 2, 256, 256),
]
SHORT = [
    varlen("varlen_causal", [1, 63, 129, 300, 7, 128, 1, 52], MaskType.CAUSAL),
    random_disjoint(257, 391, 5),
    sliding_window(700, 300),
]
CASES = [
    *(replace(case, heads=heads) for case in MASKS for heads in (HEADS[0], HEADS[2])),
    *(replace(case, heads=heads) for case in SHORT for heads in HEADS),
    *(replace(case, heads=HEADS[2], softcap=5.0) for case in SHORT),
    *(replace(case, heads=heads) for case in BIT_CASES for heads in HEADS),
    *(replace(case, heads=heads, softcap=5.0) for case in BIT_CASES[:2] for heads in HEADS),
    *(
        replace(SHORT[1], heads=HeadShape(n, m, 128, 128))
        for n, m in ((8, 8), (8, 2), (8, 1), (64, 1))
    ),
    replace(one(MaskType.CAUSAL, 4097), heads=HeadShape(2, 1, 128, 128)),
]


@pytest.fixture(scope="module")
def kernel():
    from magi_compile.kernels.sm90 import HopperKernel

    return HopperKernel()


def forward(kernel, q, k, v, slices, problem):
    return kernel.forward(q, k, v, slices, kernel.plan(slices, problem), problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_the_oracle(kernel, case, dtype):
    slices, problem = case.slices("cuda"), case.problem(dtype, "cuda")
    inputs = case.inputs(dtype, "cuda")
    out, lse = forward(kernel, inputs.q, inputs.k, inputs.v, slices, problem)
    assert_attention_close((out, lse), inputs, slices, problem)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["as_q", "fp32"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.id)
@pytest.mark.parametrize("case", SHORT[:2], ids=lambda case: case.name)
def test_merges_with_a_prior(kernel, case, heads, out_dtype):
    check_prior(kernel, replace(case, heads=heads), torch.bfloat16, out_dtype, "cuda")


MAX_SCORES = [
    *(replace(case, heads=heads) for case in SHORT for heads in (HEADS[0], HEADS[2], HEADS[5])),
    *(replace(one(MaskType.CAUSAL, 1521), heads=heads) for heads in (HEADS[0], HEADS[2])),
    *(replace(case, heads=heads, softcap=5.0) for case in SHORT for heads in (HEADS[0], HEADS[2])),
    *(replace(case, heads=heads) for case in BIT_CASES[:2] for heads in (HEADS[0], HEADS[2])),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", MAX_SCORES, ids=lambda case: case.id)
def test_max_scores(kernel, case, dtype):
    check_max_scores(kernel, case, dtype, "cuda", TANH_ERROR)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[2]], ids=lambda heads: heads.id)
def test_max_scores_of_rows_in_splits(kernel, heads, softcap):
    """Few rows and many keys: several blocks of threads find the largest score of a row, in any order."""
    case = replace(one(MaskType.FULL, 130, 9000), heads=heads, softcap=softcap)
    problem = replace(case.problem(torch.bfloat16, "cuda"), has_max_scores=True)
    inputs, slices = case.inputs(torch.bfloat16, "cuda"), case.slices("cuda")
    plan = kernel.plan(slices, problem)
    assert plan.splits.shape[0] > 0, "no tile is cut in splits"
    max_scores = new_max_scores(inputs.q)
    result = kernel.forward(*inputs[:3], slices, plan, problem, max_scores=max_scores)
    assert_attention_close(result, inputs, slices, problem)
    assert_max_scores_close(max_scores, inputs, slices, problem, TANH_ERROR)


def test_prior_and_output_dtypes(kernel):
    case = replace(SHORT[0], heads=HEADS[2])
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    slices = case.slices("cuda")
    arguments = (*inputs[:3], slices, kernel.plan(slices, problem), problem)
    with pytest.raises(
        TypeError, match=r"`out_dtype` must be torch\.bfloat16 .*, got torch\.float16"
    ):
        kernel.forward(*arguments, out_dtype=torch.float16)
    prior = ForwardOutput(inputs.q, torch.zeros(4, len(inputs.q), device="cuda"))
    with pytest.raises(
        TypeError, match=r"`prior\.out` must be torch\.float32, got torch\.bfloat16"
    ):
        kernel.forward(*arguments, prior=prior)


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ([1 << 20], HeadShape(1, 1, 128, 128)),
        ([1, 2, 3, 4, 5, 6, 7] * 1000, HeadShape(8, 2, 128, 128)),
    ],
    ids=["one_document_of_a_million_tokens", "thousands_of_tiny_documents"],
)
def test_long_sequences(kernel, lengths, heads):
    """Against fp64 in some rows, because the oracle is too slow for all of them."""
    total = sum(lengths)
    case = replace(varlen("long", [total], MaskType.CAUSAL), heads=heads)
    problem = case.problem(torch.bfloat16, "cuda")
    q, k, v = (
        torch.randn(total, n, 128, device="cuda", dtype=torch.bfloat16)
        for n in (heads.nheads_q, heads.nheads_kv, heads.nheads_kv)
    )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    slices = AttnSlices.from_cu_seqlens(cu_seqlens.tolist(), causal=True).to("cuda")
    out, lse = forward(kernel, q, k, v, slices, problem)
    assert out.isfinite().all()
    rows = torch.cat([torch.randint(total, (30,)), torch.tensor([0, total - 1])])
    begins = cu_seqlens[torch.searchsorted(cu_seqlens, rows, right=True) - 1]
    for row, begin in zip(rows.tolist(), begins.tolist(), strict=True):
        keys, values = (x[begin : row + 1, -1].double() for x in (k, v))
        scores = keys @ q[row, -1].double() * problem.softmax_scale
        expected = scores.softmax(0) @ values
        assert (out[row, -1] - expected).norm() < 1e-2 * expected.norm()
        assert lse[-1, row].item() == pytest.approx(scores.logsumexp(0).item(), abs=1e-3)


def test_plans_from_the_host_and_from_the_device_agree(kernel):
    case = replace(MASKS[-1], heads=HEADS[2])
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    memory, shape = pack(kernel.plan(case.slices(), problem))
    host = unpack([memory.cuda(), shape])
    device = kernel.plan(case.slices("cuda"), problem)
    q, k, v = inputs.q, inputs.k, inputs.v
    slices = case.slices("cuda")
    assert_same(
        kernel.forward(q, k, v, slices, host, problem),
        kernel.forward(q, k, v, slices, device, problem),
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_runs_are_bitwise_equal(kernel, head_dim):
    case = replace(
        varlen("many", [700, 1, 333, 2000, 64, 1500], MaskType.CAUSAL),
        heads=HeadShape(16, 2, head_dim, head_dim),
    )
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    slices = case.slices("cuda")
    plan = kernel.plan(slices, problem)
    q, k, v = inputs.q, inputs.k, inputs.v
    first = kernel.forward(q, k, v, slices, plan, problem)
    for _ in range(100):
        assert_same(first, kernel.forward(q, k, v, slices, plan, problem))


def test_strided_inputs(kernel):
    case = replace(SHORT[0], heads=HeadShape(4, 4, 128, 128))
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    slices = case.slices("cuda")
    expected = forward(kernel, inputs.q, inputs.k, inputs.v, slices, problem)
    qkv = torch.stack((inputs.q, inputs.k, inputs.v), 1)  # a packed projection
    assert_same(expected, forward(kernel, *qkv.unbind(1), slices, problem))
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv.unbind(1)]
    assert_same(expected, forward(kernel, *heads_first, slices, problem))
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in qkv.unbind(1)]  # TMA cannot
    assert_same(expected, forward(kernel, *odd, slices, problem))


def test_does_not_read_past_the_keys(kernel):
    case = replace(one(MaskType.FULL, 100, 70), heads=HEADS[2])
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    slices = case.slices("cuda")
    k, v = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 100), value=torch.nan)[:70] for x in inputs[1:3]
    )
    assert_same(
        forward(kernel, inputs.q, inputs.k, inputs.v, slices, problem),
        forward(kernel, inputs.q, k, v, slices, problem),
    )


def test_in_a_cuda_graph(kernel):
    case = replace(SHORT[0], heads=HeadShape(64, 8, 128, 128))
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    slices = case.slices("cuda")
    plan = kernel.plan(slices, problem)
    q, k, v = inputs.q, inputs.k, inputs.v
    expected = kernel.forward(q, k, v, slices, plan, problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.forward(q, k, v, slices, plan, problem)
    for _ in range(3):
        captured.out.fill_(torch.nan)
        graph.replay()
        assert_same(expected, captured)


def test_no_rows_and_no_keys(kernel):
    for seqlen_q, seqlen_k in ((0, 5), (5, 0)):
        case = replace(one(MaskType.FULL, seqlen_q, seqlen_k), heads=HEADS[0], rows=[])
        problem = case.problem(torch.bfloat16, "cuda")
        q, k, v, _, _ = case.inputs(torch.bfloat16, "cuda")
        out, lse = forward(kernel, q, k, v, case.slices("cuda"), problem)
        assert out.shape == q.shape
        assert not out.any()
        assert lse.shape == (4, seqlen_q)
        assert (lse == -torch.inf).all()


def assert_same(expected, actual):
    assert torch.equal(expected.out, actual.out)
    assert torch.equal(expected.lse, actual.lse)


@pytest.mark.parametrize("factor", [1e-3, 30.0, 1000.0])
def test_scores_of_any_size(kernel, factor):
    """Rising scores move the softmax's reference in many blocks, by little and by more than fp32 can hold."""
    case = replace(one(MaskType.CAUSAL, 1521), heads=HEADS[2])
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    growth = torch.linspace(0, factor, 1521, device="cuda")[:, None, None]
    k = (inputs.k * growth).to(inputs.k.dtype)
    inputs = inputs._replace(q=inputs.q.abs(), k=k + growth.to(k.dtype))
    slices = case.slices("cuda")
    out, lse = forward(kernel, inputs.q, inputs.k, inputs.v, slices, problem)
    assert_attention_close((out, lse), inputs, slices, problem)


def test_ends_where_scores_are_not_numbers(kernel):
    case = replace(one(MaskType.FULL, 300), heads=HEADS[2])
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    inputs.k[17] = torch.nan
    out, _ = forward(kernel, inputs.q, inputs.k, inputs.v, case.slices("cuda"), problem)
    assert out.isnan().all()
