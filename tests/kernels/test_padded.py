"""A kernel of few head dimensions, for others too: by the CPU kernel, and by the Hopper kernels where there are some."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import magi_compile
from magi_compile.kernels import select
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.kernels.padded import PaddedKernel
from magi_compile.testing.cases import MASKS, Heads
from magi_compile.testing.numerics import assert_attention_close, run_kernel
from tests.kernels.support.prior import check_prior
from tests.score.score_mods import (
    BATCH,
    CASES,
    HEADS,
    SEQLEN,
    assert_as_good_as_plain,
    causal,
    qkv,
    results,
    scattered,
)

MASK = {case.name: case for case in MASKS}
NAMES = ["varlen_causal", "random_257x391_seed1"]
SHAPES = [Heads(4, 2, 48, 48), Heads(4, 1, 64, 48), Heads(2, 2, 80, 96)]
PROBLEM = AttnProblem("cpu", None, torch.float32, 4, 2, 80, 80, 1.0)


class Even(CpuKernel):
    """Has head dimensions of 24, 64 and 96."""

    def refusals(self, problem):
        is_one = problem.head_dim == problem.head_dim_v and problem.head_dim in (24, 64, 96)
        return [*super().refusals(problem), *([] if is_one else ["not even"])]

    def forward(self, q, k, v, slices, plan, problem, **rest):
        assert not self.refusals(problem)
        assert {x.shape[2] for x in (q, k, v)} == {problem.head_dim}
        return super().forward(q, k, v, slices, plan, problem, **rest)

    def backward(self, grads, saved, slices, plan, problem, **rest):
        assert not self.refusals(problem)
        assert {x.shape[2] for x in (grads.dout, *saved[:4])} == {problem.head_dim}
        return super().backward(grads, saved, slices, plan, problem, **rest)

    def scored_forward(self, q, k, v, slices, plan, problem, score, **rest):
        assert {x.shape[2] for x in (q, k, v)} == {problem.head_dim} == {24}
        return super().scored_forward(q, k, v, slices, plan, problem, score, **rest)

    def scored_backward(self, grads, saved, slices, plan, problem, score, wanted, **rest):
        assert {x.shape[2] for x in (grads.dout, *saved[:4])} == {problem.head_dim} == {24}
        return super().scored_backward(grads, saved, slices, plan, problem, score, wanted, **rest)


def kernel():
    return PaddedKernel("padded", Even(), (96, 64))


@pytest.mark.parametrize("heads", SHAPES, ids=lambda heads: heads.id)
@pytest.mark.parametrize("name", NAMES)
def test_matches_the_oracle(name, heads):
    case = replace(MASK[name], heads=heads)
    inputs, slices, problem = case.inputs(torch.float32), case.slices(), case.problem(torch.float32)
    results = run_kernel(kernel(), inputs, slices, problem)
    assert all(x.is_contiguous() for x in results)
    assert_attention_close(results, inputs, slices, problem)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["as_q", "fp32"])
def test_merges_with_a_prior(out_dtype):
    case = replace(MASK[NAMES[1]], heads=SHAPES[1])
    check_prior(kernel(), case, torch.float32, out_dtype, "cpu")


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ((128, 80), "head dimensions up to 96, got head_dim 128 and head_dim_v 80"),
        ((40, 40), "got head_dim 40 and head_dim_v 40, which would become 64"),
        ((72, 40), "got head_dim 72 and head_dim_v 40, which would become 96"),
    ],
)
def test_refusals(dims, reason):
    problem = replace(PROBLEM, head_dim=dims[0], head_dim_v=dims[1])
    assert reason in "; ".join(kernel().refusals(problem))


def test_says_what_it_does():
    assert not kernel().refusals(PROBLEM)
    assert kernel().notes(PROBLEM) == ["head_dim 80 and head_dim_v 80 run as 96, with zeros"]
    on_a_gpu = replace(PROBLEM, device_type="cuda")
    assert kernel().refusals(on_a_gpu) == Even().refusals(
        replace(on_a_gpu, head_dim=96, head_dim_v=96)
    )


def scored_kernel():
    return PaddedKernel("padded_and_scored", Even(), (24,))


@pytest.mark.parametrize("mask_mod", [causal, scattered], ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_score_programs(case, mask_mod, monkeypatch):
    """Through the public call, with gradients of captured tensors and masks that are bit blocks."""
    monkeypatch.setattr(select, "KERNELS", {"padded_and_scored": f"{__name__}:scored_kernel"})
    mask = create_block_mask(mask_mod, BATCH, None, SEQLEN, SEQLEN, device="cpu")
    visible = create_mask(mask_mod, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    tensors, captures = qkv(), case.tensors()

    def attend(*qkv):
        return magi_compile.flex_attention(
            *qkv, case.make(*captures), mask, None, True, return_lse=True
        )

    ours = results(attend, tensors, captures)
    assert_as_good_as_plain(ours, case.make, tensors, captures, visible)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel_name", ["cuda_padded", "cuda_narrow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(80, 80), (192, 128), (128, 96), (160, 160), (48, 48)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_on_hopper(name, dims, dtype, kernel_name):
    padded = select.load(kernel_name)
    case = replace(MASK[name], heads=Heads(4, 2, *dims))
    inputs, slices = case.inputs(dtype, "cuda"), case.slices("cuda")
    problem = case.problem(dtype, "cuda")
    if reasons := padded.refusals(problem):
        pytest.skip("; ".join(reasons))
    results = run_kernel(padded, inputs, slices, problem)
    assert_attention_close(results, inputs, slices, problem)
