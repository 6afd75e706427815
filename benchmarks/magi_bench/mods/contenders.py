"""Who takes part: FlexAttention through torch.compile, and ours in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
    noop_mask,
)

from magi_bench.cases import Case
from magi_bench.clock import Ready
from magi_bench.contenders.base import Contender
from magi_bench.gate import Check, judge
from magi_bench.mods.mod import BLOCK, ScoreMod
from magi_bench.mods.problem import Problem, results_of
from magi_bench.own_code import compiled
from magi_bench.step.contenders import NO_BACKWARD
from magi_compile.lowering.report import lowering_report


class Compiled(Contender):
    """FlexAttention, compiled by one backend of torch.compile with its `options`. Ratios are to those that are
    ours."""

    def __init__(
        self,
        name: str,
        label: str,
        is_ours: bool,
        backend: Any,
        options: dict[str, Any] | None = None,
        kernel_options: dict[str, Any] | None = None,
    ):
        self.name, self.label, self.is_ours = name, label, is_ours
        self.backend, self.options, self.kernel_options = backend, options, kernel_options
        self._decisions = 0

    def supports(self, problem: Problem, case: Case) -> list[str]:
        reasons, block_mask = [], problem.made.block_mask
        if not self.is_ours and case.which == "fwdbwd" and problem.settings.device == "cpu":
            reasons.append(NO_BACKWARD)
        # Blocks are hidden that the mask_mod would show.
        is_listed = block_mask is not None and block_mask.mask_mod is noop_mask
        if problem.settings.mask_in_graph and is_listed:
            reasons.append("its block lists decide, and no mask_mod makes them in a graph")
        return reasons

    def attend(self, problem: Problem, which: str) -> Callable[..., Tensor]:
        """A function of its own for each mod and pass. A graph break is an error."""
        if (self.name, which) not in problem.compiled:
            options = {"backend": self.backend, "options": self.options, "fullgraph": True}
            problem.compiled[self.name, which] = compiled(_attend, **options)
        return problem.compiled[self.name, which]

    def prepare(self, problem: Problem, case: Case) -> Ready:
        """Each call returns out, and in "fwdbwd" the gradients of `Leaves.differentiable`."""
        self._decisions = len(lowering_report().decisions)
        attend, made = self.attend(problem, case.which), problem.made
        leaves, makes_mask = problem.leaves(case.which == "fwdbwd"), problem.settings.mask_in_graph
        score_mod = made.score_mod(leaves.learned)

        def call() -> Sequence[Tensor]:
            of_mod = (score_mod, made.block_mask, self.kernel_options, makes_mask)
            out = attend(leaves.q, leaves.k, leaves.v, *of_mod)
            if case.which == "fwd":
                return [out]
            return [out, *torch.autograd.grad(out, leaves.differentiable, leaves.dout)]

        return Ready(call)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check | None:
        """Ours is held to FlexAttention's errors, where that is right."""
        if self.is_ours and len(lowering_report().decisions) == self._decisions:
            raise RuntimeError("no attention was in the graphs that were compiled")
        if problem.gate is not problem:
            return None
        out, *gradients = results
        found = results_of(out, gradients)
        check = judge(found, problem.exact, problem.plain, problem.names)
        if case.which in problem.yardstick:
            check = beside(check, problem.yardstick[case.which], problem.plain[0].dtype)
        elif self.name == FLEX.name and check.passed:
            problem.yardstick[case.which] = check
        return check


def beside(check: Check, yardstick: Check, dtype: torch.dtype) -> Check:
    """`check` with the errors of FlexAttention, which is right, in place of those of plain PyTorch."""
    step = torch.finfo(dtype).eps
    allowed = {name: 2 * yardstick.errors[name] + step for name in check.errors}
    return check._replace(allowed=allowed)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    kernel_options: Any,
    makes_mask: bool = False,
) -> Tensor:
    """One attention; with a BlockMask made of the mask_mod of `block_mask` if it `makes_mask`."""
    if makes_mask and block_mask is not None:
        shape: tuple[Any, ...] = (*block_mask.shape[:2], q.shape[2], k.shape[2], q.device, BLOCK)
        block_mask = create_block_mask(block_mask.mask_mod, *shape)
    options = {"enable_gqa": True, "kernel_options": kernel_options}
    return flex_attention(q, k, v, score_mod, block_mask, **options)


FLEX = Compiled("flex", "FlexAttention", False, "inductor")
MAGI = Compiled("magi", 'backend="magi"', True, "magi")
#: Beside FlexAttention's own kernels, if they are asked for by name.
PEERS = {
    "flex-flash": Compiled(
        *("flex-flash", "FlexAttention (FLASH)", False, "inductor"),
        kernel_options={"BACKEND": "FLASH"},
    )
}


def contenders(kernels: Sequence[str], peers: Sequence[str] = ()) -> list[Compiled]:
    """In the order of reports: FlexAttention first, since ours is held to its errors and to its time."""
    named = [
        Compiled(f"magi-{x}", f'backend="magi", {x}', True, "magi", {"magi.kernel": x})
        for x in kernels
    ]
    return [FLEX, *(PEERS[name] for name in peers), MAGI, *named]
