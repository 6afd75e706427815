"""Who takes part: FlexAttention through torch.compile, and ours in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
    noop_mask,
)

from magi_bench.mods.mod import BLOCK, ScoreMod
from magi_bench.mods.problem import Problem
from magi_bench.own_code import with_own_code
from magi_bench.step.clock import Ready
from magi_bench.step.contenders import NO_BACKWARD

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Contender:
    """FlexAttention, compiled by one backend.

    Attributes:
        name: in result files.
        label: in reports.
        is_ours: whether ratios are of it; the others are what it is compared with.
        backend: of torch.compile.
        options: of that backend.
        kernel_options: of FlexAttention.
    """

    name: str
    label: str
    is_ours: bool
    backend: Any
    options: dict[str, Any] = field(default_factory=dict)
    kernel_options: dict[str, Any] | None = None

    def refusals(self, which: str, problem: Problem) -> list[str]:
        """Every reason against a pass; empty if it runs."""
        reasons = []
        if not self.is_ours and which == "fwdbwd" and problem.settings.device == "cpu":
            reasons.append(NO_BACKWARD)
        block_mask = problem.made.block_mask
        if problem.settings.mask_in_graph and block_mask is not None and _lists_decide(block_mask):
            reasons.append("its block lists decide, and no mask_mod makes them in a graph")
        return reasons

    def compiled(self, mask_in_graph: bool) -> Attend:
        """A function of its own, which has compiled nothing yet. A graph break is an error."""
        return torch.compile(
            with_own_code(_attend_with_new_mask if mask_in_graph else _attend),
            backend=self.backend,
            options=self.options or None,
            fullgraph=True,
            dynamic=False,
        )

    def prepare(self, attend: Attend, problem: Problem, which: str) -> Ready:
        """Calls of `attend`; each returns out, and in "fwdbwd" the gradients of `Leaves.differentiable`."""
        leaves = problem.leaves(which == "fwdbwd")
        made = problem.made
        score_mod = made.score_mod(leaves.learned)

        def call() -> Sequence[Tensor]:
            of_mod = (score_mod, made.block_mask, self.kernel_options)
            out = attend(leaves.q, leaves.k, leaves.v, *of_mod)
            if which == "fwd":
                return [out]
            return [out, *torch.autograd.grad(out, leaves.differentiable, leaves.dout)]

        return Ready(call)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    kernel_options: Any,
) -> Tensor:
    """One attention."""
    return flex_attention(
        q, k, v, score_mod, block_mask, enable_gqa=True, kernel_options=kernel_options
    )


def _attend_with_new_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    kernel_options: Any,
) -> Tensor:
    """The same, with a BlockMask made of the mask_mod of `block_mask`."""
    if block_mask is not None:
        entries, heads = block_mask.shape[:2]
        lengths = q.shape[2], k.shape[2]
        block_mask = create_block_mask(
            block_mask.mask_mod, entries, heads, *lengths, q.device, BLOCK
        )
    return _attend(q, k, v, score_mod, block_mask, kernel_options)


def _lists_decide(block_mask: BlockMask) -> bool:
    """Whether blocks are hidden that the mask_mod would show."""
    return block_mask.mask_mod is noop_mask


FLEX = Contender("flex", "FlexAttention", False, "inductor")
MAGI = Contender("magi", 'backend="magi"', True, "magi")
#: Beside FlexAttention's own kernels, if they are asked for by name.
PEERS = {
    "flex-flash": Contender(
        *("flex-flash", "FlexAttention (FLASH)", False, "inductor"),
        kernel_options={"BACKEND": "FLASH"},
    )
}


def contenders(kernels: Sequence[str], peers: Sequence[str] = ()) -> list[Contender]:
    """In the order of reports: FlexAttention first, since ours is held to its errors and to its time."""
    named = [
        Contender(f"magi-{x}", f'backend="magi", {x}', True, "magi", {"magi.kernel": x})
        for x in kernels
    ]
    return [FLEX, *(PEERS[name] for name in peers), MAGI, *named]
