"""The CPU kernel against the oracle, on every case, and the properties of attention over slices."""

import pytest
import torch

from magi_compile.kernels.cpu import CpuKernel
from magi_compile.testing.cases import (
    CASES,
    Case,
    random_disjoint,
)
from magi_compile.testing.numerics import assert_attention_close, run_kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPLIT = random_disjoint(257, 391, seed=0)


def check(case: Case, dtype: torch.dtype, with_dlse: bool = True) -> None:
    inputs, slices, problem = case.inputs(dtype), case.slices(), case.problem(dtype)
    actual = run_kernel(CpuKernel(), inputs, slices, problem, with_dlse)
    assert_attention_close(actual, inputs, slices, problem, with_dlse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_the_oracle(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_the_gradient_of_lse(dtype):
    check(SPLIT, dtype, with_dlse=False)
