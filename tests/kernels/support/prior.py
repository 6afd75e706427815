"""Attention over two sets of keys, the second merged with the first by the kernel itself."""

from __future__ import annotations

from dataclasses import replace

import torch

from magi_compile.kernels.base import Kernel
from tests.support.cases import Case
from tests.support.numerics import assert_attention_close


def check_prior(
    kernel: Kernel, case: Case, dtype: torch.dtype, out_dtype: torch.dtype | None, device: str
) -> None:
    """Hold `kernel` to the oracle where one half of the slices of `case` is a prior of the other."""
    problem, inputs = case.problem(dtype, device), case.inputs(dtype, device)
    output = None
    for rows, part_dtype in ((case.rows[::2], torch.float32), (case.rows[1::2], out_dtype)):
        slices = replace(case, rows=rows).slices(device)
        plan = kernel.plan(slices, problem)
        output = kernel.forward(
            *inputs[:3], slices, plan, problem, prior=output, out_dtype=part_dtype
        )
        assert output.out.dtype == (part_dtype or dtype)
    out, lse = output
    assert_attention_close((out.to(dtype), lse), inputs, case.slices(device), problem)
