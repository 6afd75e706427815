"""The tolerance rule must accept plain PyTorch and notice what is wrong."""

import pytest
import torch

from magi_compile.masks.slices import MaskType
from tests.support.cases import CASES, one
from tests.support.numerics import assert_attention_close, plain_attention

SMALL = [case for case in CASES if case.seqlen_q * case.seqlen_k <= 520 * 520]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_ids_are_unique():
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_plain_pytorch_passes(case, dtype):
    inputs, slices, problem = case.inputs(dtype), case.slices(), case.problem(dtype)
    assert_attention_close(plain_attention(*inputs, slices, problem), inputs, slices, problem)


CASE = one(MaskType.CAUSAL, 130, 70)


@pytest.fixture(params=DTYPES, ids=str)
def setting(request):
    inputs, problem = CASE.inputs(request.param), CASE.problem(request.param)
    return inputs, problem, plain_attention(*inputs, CASE.slices(), problem)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_five_percent_off_fails(setting, name):
    inputs, problem, plain = setting
    off = plain._replace(**{name: getattr(plain, name) * 1.05})
    with pytest.raises(AssertionError, match=rf"^{name}: \S.* error .* > .*plain PyTorch"):
        assert_attention_close(off, inputs, CASE.slices(), problem)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_bad_value_fails(setting, name, value):
    inputs, problem, plain = setting
    bad = getattr(plain, name).clone()
    bad[(-1,) * bad.ndim] = value
    with pytest.raises(AssertionError, match=f"^{name}: 1 of .* wrongly finite or not finite"):
        assert_attention_close(plain._replace(**{name: bad}), inputs, CASE.slices(), problem)


def test_lse_of_a_row_that_sees_nothing_must_be_minus_infinity(setting):
    inputs, problem, plain = setting
    lse = plain.lse.masked_fill(plain.lse == -torch.inf, -1e30)
    with pytest.raises(AssertionError, match=r"first lse\(0, 0\) = -1e\+30, expected -inf"):
        assert_attention_close(plain._replace(lse=lse), inputs, CASE.slices(), problem)


def test_ignored_dlse_fails(setting):
    inputs, problem, _ = setting
    without = plain_attention(*inputs[:4], torch.zeros_like(inputs.dlse), CASE.slices(), problem)
    with pytest.raises(AssertionError, match=r"(?m)^dq: .*\n^dk: "):
        assert_attention_close(without, inputs, CASE.slices(), problem)


def test_wrong_dtype_and_shape_fail(setting):
    inputs, problem, plain = setting
    with pytest.raises(AssertionError, match=r"dq: torch.float64 .*expected torch"):
        assert_attention_close(plain._replace(dq=plain.dq.double()), inputs, CASE.slices(), problem)
    with pytest.raises(
        AssertionError, match=r"lse: torch.float32 \[130, 4\], expected .* \[4, 130\]"
    ):
        assert_attention_close(plain._replace(lse=plain.lse.T), inputs, CASE.slices(), problem)


def test_all_failures_are_listed_and_none_is_not_checked(setting):
    inputs, problem, plain = setting
    off = plain._replace(out=plain.out * 2, dv=plain.dv * 2, dq=None)
    with pytest.raises(AssertionError, match=r"(?m)^out: .*\n^dv: "):
        assert_attention_close(off, inputs, CASE.slices(), problem)


def test_a_forward_alone_is_checked_alone(setting):
    inputs, problem, plain = setting
    assert_attention_close((plain.out, plain.lse), inputs, CASE.slices(), problem)
    with pytest.raises(AssertionError, match=r"^lse: .*"):
        assert_attention_close((plain.out, plain.lse + 1), inputs, CASE.slices(), problem)
