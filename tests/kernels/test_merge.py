"""Merging partial results: exact arithmetic, and rows that see nothing in some or all partials."""

import pytest
import torch

from magi_compile.kernels.base import ForwardOutput
from magi_compile.kernels.merge import merge_partials, merge_prior, sum_partials
from magi_compile.kernels.select import load
from tests.kernels.support.partials import SHAPES, check_merge, check_sum
from tests.kernels.support.prior import check_prior
from tests.support.cases import random_disjoint

INF = torch.inf


@pytest.mark.parametrize("num_partials", [1, 2, 4])
def test_equals_the_whole_softmax(num_partials):
    generator = torch.Generator().manual_seed(0)
    scores = 10 * torch.randn(3, 5, 64, generator=generator, dtype=torch.float64)
    v = torch.randn(64, 7, generator=generator, dtype=torch.float64)
    partials = list(zip(scores.chunk(num_partials, -1), v.chunk(num_partials), strict=True))
    out, lse = merge_partials(
        [torch.softmax(s, -1) @ x for s, x in partials],
        [torch.logsumexp(s, -1) for s, _ in partials],
    )
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ v)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


def test_rows_that_see_nothing():
    outs = [torch.tensor([[2.0], [0.0], [0.0]]), torch.tensor([[0.0], [4.0], [0.0]])]
    lses = [torch.tensor([1.0, -INF, -INF]), torch.tensor([-INF, 3.0, -INF])]
    out, lse = merge_partials(outs, lses)
    assert torch.equal(out, torch.tensor([[2.0], [4.0], [0.0]]))
    assert torch.equal(lse, torch.tensor([1.0, 3.0, -INF]))


def test_large_lse_does_not_overflow():
    out, lse = merge_partials([torch.ones(1, 1), 3 * torch.ones(1, 1)], 2 * [torch.tensor([1e4])])
    assert out.item() == 2
    assert lse.item() == pytest.approx(1e4 + 0.6931, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_merged_in_fp32(dtype):
    outs, lses = [torch.ones(2, 3, dtype=dtype)] * 2, [torch.zeros(2)] * 2
    out, lse = merge_partials(outs, lses)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, torch.ones(2, 3))
    torch.testing.assert_close(lse, torch.full((2,), 0.6931472))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_partials", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partials(device, dtype, num_partials, shape):
    check_merge(merge_prior, shape, num_partials, dtype, device)
    check_sum(sum_partials, shape, num_partials, dtype, device)


def test_without_a_prior_only_the_dtype_changes():
    output = ForwardOutput(torch.ones(2, 3), torch.zeros(3, 2))
    out, lse = merge_prior(output, None, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert lse is output.lse


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["as_q", "fp32"])
def test_kernels_merge_with_a_prior(name, out_dtype):
    check_prior(load(name), random_disjoint(257, 391, 5), torch.bfloat16, out_dtype, "cpu")
