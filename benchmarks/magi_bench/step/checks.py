"""Holds the results of a contender's first call to the truth: those of attention, and those of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from magi_bench.contenders.base import Layout
from magi_bench.kernel import gate
from magi_bench.kernel.gate import Check
from magi_bench.step.cases import Case
from magi_bench.step.problem import Problem
from magi_bench.workloads.llama import Llama

#: What a step returns: the loss, and gradients of attention's own weights, where a wrong mask shows most.
STEP_RESULTS = ("loss", "gradient of the first qkv", "gradient of the last qkv")


def check_attention(
    problem: Problem, case: Case, results: Sequence[Tensor], layout: Layout
) -> Check:
    """The first and the last layer, out and gradients, against fp64; the worse of the two."""
    checks = []
    for layer in {0, case.layers - 1}:
        packed = [layout.to_packed(x.detach()) for x in results[layer :: case.layers]]
        checks.append(gate.judge(packed, *problem.reference(layer)))
    return max(checks, key=lambda check: max(x / check.allowed[n] for n, x in check.errors.items()))


class StepTruth(NamedTuple):
    """Loss and gradients of a step, in the order of `STEP_RESULTS`, and the relative error that each may have."""

    exact: Sequence[Tensor]
    allowed: dict[str, float]

    def check(self, results: Sequence[Tensor], seqlen: int) -> Check:
        """Holds `results`, which may lack the gradients, to it."""
        errors = {
            name: gate.relative_error(x.to(truth.dtype), truth)
            for name, x, truth in zip(STEP_RESULTS, results, self.exact, strict=False)
        }
        return Check(seqlen, errors, {name: self.allowed[name] for name in errors})


def truth_of_step(model: nn.Module, run: Callable[[], list[Tensor]]) -> StepTruth:
    """What `run` gives with `model` in a dtype of twice the width, which it has afterwards. The error may be twice that of the
    model in its own dtype, and always as large as `rounding_of_step`."""
    plain, dtype = run(), next(model.parameters()).dtype
    model.to(torch.float64 if dtype == torch.float32 else torch.float32)
    exact, least = run(), rounding_of_step(dtype)
    theirs = StepTruth(exact, least).check(plain, 0).errors
    return StepTruth(exact, {name: max(2 * theirs[name], least[name]) for name in least})


def rounding_of_step(dtype: torch.dtype) -> dict[str, float]:
    """16 rounding steps in gradients and a quarter of one in the loss, a mean over many tokens. Another mask differs by much
    more."""
    eps = torch.finfo(dtype).eps
    return {name: max(eps / 4 if name == "loss" else 16 * eps, 1e-4) for name in STEP_RESULTS}


def checked_parameters(model: Llama) -> list[Tensor]:
    """Whose gradients are compared: attention's own, where a wrong mask shows most."""
    return [model.get_parameter(f"blocks.{at}.qkv.weight") for at in (0, len(model.blocks) - 1)]
