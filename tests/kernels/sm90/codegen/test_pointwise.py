"""Numbers of Python in the dtypes that PyTorch computes in;
what the operators give is compared in `test_mask_bits.py`."""

import math

import pytest
import torch

from magi_compile.kernels.sm90.codegen.pointwise import UnknownOperation, cast, literal, promoted


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (True, torch.bool, "true"),
        (True, torch.int32, "static_cast<int>(1ll)"),
        (-128, torch.int8, "static_cast<signed char>(-128ll)"),
        (-(2**63), torch.int64, "(-9223372036854775807ll - 1)"),
        (2.5, torch.float64, "static_cast<double>(0x1.4000000000000p+1)"),
        (16777217, torch.float32, "static_cast<float>(0x1.0000000000000p+24)"),
        (1e300, torch.float32, "static_cast<float>(inf_of_float())"),
        (-math.inf, torch.float64, "static_cast<double>(-inf_of_float())"),
        (math.nan, torch.float32, "static_cast<float>(nan_of_float())"),
    ],
)
def test_literals(value, dtype, text):
    assert literal(value, dtype) == text


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(128, torch.int8), (-1, torch.uint8), (2**63, torch.int64), (0.5, torch.int64), (1.0, torch.bfloat16)]
)  # fmt: skip
def test_numbers_that_a_dtype_does_not_hold(value, dtype):
    with pytest.raises(UnknownOperation, match="in torch"):
        literal(value, dtype)


def test_casts():
    assert cast("x", torch.int32, torch.int32) == "x"
    assert cast("x", torch.int32, torch.bool) == "to<bool>(x)"


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ((torch.int64, 0), (torch.int32, 0), torch.int64),
        ((torch.int64, 0), (torch.int32, 1), torch.int32),
        ((torch.int8, 0), (int, 0), torch.int8),
        ((torch.int64, 0), (float, 0), torch.float32),
        ((torch.float32, 0), (torch.float64, 0), torch.float64),
        ((torch.bool, 0), (int, 0), torch.int64),
        ((torch.uint8, 0), (torch.int8, 0), torch.int16),
    ],
)
def test_what_two_operands_are_computed_in(one, other, wanted):
    assert promoted(one, other) == wanted
    assert promoted(other, one) == wanted
