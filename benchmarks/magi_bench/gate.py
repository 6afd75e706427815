"""The numerical gate: a contender is timed only if it is right, about out, dq, dk and dv,
or about the loss and gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from magi_bench.contenders.base import Attend, Kernel, Layout
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.reference import exact_backward, exact_forward, plain_attention
from magi_compile.kernels.select import problem_on

RESULTS = ("out", "dq", "dk", "dv")
#: What a step returns: the loss, and gradients of attention's own weights, where a wrong mask shows most.
STEP_RESULTS = ("loss", "gradient of the first qkv", "gradient of the last qkv")


class Check(NamedTuple):
    """Relative errors (root mean square) against fp64, and what they may be.

    A contender may be twice as far from the truth as plain PyTorch in the same dtype, plus one rounding step.
    """

    seqlen: int
    errors: dict[str, float]
    allowed: dict[str, float]
    against: str = "the truth"

    @property
    def passed(self) -> bool:
        return all(error <= self.allowed[name] for name, error in self.errors.items())

    @property
    def worst(self) -> str:
        """The result that is furthest from the truth, in words, next to what is allowed."""
        name = max(self.errors, key=lambda name: self.errors[name] / self.allowed[name])
        other = "" if self.against == "the truth" else f"not what {self.against} gives: "
        return (
            f"{other}{name}: relative error {self.errors[name]:.2e}, allowed {self.allowed[name]:.2e}, "
            f"at {self.seqlen} tokens"
        )

    def to_json(self) -> dict[str, Any]:
        asked = ("seqlen", "errors", "allowed", "passed")
        return {name: getattr(self, name) for name in asked}


class Call(NamedTuple):
    """One call of a contender, forward and backward; its graph is kept for further backward passes."""

    leaves: list[Tensor]  # q, k and v in the contender's layout
    dout: Tensor  # in that layout too
    out: Tensor  # as the contender returned it
    grads: tuple[Tensor, ...]  # of the leaves; none of a contender without a backward


def run(attend: Attend, contender: Kernel, inputs: Inputs) -> Call:
    """Call `attend` once, and its backward if there is one."""
    layout = contender.layout
    leaves = [layout.of(x).detach().requires_grad_(contender.has_backward) for x in inputs[:3]]
    dout, out = layout.of(inputs.dout), attend(*leaves)
    if not contender.has_backward:
        return Call(leaves, dout, out, ())
    return Call(leaves, dout, out, torch.autograd.grad(out, leaves, dout, retain_graph=True))


def check(actual: Call, layout: Layout, workload: Workload, inputs: Inputs) -> Check:
    """Hold the results of `run` to the oracle; the workload must be short enough for dense fp64 scores."""
    results = [layout.to_packed(x.detach()) for x in (actual.out, *actual.grads)]
    truth = Truth.of(*exact_and_plain(workload, inputs), inputs.q.dtype)
    return truth.check(results, workload.case.seqlen)


class Truth(NamedTuple):
    """Results as they should be, of a call in the order of `RESULTS`, and the relative error that each may have."""

    exact: Sequence[Tensor]
    allowed: dict[str, float]  # by name
    against: str = "the truth"  # whose results they are

    @classmethod
    def of(
        cls,
        exact: Sequence[Tensor],
        plain: Sequence[Tensor],
        dtype: torch.dtype,
        names: Sequence[str] = RESULTS,
    ) -> Truth:
        """Allows twice the errors of `plain`, what plain PyTorch makes of it in a `dtype`, and one rounding step."""
        pairs, step = zip(names, plain, exact, strict=False), torch.finfo(dtype).eps
        return cls(exact, {name: 2 * relative_error(x, truth) + step for name, x, truth in pairs})

    def check(self, results: Sequence[Tensor], seqlen: int) -> Check:
        """Holds `results`, which may lack the last ones, to it."""
        found = zip(self.allowed, results, self.exact, strict=False)
        errors = {name: relative_error(x, truth) for name, x, truth in found}
        allowed = {name: self.allowed[name] for name in errors}
        return Check(seqlen, errors, allowed, self.against)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference over that of `exact`; infinite where a value is not finite."""
    actual, exact = actual.detach().double(), exact.detach().double()
    error = float((actual - exact).norm() / exact.norm())
    return error if error == error else float("inf")


def weigh(scores: Tensor, visible: Tensor | None, v: Tensor) -> Tensor:
    """Dense attention by its scores; rows that see nothing give 0."""
    if visible is None:
        return scores.softmax(-1).to(v.dtype) @ v
    sees_something = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible & sees_something, -torch.inf)
    return scores.softmax(-1).masked_fill(~sees_something, 0.0).to(v.dtype) @ v


def exact_and_plain(workload: Workload, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Out and gradients in fp64, and by plain PyTorch in the inputs' dtype, one key-value head at a time."""
    case = workload.case
    group = case.nheads_q // case.nheads_kv
    sizes, scale = (group, 1, *case.head_dims), case.head_dim**-0.5
    problem = problem_on(inputs.q.device, inputs.q.dtype, sizes, scale)
    exact, plain = [], []
    for kv_head in range(case.nheads_kv):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        q, dout = inputs.q[:, heads], inputs.dout[:, heads]
        k, v = (x[:, kv_head : kv_head + 1] for x in (inputs.k, inputs.v))
        slices = workload.head_slices(kv_head).to(q.device)
        out, lse = exact_forward(q, k, v, slices, problem.softmax_scale)
        grads = exact_backward(
            Grads(dout, None), Saved(q, k, v, out, lse), slices, problem.softmax_scale
        )
        exact.append((out, *grads))
        dlse = torch.zeros_like(lse, dtype=torch.float32)
        rounded = plain_attention(q, k, v, dout, dlse, slices, problem)
        plain.append((rounded.out, rounded.dq, rounded.dk, rounded.dv))
    return _join(exact), _join(plain)


def _join(heads: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(parts, 1) for parts in zip(*heads, strict=True)]


def truth_of_step(model: nn.Module, run: Callable[[], Sequence[Tensor]]) -> Truth:
    """The results of `run` with `model` in a dtype of twice the width, which it has afterwards. The error may be twice
    that of the model in its own dtype, and always as large as `rounding_of_step`."""
    plain, dtype = run(), next(model.parameters()).dtype
    model.to(torch.float64 if dtype == torch.float32 else torch.float32)
    exact, least = run(), rounding_of_step(dtype)
    theirs = Truth(exact, least).check(plain, 0).errors
    return Truth(exact, {name: max(2 * theirs[name], least[name]) for name in least})


def rounding_of_step(dtype: torch.dtype) -> dict[str, float]:
    """16 rounding steps in gradients and a quarter of one in the loss, a mean over many tokens. Another mask differs by
    much more."""
    eps = torch.finfo(dtype).eps
    return {name: max(eps / 4 if name == "loss" else 16 * eps, 1e-4) for name in STEP_RESULTS}
