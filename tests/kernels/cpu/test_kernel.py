"""The CPU kernel against the oracle on every case, and the properties of attention over slices."""

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.base import Grads, Saved, output_stride
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.kernels.merge import merge_partials
from magi_compile.masks.slices import MaskType
from tests.kernels.support.bits import BIT_CASES
from tests.kernels.support.max_scores import check_max_scores
from tests.support.cases import CASES, Case, one, random_disjoint, varlen
from tests.support.numerics import AttentionResults, assert_attention_close, run_kernel
from tests.support.pairwise import sparsely

KERNEL = CpuKernel()
SPLIT = random_disjoint(257, 391, seed=0)
RANDOM = [case for case in CASES if case.name.startswith("random_257")]


def run(case: Case, dtype: torch.dtype, with_dlse: bool = True) -> AttentionResults:
    return run_kernel(KERNEL, case.inputs(dtype), case.slices(), case.problem(dtype), with_dlse)


def check(case: Case, dtype: torch.dtype, with_dlse: bool = True) -> None:
    assert_attention_close(
        run(case, dtype, with_dlse),
        case.inputs(dtype),
        case.slices(),
        case.problem(dtype),
        with_dlse,
    )


def cases(dtype: torch.dtype, step: int) -> list:
    """All of `CASES` in `dtype`, every `step`-th of which runs by default."""
    return sparsely([(x, dtype) for x in CASES], step, [f"{x.id}-{dtype}" for x in CASES])


@pytest.mark.parametrize(("case", "dtype"), [*cases(torch.float32, 1), *cases(torch.bfloat16, 3)])
def test_matches_the_oracle(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("case", RANDOM, ids=lambda case: case.id)
def test_fp16(case):
    check(case, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_the_gradient_of_lse(dtype):
    check(SPLIT, dtype, with_dlse=False)


def test_only_the_gradient_of_lse():
    """Where the loss reads lse alone, dout is 0: no trick that divides by dout would do."""
    case = varlen("varlen", [70, 130], MaskType.CAUSAL)
    slices, problem = case.slices(), case.problem(torch.float32)
    inputs = case.inputs(torch.float32)
    inputs = inputs._replace(dout=torch.zeros_like(inputs.dout))
    actual = run_kernel(KERNEL, inputs, slices, problem)
    assert actual.dq.abs().max() > 0.1
    assert_attention_close(actual, inputs, slices, problem)


def strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of a packed tensor `[total, nheads, head_dim]` in another memory layout."""
    if layout == "heads_first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "part_of_qkv":
        return torch.cat([x, x, x], -1)[..., : x.shape[-1]]
    return x.mT.contiguous().mT


@pytest.mark.parametrize("layout", ["heads_first", "part_of_qkv", "head_dim_outside"])
def test_memory_layouts(layout):
    inputs, slices, problem = (
        SPLIT.inputs(torch.float32),
        SPLIT.slices(),
        SPLIT.problem(torch.float32),
    )
    moved = inputs._replace(
        **{name: strided(getattr(inputs, name), layout) for name in ("q", "k", "v", "dout")}
    )
    actual = run_kernel(KERNEL, moved, slices, problem)
    assert_attention_close(actual, inputs, slices, problem)
    out, *others = actual
    assert out.stride() == output_stride(moved.q.shape, moved.q.stride(), out.shape[2])
    assert all(x.is_contiguous() for x in others)


def test_dout_expanded_from_a_scalar():
    inputs, slices, problem = (
        SPLIT.inputs(torch.float32),
        SPLIT.slices(),
        SPLIT.problem(torch.float32),
    )
    inputs = inputs._replace(dout=torch.ones(()).expand_as(inputs.dout))
    assert_attention_close(run_kernel(KERNEL, inputs, slices, problem), inputs, slices, problem)


@pytest.mark.parametrize("case", RANDOM, ids=lambda case: case.id)
def test_order_of_slices_does_not_matter(case):
    shuffled = replace(case, rows=case.rows[::-1])
    for a, b in zip(run(case, torch.float32), run(shuffled, torch.float32), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_merge_to_the_whole(parts):
    """Splitting a mask, then merging (out, lse) and adding the gradients, gives the whole."""
    inputs, problem = SPLIT.inputs(torch.float32), SPLIT.problem(torch.float32)
    q, k, v, dout, dlse = inputs
    shares = [replace(SPLIT, rows=SPLIT.rows[i::parts]).slices() for i in range(parts)]
    plans = [KERNEL.plan(slices, problem) for slices in shares]
    partials = [
        KERNEL.forward(q, k, v, slices, plan, problem)
        for slices, plan in zip(shares, plans, strict=True)
    ]
    out, lse = merge_partials([p.out for p in partials], [p.lse.T for p in partials])
    lse = lse.T.contiguous()
    grads = [
        KERNEL.backward(Grads(dout, dlse), Saved(q, k, v, out, lse), slices, plan, problem)
        for slices, plan in zip(shares, plans, strict=True)
    ]
    merged = AttentionResults(out, lse, *(sum(parts) for parts in zip(*grads, strict=True)))
    assert_attention_close(merged, inputs, SPLIT.slices(), problem)


def test_inputs_are_left_alone():
    inputs = SPLIT.inputs(torch.float32)
    before = [x.clone() for x in inputs]
    run_kernel(KERNEL, inputs, SPLIT.slices(), SPLIT.problem(torch.float32))
    for x, copy in zip(inputs, before, strict=True):
        assert torch.equal(x, copy)


def test_refusals():
    problem = one(MaskType.FULL, 8).problem(torch.float32)
    assert KERNEL.refusals(problem) == []
    assert KERNEL.refusals(replace(problem, device_type="cuda", dtype=torch.float64)) == [
        "needs tensors on the CPU, got cuda",
        "needs float32, bfloat16 or float16, got float64",
    ]


@pytest.mark.parametrize(("case", "dtype"), [*cases(torch.float32, 3), *cases(torch.bfloat16, 7)])
def test_max_scores(case, dtype):
    check_max_scores(KERNEL, case, dtype)


@pytest.mark.parametrize("case", BIT_CASES, ids=lambda case: case.name)
def test_max_scores_with_bits(case):
    check_max_scores(KERNEL, case, torch.float32)
