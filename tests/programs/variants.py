"""Attention variants that others have published, and what becomes of them: which way each runs,
and whether it is right.

A variant is a mask_mod, a score_mod or both, as its authors wrote them. It is compared with dense attention in fp64,
output and all gradients, with its BlockMask made inside of the compiled function and outside of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

import magi_compile
from magi_compile.masks.bits import FIRST_BITS

DOCUMENT = Path(__file__).parents[2] / "docs" / "published.md"
BATCH, HEADS, DIM = 2, 4, 16
INTERVALS, BITS, SCORE, SOFTCAP = "intervals", "bit blocks", "score program", "scale or soft-cap"
REFUSED = "refused"


@dataclass(frozen=True)
class Variant:
    """One published mask or score_mod.

    Attributes:
        name: its name, for readers and as the id of its test.
        mask_mod: what a query sees; None for everything.
        score_mod: what becomes of a score; None for nothing.
        lengths: of queries and of keys.
        leaves: captured tensors that want gradients.
        block_mask: a BlockMask that the authors make themselves, of which `mask_mod` is the truth.
        heads: how many masks there are, where heads have masks of their own.
        batch: how many masks there are, where batch entries have masks of their own.
        remark: what a reader should know.
    """

    name: str
    mask_mod: Callable[..., Tensor] | None = None
    score_mod: Callable[..., Tensor] | None = None
    lengths: tuple[int, int] = (300, 300)
    leaves: tuple[Tensor, ...] = ()
    block_mask: Callable[[], BlockMask] | None = None
    heads: int | None = None
    batch: int | None = None
    remark: str = ""

    def make_block_mask(self) -> BlockMask | None:
        """As the authors make it, or else as PyTorch does."""
        if self.block_mask is not None:
            return self.block_mask()
        if self.mask_mod is None:
            return None
        return create_block_mask(self.mask_mod, self.batch, self.heads, *self.lengths, device="cpu")

    def attend(self) -> Callable[..., list[Tensor]]:
        """Attention under a BlockMask that is there already, and under one that is made where it runs,
        unless the authors make it."""
        there = self.make_block_mask()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
            outs = [flex_attention(q, k, v, self.score_mod, there)]
            if self.makes_its_own:
                outs.append(flex_attention(q, k, v, self.score_mod, self.make_block_mask()))
            return outs

        return attend

    @property
    def makes_its_own(self) -> bool:
        """Whether `create_block_mask` makes its BlockMask, which it also does inside of a compiled function."""
        return self.mask_mod is not None and self.block_mask is None


@dataclass(frozen=True)
class Outcome:
    """What became of one variant: its ways, and why it is refused."""

    mask: str
    score: str
    reasons: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """The same in words."""
        return ", ".join(filter(None, (self.mask, self.score))) or "no mask"


def inputs(variant: Variant) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (variant.lengths[0], variant.lengths[1], variant.lengths[1])
    q, k, v = (torch.randn(BATCH, HEADS, n, DIM, generator=generator) for n in lengths)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def scores_of(variant: Variant, q: Tensor, k: Tensor) -> Tensor:
    """All scores, those of hidden pairs -inf, in the dtype of q."""
    sizes = (BATCH, HEADS, *variant.lengths)
    scores = q @ k.mT * DIM**-0.5
    if variant.score_mod is not None:
        f = variant.score_mod
        for dim in (4, 3, 2, 1):
            f = torch.vmap(f, in_dims=(0, *(0 if i == dim else None for i in range(1, 5))))
        scores = f(scores, *map(torch.arange, sizes))
    if variant.mask_mod is None:
        return scores
    return scores.masked_fill(~create_mask(variant.mask_mod, *sizes, device="cpu"), -torch.inf)


def dense(variant: Variant, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with the whole score matrix, in the dtype of q. Rows that see nothing give 0."""
    scores = scores_of(variant, q, k)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return weights.to(v.dtype) @ v


def results(out: Tensor, tensors: Any, leaves: Any) -> list[Tensor]:
    """An output, and the gradients of q, k, v and the leaves."""
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    gradients = torch.autograd.grad((out * weights).sum(), [*tensors, *leaves])
    return [out.detach(), *gradients]


