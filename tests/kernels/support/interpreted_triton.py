"""The Triton kernel in Triton's CPU interpreter, in fp16 and fp32 (its bf16 is wrong).

Not collected: `tests/kernels/triton/test_kernel.py` runs this file in a process of its own with TRITON_INTERPRET=1,
because Triton chooses its interpreter for good when it is first imported.
"""

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.triton import TritonKernel
from tests.kernels.support.bits import BIT_CASES, check_bits
from tests.kernels.support.max_scores import check_max_scores
from tests.kernels.support.prior import check_prior
from tests.support.cases import MASKS, HeadShape, padded, random_disjoint
from tests.support.numerics import assert_attention_close, run_kernel
from tests.support.triton_interpreter import _interpreter  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells of every -inf

MASK = {case.name: case for case in MASKS}
CASES = [
    *(
        replace(MASK[name], heads=HeadShape(2, 1, 16, 16))
        for name in ("full_63x63", "causal_129x129", "diagonal_129", "sees_nothing")
    ),
    replace(padded(MASK["tiny_documents"], 150), heads=HeadShape(1, 1, 16, 16)),
    replace(MASK["causal_1x1"], heads=HeadShape(3, 1, 24, 40)),
    replace(MASK["causal_63x63"], heads=HeadShape(2, 2, 16, 16), softcap=5.0),
]


def check(case, dtype, with_dlse):
    inputs, slices, problem = case.inputs(dtype), case.slices(), case.problem(dtype)
    results = run_kernel(TritonKernel(), inputs, slices, problem, with_dlse)
    assert_attention_close(results, inputs, slices, problem, with_dlse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_the_oracle(case):
    check(case, torch.float32, with_dlse=True)


def test_fp16_without_dlse():
    check(CASES[0], torch.float16, with_dlse=False)


def test_bits():
    check_bits(TritonKernel(), torch.float32, "cpu")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_max_scores(case):
    check_max_scores(TritonKernel(), case, torch.float32)


def test_max_scores_of_bits_and_of_a_prior():
    heads = HeadShape(2, 1, 16, 16)
    check_max_scores(TritonKernel(), replace(BIT_CASES[0], heads=heads), torch.float32)
    case = replace(random_disjoint(40, 60, 5), heads=heads)
    check_max_scores(TritonKernel(), case, torch.float16)


def test_merges_with_a_prior():
    case = replace(random_disjoint(40, 60, 5), heads=HeadShape(2, 1, 16, 16))
    check_prior(TritonKernel(), case, torch.float16, None, "cpu")
