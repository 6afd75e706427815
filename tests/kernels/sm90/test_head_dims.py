"""Head dimensions in between those of the Hopper kernels, and other ones of v, on a GPU against the oracle."""

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.select import load
from tests.kernels.support.prior import check_prior
from tests.support.cases import MASKS, HeadShape
from tests.support.numerics import assert_attention_close, run_kernel

pytestmark = pytest.mark.gpu
MASK = {case.name: case for case in MASKS}
NAMES = ["varlen_causal", "random_257x391_seed1"]
EQUAL = [(dim, dim) for dim in (8, 16, 32, 48, 80, 112, 136, 160, 248)]
UNEQUAL = [(192, 128), (128, 192), (128, 96), (64, 16), (16, 64), (256, 64), (72, 200)]


@pytest.mark.parametrize("dims", EQUAL + UNEQUAL, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_matches_the_oracle(name, dims):
    dtype = torch.float16 if dims[0] == 80 else torch.bfloat16
    case = replace(MASK[name], heads=HeadShape(4, 2, *dims))
    inputs, slices = case.inputs(dtype, "cuda"), case.slices("cuda")
    problem = case.problem(dtype, "cuda")
    results = run_kernel(load("hopper"), inputs, slices, problem)
    assert all(x.is_contiguous() for x in results)
    assert_attention_close(results, inputs, slices, problem)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["as_q", "fp32"])
@pytest.mark.parametrize("dims", [(80, 80), (192, 128), (32, 16)], ids=str)
def test_merges_with_a_prior(dims, out_dtype):
    case = replace(MASK[NAMES[1]], heads=HeadShape(4, 1, *dims))
    check_prior(load("hopper"), case, torch.bfloat16, out_dtype, "cuda")
