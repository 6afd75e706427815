"""The oracle against fp64 autograd, and the properties that others rely on."""

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.reference import (
    ReferenceKernel,
    exact_backward,
    exact_forward,
)
from magi_compile.masks.slices import MaskType
from tests.support.cases import CASES, MASKS, Case, one
from tests.support.numerics import assert_attention_close, plain_attention, run_kernel

SMALL = [case for case in CASES if case.seqlen_q * case.seqlen_k <= 520 * 520]
SPLIT = next(case for case in MASKS if case.name == "random_257x391_seed0")


def visible_by_definition(case: Case) -> torch.Tensor:
    visible = torch.zeros(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
    for q_start, q_end, k_start, k_end, mask_type in case.rows:
        for q in range(q_start, q_end):
            lo, hi = k_start, k_end
            if mask_type in (MaskType.INV_CAUSAL, MaskType.BI_CAUSAL):
                lo = k_start + (q - q_start)
            if mask_type in (MaskType.CAUSAL, MaskType.BI_CAUSAL):
                hi = k_end - (q_end - 1 - q)
            visible[q, max(lo, k_start) : max(min(hi, k_end), 0)] = True
    return visible


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.id)
def test_the_dense_mask_is_what_slices_say(case):
    assert torch.equal(case.slices().to_dense(), visible_by_definition(case))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_matches_fp64_autograd(case):
    inputs = case.inputs(torch.float64)
    problem, slices = case.problem(torch.float64), case.slices()
    expected = plain_attention(*inputs, slices, problem)
    q, k, v, dout, dlse = inputs
    out, lse = exact_forward(q, k, v, slices, problem.softmax_scale, problem.softcap)
    grads = exact_backward(
        Grads(dout, dlse), Saved(q, k, v, out, lse), slices, problem.softmax_scale, problem.softcap
    )
    torch.testing.assert_close((out, lse, *grads), tuple(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernel_returns_the_interface_dtypes(dtype):
    inputs, slices, problem = SPLIT.inputs(dtype), SPLIT.slices(), SPLIT.problem(dtype)
    actual = run_kernel(ReferenceKernel(), inputs, slices, problem)
    assert_attention_close(actual, inputs, slices, problem)


def test_rows_that_see_nothing():
    case = one(MaskType.CAUSAL, 5, 3)
    inputs = case.inputs(torch.float32)
    out, lse, dq, _, _ = run_kernel(
        ReferenceKernel(), inputs, case.slices(), case.problem(torch.float32)
    )
    assert not out[:2].any()
    assert not dq[:2].any()
    assert (lse[:, :2] == -torch.inf).all()
    assert lse[:, 2:].isfinite().all()


def test_order_of_slices_does_not_matter():
    inputs, problem = SPLIT.inputs(torch.float32), SPLIT.problem(torch.float32)
    reversed_case = replace(SPLIT, rows=SPLIT.rows[::-1])
    results = (
        run_kernel(ReferenceKernel(), inputs, case.slices(), problem)
        for case in (SPLIT, reversed_case)
    )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_gradients_of_parts_add_up_with_the_whole_out_and_lse():
    """A share of the mask, given out and lse of the whole, yields its share of the gradients."""
    q, k, v, dout, dlse = SPLIT.inputs(torch.float64)
    scale = SPLIT.problem(torch.float64).softmax_scale
    out, lse = exact_forward(q, k, v, SPLIT.slices(), scale)
    parts = [replace(SPLIT, rows=SPLIT.rows[i::2]).slices() for i in range(2)]
    whole, *shares = (
        exact_backward(Grads(dout, dlse), Saved(q, k, v, out, lse), slices, scale)
        for slices in (SPLIT.slices(), *parts)
    )
    for total, a, b in zip(whole, *shares, strict=True):
        torch.testing.assert_close(a + b, total, rtol=0, atol=1e-12)
