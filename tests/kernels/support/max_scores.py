"""The largest score of each row, of any kernel, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, Kernel, new_max_scores
from magi_compile.kernels.reference import exact_max_scores
from magi_compile.masks.slices import AttnSlices
from tests.support.cases import AttentionInputs, Case
from tests.support.numerics import assert_attention_close

# The tanh of Hopper GPUs is an approximation: so much of the soft-cap is its error.
TANH_ERROR = 2**-10


def assert_max_scores_close(
    actual: Tensor,
    inputs: AttentionInputs,
    slices: AttnSlices,
    problem: AttnProblem,
    tanh_error: float = 0.0,
) -> None:
    """-inf in the rows that see nothing and nowhere else, and as exact as sums in fp32 are."""
    scale, softcap = problem.softmax_scale, problem.softcap
    exact = exact_max_scores(inputs.q, inputs.k, slices, scale, softcap)
    assert (actual.dtype, actual.shape) == (torch.float32, exact.shape)
    assert torch.equal(actual == -torch.inf, exact == -torch.inf)
    norms = [x.double().norm(dim=-1).amax() for x in (inputs.q, inputs.k)]
    step = torch.finfo(torch.float32).eps * scale * norms[0] * norms[1]
    allowed = 4 * step + tanh_error * softcap
    assert allowed < 0.02
    difference = (actual.double() - exact).masked_fill(exact == -torch.inf, 0.0)
    assert difference.abs().max() <= allowed, (difference.abs().max(), allowed)


def check_max_scores(
    kernel: Kernel, case: Case, dtype: torch.dtype, device: str = "cpu", tanh_error: float = 0.0
) -> None:
    """The whole of `case`, and one half of its slices behind the other, with the results of the first as a prior."""
    inputs, problem = case.inputs(dtype, device), case.problem(dtype, device)
    halves = [replace(case, rows=case.rows[begin::2]) for begin in range(2)]
    for parts in ([case], halves if case.rows[1:] else []):
        result, max_scores = None, new_max_scores(inputs.q)
        for i, part in enumerate(parts):
            slices = part.slices(device)
            asked = replace(problem, has_bits=slices.bits is not None, has_max_scores=True)
            result = kernel.forward(
                *(*inputs[:3], slices, kernel.plan(slices, asked), asked),
                prior=result,
                out_dtype=None if i + 1 == len(parts) else torch.float32,
                max_scores=max_scores,
            )
        if result is not None:
            assert_attention_close(result, inputs, case.slices(device), problem)
            given = (inputs, case.slices(device), problem, tanh_error)
            assert_max_scores_close(max_scores, *given)
