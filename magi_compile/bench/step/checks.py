"""Holds the results of a contender's first call to the truth: those of attention, and those of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from magi_compile.bench.contenders.base import Layout
from magi_compile.bench.kernel import gate
from magi_compile.bench.kernel.gate import Check
from magi_compile.bench.step.cases import Case
from magi_compile.bench.step.problem import Problem
from magi_compile.bench.workloads.llama import Llama


def check_attention(
    problem: Problem, case: Case, results: Sequence[Tensor], layout: Layout
) -> Check:
    """The first and the last layer, out and gradients, against fp64; the worse of the two."""
    checks = []
    for layer in {0, case.layers - 1}:
        packed = [layout.to_packed(x.detach()) for x in results[layer :: case.layers]]
        checks.append(gate.judge(packed, *problem.reference(layer)))
    return max(checks, key=lambda check: max(x / check.allowed[n] for n, x in check.errors.items()))


def check_step(
    model: Llama, run: Callable[[], list[Tensor]], results: Sequence[Tensor], seqlen: int
) -> Check:
    """Holds loss and gradients of `checked_parameters` to those of `run` with `model` in a dtype of twice the width, which it has
    afterwards. The error may be twice that of this model in its own dtype, and always as large as 16 rounding steps in
    gradients and a quarter of one in the loss, a mean over many tokens. Another mask differs by much more."""
    plain, dtype = run(), model.embedding.weight.dtype
    model.to(torch.float64 if dtype == torch.float32 else torch.float32)
    exact = run()
    names = ("loss", "gradient of the first qkv", "gradient of the last qkv")
    errors, theirs = (
        {
            name: gate.relative_error(x.to(truth.dtype), truth)
            for name, x, truth in zip(names, of, exact, strict=False)
        }
        for of in (results, plain)
    )
    eps = torch.finfo(dtype).eps
    least = {name: max(eps / 4 if name == "loss" else 16 * eps, 1e-4) for name in errors}
    allowed = {name: max(2 * theirs[name], least[name]) for name in errors}
    return Check(seqlen, errors, allowed)


def checked_parameters(model: Llama) -> list[Tensor]:
    """Whose gradients are compared: attention's own, where a wrong mask shows most."""
    return [model.get_parameter(f"blocks.{at}.qkv.weight") for at in (0, len(model.blocks) - 1)]
