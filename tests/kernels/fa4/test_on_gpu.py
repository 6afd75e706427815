"""The kernel against the oracle, on a GPU with flash-attn-4."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.fa4 import Fa4Kernel
from magi_compile.kernels.fa4.kernel import _why_no_package
from tests.kernels.support.prior import check_prior
from tests.support.cases import (
    CAUSAL,
    FULL,
    MASKS,
    Case,
    HeadShape,
    one,
    random_disjoint,
    steps,
    varlen,
    windows,
)
from tests.support.numerics import assert_attention_close, run_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(bool(_why_no_package()), reason=" ".join(_why_no_package())),
]

MASK = {case.name: case for case in MASKS}
HEADS = [HeadShape(32, 8, 128, 128), HeadShape(4, 4, 128, 128), HeadShape(6, 2, 128, 128)]
CASES = [
    one(FULL, 700),
    one(CAUSAL, 1521),
    one(CAUSAL, 400, 650),
    varlen("documents", [300, 700, 521], CAUSAL),
    varlen("short_documents", [30, 1, 129, 63] * 6, CAUSAL),
    windows("window", [1300], 200, 0),
    windows("windows", [500, 800], 100, 40),
    steps("block_causal", [256] * 5),
    Case("prefix", 1000, 1000, [(0, 300, 0, 300, FULL), (300, 1000, 0, 1000, CAUSAL)]),
    MASK["holes"],
    MASK["sees_nothing"],
    *(random_disjoint(1100, 900, seed) for seed in range(3)),
    random_disjoint(
        700, 1100, 7, num_cuts=16
    ),  # rows of more intervals than are compared one by one
]


def check(case, dtype=torch.bfloat16, with_dlse=True):
    inputs, slices, problem = (
        case.inputs(dtype, "cuda"),
        case.slices("cuda"),
        case.problem(dtype, "cuda"),
    )
    results = run_kernel(Fa4Kernel(), inputs, slices, problem, with_dlse)
    assert_attention_close(results, inputs, slices, problem, with_dlse)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.id)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_the_oracle(case, heads):
    check(replace(case, heads=heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("name", ["varlen_causal", "random_257x391_seed0"])
def test_head_dims(name, head_dim, dtype):
    check(replace(MASK[name], heads=HeadShape(4, 2, head_dim, head_dim)), dtype, with_dlse=False)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["as_q", "fp32"])
def test_merges_with_a_prior(out_dtype):
    check_prior(Fa4Kernel(), MASK["random_257x391_seed1"], torch.bfloat16, out_dtype, "cuda")
