"""Score programs in the Hopper kernels, as they are, on a CPU, against dense attention in fp64; see
`tests/kernels/sm90/forward/test_on_cpu.py`."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.sm90 import kernel as module
from magi_compile.score.read import trace_score_program
from tests.kernels.support.scored_calls import BY_HEAD, CAUSAL, SCATTERED, check
from tests.score.score_mods import CASES

CPU = torch.device("cpu")
PROGRAMS = {case.name: case for case in CASES}


def check_constants(kernel, name, mask, **how):
    """With captured tensors that need no gradients."""
    return check(kernel, PROGRAMS[name], mask, learns=False, **how)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, kernel):
    check_constants(kernel, name, CAUSAL)


@pytest.mark.parametrize("head_dim", [128, 192])
@pytest.mark.parametrize("name", ["alibi", "relative", "tanh_of_sums"])
def test_wider_heads(name, head_dim, kernel):
    check_constants(kernel, name, CAUSAL, head_dim=head_dim)


def test_some_heads_have_no_registers_for_slopes():
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 128, 128, 0.1, has_score=True)
    cuda = module.CudaKernel()
    for name in ("alibi", "square"):
        program, tables = trace_score_program(PROGRAMS[name].make(*PROGRAMS[name].tensors()), CPU)
        dtypes, ranks = [x.dtype for x in tables], [x.dim() for x in tables]
        reasons = cuda.score_refusals(problem, program, dtypes, ranks)
        said = ["needs another head_dim than 128" in reason for reason in reasons]
        assert said == [True] * (name == "square")
        for other in (64, 96, 192, 256):
            narrow = replace(problem, head_dim=other, head_dim_v=other)
            assert not cuda.score_refusals(narrow, program, dtypes, ranks)


@pytest.mark.parametrize("mask", [SCATTERED, BY_HEAD], ids=lambda mask: mask.name)
@pytest.mark.parametrize("name", ["alibi", "documents", "square"])
def test_bits_and_heads_that_are_entries(name, mask, kernel):
    check_constants(kernel, name, mask)


@pytest.mark.parametrize("name", ["alibi", "tanh_of_sums"])
def test_one_long_sequence(name, kernel):
    """Blocks that have one entry, which short sequences do not."""
    check_constants(kernel, name, CAUSAL, batch=1, seqlen=300)


@pytest.mark.parametrize("name", ["alibi", "square"])
def test_deterministic(name, kernel):
    first, second = (check_constants(kernel, name, CAUSAL, deterministic=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