class Truth:
    """What dense attention gives in fp64, and how far from it one may be."""

    def __init__(self, variant: Variant):
        q, k, v = inputs(variant)
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        self.exact, plain = (
            results(dense(variant, *tensors), tensors, variant.leaves)
            for tensors in (doubles, (q, k, v))
        )
        scores = scores_of(variant, q, k).detach()
        # A weight exp(score - lse) is as exact as its score.
        steps = 8 * max(1.0, float(scores[scores.isfinite()].abs().max()))
        self.bounds = [
            2 * (x - y).abs().max() + steps * torch.finfo(torch.float32).eps * y.abs().max()
            for x, y in zip(plain, self.exact, strict=True)
        ]

    def check(self, ours: list[Tensor]) -> None:
        """At most twice the error of plain PyTorch in fp32, and some rounding steps for sums in another order.

        Raises:
            AssertionError: with the result that is off, and by how much.
        """
        for number, (x, y) in enumerate(zip(ours, self.exact, strict=False)):
            error = (x - y).abs().max()
            assert error <= self.bounds[number], (
                number,
                float(error),
                float(self.bounds[number]),
            )


def check(variant: Variant, backend: Any = "magi") -> Outcome:
    """Compiles and runs it, compares, and says which way it took.

    Raises:
        AssertionError: a result is wrong, or its calls take different ways.
    """
    torch._dynamo.reset()
    report = magi_compile.lowering_report()
    report.clear()
    truth, attend, tensors = Truth(variant), variant.attend(), inputs(variant)
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    try:
        num_calls = len(compiled(*tensors))
    except Exception as error:
        if "LoweringRefusedError" not in str(error):
            raise
        reasons = report.refused[0].reasons
        _check_refused(attend, tensors, truth)
        return Outcome(REFUSED, "", reasons)
    assert len(report.lowered) == num_calls
    for number in range(num_calls):
        truth.check(results(compiled(*tensors)[number], tensors, variant.leaves))
    (mask,) = {_way_of(decision, variant) for decision in report.lowered}
    if variant.score_mod is None:
        return Outcome(mask, "")
    return Outcome(mask, SCORE if report.lowered[0].score else SOFTCAP)


def _check_refused(attend: Callable[..., list[Tensor]], tensors: Any, truth: Truth) -> None:
    """FlexAttention runs it, which has no gradients on a CPU; Inductor has code for few of them there,
    so eager code runs around it."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=magi_compile.make_backend(inner="eager"))
    for out in compiled(*(x.detach() for x in tensors)):
        truth.check([out])


def _way_of(decision: Any, variant: Variant) -> str:
    """Which way a mask took; where its data decide, `explain` runs it again and looks."""
    if variant.mask_mod is None:
        return ""
    if not decision.notes:
        return INTERVALS
    if decision.notes[0].startswith("by bit blocks"):
        return BITS
    tensors = [x.detach() for x in inputs(variant)]
    calls = magi_compile.explain(variant.attend(), *tensors).calls
    has_bits = any(bool((call.slices.mask_types >= FIRST_BITS).any()) for call in calls)
    return BITS if has_bits else INTERVALS


def row(variant: Variant, outcome: Outcome) -> str:
    """The line of a table of docs/published.md."""
    remark = variant.remark or "; ".join(outcome.reasons)
    return f"| {variant.name} | {outcome.way} | {remark} |"


def print_tables(tables: dict[str, list[Variant]]) -> None:
    """Runs all of them in front of the compiler that the command line names, and prints a table for each heading."""
    backend = magi_compile.make_backend(inner=sys.argv[1] if len(sys.argv) > 1 else "eager")
    for heading, variants in tables.items():
        print(f"\n| {heading} | way | remarks |\n|---|---|---|")
        for variant in variants:
            print(row(variant, check(variant, backend)), flush=True)


def assert_as_documented(variant: Variant) -> None:
    """Right, and in a table of docs/published.md as it ran; without Inductor,
    whose compilers take longer than all the rest."""
    line = row(variant, check(variant, magi_compile.make_backend(inner="eager")))
    assert line in DOCUMENT.read_text().splitlines(), f"not in {DOCUMENT}:\n{line}"
