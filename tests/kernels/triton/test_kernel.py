"""The Triton kernel against the oracle: on a GPU, and in Triton's CPU interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from magi_compile.kernels import heuristics
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.triton import TritonKernel
from tests.kernels.support.bits import check_bits
from tests.kernels.support.prior import check_prior
from tests.support.cases import CASES, MASKS, HeadShape, padded
from tests.support.numerics import assert_attention_close, run_kernel
from tests.support.triton_interpreter import needs_triton, run_interpreted

KERNEL = TritonKernel()
MASK = {case.name: case for case in MASKS}
PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, 8, 2, 128, 128, 1.0)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
on_gpu = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])


@needs_triton
def test_in_the_interpreter():
    """See `interpreted_triton.py`."""
    run_interpreted(Path(__file__).parents[1] / "support" / "interpreted_triton.py")


def check(case, dtype, device, with_dlse=True):
    inputs, slices = case.inputs(dtype, device), case.slices(device)
    problem = case.problem(dtype, device)
    results = run_kernel(KERNEL, inputs, slices, problem, with_dlse)
    assert_attention_close(results, inputs, slices, problem, with_dlse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("device", [on_gpu])
def test_matches_the_oracle(case, dtype, device):
    check(case, dtype, device)


@pytest.mark.parametrize("heads", [HeadShape(8, 2, 128, 128), HeadShape(4, 4, 64, 64)], ids=str)
@pytest.mark.parametrize("device", [on_gpu])
def test_bits(heads, device):
    check_bits(KERNEL, torch.bfloat16, device, heads)
    check_bits(KERNEL, torch.bfloat16, device, heads, softcap=5.0)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["as_q", "fp32"])
@pytest.mark.parametrize("device", [on_gpu])
def test_merges_with_a_prior(out_dtype, device):
    check_prior(KERNEL, MASK["random_257x391_seed1"], torch.bfloat16, out_dtype, device)


@pytest.mark.parametrize("name", ["varlen_causal", "random_257x391_seed1"])
@pytest.mark.parametrize("nheads_q", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("device", [on_gpu])
def test_head_groups(name, nheads_q, head_dim, device):
    heads = HeadShape(nheads_q, 1, head_dim, head_dim)
    check(replace(MASK[name], heads=heads), torch.bfloat16, device, with_dlse=False)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("device", [on_gpu])
def test_fp32(head_dim, device):
    heads = HeadShape(2, 1, head_dim, head_dim)
    check(replace(MASK["varlen_causal"], heads=heads), torch.float32, device)


@pytest.mark.parametrize("device", [on_gpu])
def test_any_strides(device):
    case = MASK["varlen_causal"]
    inputs, slices = case.inputs(torch.bfloat16, device), case.slices(device)
    problem = case.problem(torch.bfloat16, device)
    by_head = type(inputs)(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs))
    expected = run_kernel(KERNEL, inputs, slices, problem)
    actual = run_kernel(KERNEL, by_head, slices, problem)
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)


@pytest.mark.parametrize("device", [on_gpu])
def test_padded_plan_gives_the_same_bits(device):
    """The plan of slices on a CPU is exact, that of slices on a GPU is padded."""
    case = MASK["random_1521x700_seed4"]
    inputs, problem = (
        case.inputs(torch.bfloat16, device),
        case.problem(torch.bfloat16, device),
    )
    expected = run_kernel(KERNEL, inputs, case.slices("cpu"), problem)
    actual = run_kernel(KERNEL, inputs, case.slices(device), problem)
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)


@pytest.mark.parametrize("device", [on_gpu])
def test_plan_and_kernels_in_a_cuda_graph(device):
    """A captured step serves the next document layout: no plan waits for the device."""
    case, other = MASK["varlen_causal_equal"], MASK["causal_512x512"]
    case = replace(case, seqlen_q=512, seqlen_k=512, rows=case.rows[:4])
    other = padded(other, len(case.rows))
    inputs, slices = case.inputs(torch.bfloat16, device), case.slices(device)
    problem = case.problem(torch.bfloat16, device)
    run_kernel(KERNEL, inputs, slices, problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_kernel(KERNEL, inputs, slices, problem)
    new_slices = other.slices(device)
    for name in ("q_ranges", "k_ranges", "mask_types"):
        getattr(slices, name).copy_(getattr(new_slices, name))
    graph.replay()
    assert_attention_close(results, inputs, new_slices, problem)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", [(8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [1, 64, 80, 256])
def test_takes_any_gpu_from_sm_80(head_dim, arch, dtype):
    problem = replace(
        PROBLEM, head_dim=head_dim, head_dim_v=head_dim, device_arch=arch, dtype=dtype
    )
    assert KERNEL.refusals(problem) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu", "device_arch": None}, "runs on CUDA GPUs, not on 'cpu'"),
        ({"device_arch": (7, 5)}, "needs compute capability 8.0, got 7.5"),
        ({"dtype": torch.float64}, "`dtype` must be fp16, bf16 or fp32, got torch.float64"),
        ({"head_dim": 257}, "`head_dim` must be from 1 to 256, got 257"),
        ({"head_dim_v": 300}, "`head_dim_v` must be from 1 to 256, got 300"),
        ({"head_dim_v": 0}, "`head_dim_v` must be from 1 to 256, got 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(changes, reason):
    assert reason in KERNEL.refusals(replace(PROBLEM, **changes))


def test_refuses_without_triton():
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert KERNEL.refusals(PROBLEM) == ["triton is not installed"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_plan_and_kernels_agree_on_tiles(head_dim, dtype):
    problem = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
    tiles, config = heuristics.plan_tiles(problem, "triton"), heuristics.triton_config(problem)
    for name, size in tiles._asdict().items():
        assert size == getattr(config, name)
        assert size >= 16
        assert size.bit_count() == 1
    assert KERNEL.plan_key(problem) == tiles
