"""Who takes part, and how each is called: compiled FlexAttention and ours, and eager functions beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from magi_bench.cases import Case
from magi_bench.clock import Ahead, Ready
from magi_bench.contenders.base import Contender, Layout
from magi_bench.contenders.flash_attention import FlashAttention4
from magi_bench.contenders.flex import FlexFlash
from magi_bench.gate import Check, judge
from magi_bench.step.problem import Problem, Way
from magi_bench.training import build, check_steps, steps
from magi_bench.workloads.llama import Llama, causal_within
from magi_compile.ops.attention import flex_flash_attention

NO_BACKWARD = "FlexAttention has no backward on a CPU"


class StepContender(Contender):
    """One way to compute a case. It takes part in the rows of some `groups`, names in `suite.GROUPS`."""

    groups: tuple[str, ...]


class Compiled(StepContender):
    """FlexAttention through torch.compile, with one of its backends."""

    groups: tuple[str, ...] = ("calls", "layers", "training")
    backend = "inductor"
    kernel_options: dict[str, Any] | None = None

    def __init__(self) -> None:
        self._model: Llama | None = None

    def supports(self, problem: Problem, case: Case) -> list[str]:
        if problem.ways[case.mask].mode and problem.settings.device == "cpu":
            return ["CUDA graphs need a GPU"]
        return []

    def prepare(self, problem: Problem, case: Case) -> Ready:
        if problem.ways[case.mask].group == "training":
            return self._prepare_training(problem, case)
        return self._prepare_attention(problem, case)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        if problem.ways[case.mask].group == "training":
            model = build(problem.settings, case.layers, problem.settings.device)
            return check_steps(model, problem.pack(0), results)
        return check_attention(problem, case, results, Layout.HEADS_FIRST)

    def _compiled(self, problem: Problem, way: Way, key: Any, function: Any) -> Any:
        options = {"backend": self.backend} | ({"mode": way.mode} if way.mode else {})
        return problem.compiled(
            (self.name, way.mask == "graph", way.mode, key), function, **options
        )

    def _prepare_attention(self, problem: Problem, case: Case) -> Ready:
        way = problem.ways[case.mask]
        is_deep = way.group == "layers"
        key, function = (
            (case.layers if is_deep else 0, case.which),
            _attend_layers if is_deep else _attend,
        )
        attend = self._compiled(problem, way, key, function)
        leaves, dout = _leaves(problem, case, Layout.HEADS_FIRST)
        masks = Masks(problem, way)
        q, k, v = leaves if is_deep else [tensors[0] for tensors in leaves]

        def call() -> Sequence[Tensor]:
            if way.mode:
                torch.compiler.cudagraph_mark_step_begin()
            out = attend(q, k, v, masks.next(), self.kernel_options)
            return _with_gradients([out] if isinstance(out, Tensor) else out, leaves, dout, case)

        masks.renew(1)
        return Ready(call, masks.renew)

    def _prepare_training(self, problem: Problem, case: Case) -> Ready:
        settings, way = problem.settings, problem.ways[case.mask]
        if self._model is None:
            self._model = build(settings, case.layers, settings.device, self.kernel_options)
        loss_of = self._compiled(problem, way, ("training", case.which), Llama.forward)

        def make(turn: int) -> tuple[Any, ...]:
            mask = None if way.mask == "graph" else problem.new_block_mask(turn)
            return (*problem.pack(turn)[:3], mask)

        return steps(self._model, loss_of, Ahead(make), case.which)


class Flex(Compiled):
    name = "flex"
    label = "FlexAttention"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        if case.which == "fwdbwd" and problem.settings.device == "cpu":
            return [NO_BACKWARD]
        return super().supports(problem, case)


class FlexByFlash(Compiled):
    name = "flex-flash"
    label = "FlexAttention, FLASH"
    groups = ("calls", "eager", "training")
    kernel_options = {"BACKEND": "FLASH"}  # noqa: RUF012

    def unavailable(self, device: str) -> str | None:
        return "runs on cuda, not on cpu" if device == "cpu" else FlexFlash().available()

    def supports(self, problem: Problem, case: Case) -> list[str]:
        if problem.ways[case.mask].mode:
            # With torch 2.11, a NameError in the graph. The next contender's CUDA graphs then fail an assertion.
            return [
                "its graph fails while CUDA graph trees record it, and nobody can use these afterwards"
            ]
        return super().supports(problem, case)


class Magi(Compiled):
    name = "magi"
    label = 'backend="magi"'
    backend = "magi"
    is_ours = True


class MagiEager(StepContender):
    name = "magi-eager"
    label = "flex_flash_attention"
    groups = ("eager",)
    is_ours = True

    def prepare(self, problem: Problem, case: Case) -> Ready:
        slices = problem.workload().slices.to(problem.settings.device)
        return _packed(problem, case, lambda q, k, v: flex_flash_attention(q, k, v, slices).out)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        return check_attention(problem, case, results, Layout.PACKED)


class FlashAttention(MagiEager):
    name = "fa4"
    label = "flash-attn-4, varlen"
    is_ours = False

    def unavailable(self, device: str) -> str | None:
        return "runs on cuda, not on cpu" if device == "cpu" else FlashAttention4().available()

    def prepare(self, problem: Problem, case: Case) -> Ready:
        attend = FlashAttention4().prepare(problem.workload(), problem.inputs(0))
        return _packed(problem, case, attend)


#: In the order of reports.
CONTENDERS: tuple[type[StepContender], ...] = (Flex, FlexByFlash, FlashAttention, Magi, MagiEager)


class Masks(Ahead):
    """The mask of the next call: a BlockMask, or the document of each token, from which the call makes one."""

    def __init__(self, problem: Problem, way: Way):
        self._problem, self._way = problem, way
        super().__init__(self._make)

    def renew(self, calls: int) -> None:
        if self._way.is_new or not self._made:
            super().renew(calls if self._way.is_new else 1)

    def next(self) -> BlockMask | Tensor:
        return self._made.pop() if self._way.is_new else self._made[0]

    def _make(self, turn: int) -> BlockMask | Tensor:
        if self._way.mask == "graph":
            return self._problem.document(turn)
        maker = "magi" if self._way.mask == "magi" else "pytorch"
        make = self._problem.new_block_mask if self._way.is_new else self._problem.block_mask
        return make(turn, maker)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor, kernel_options: Any
) -> Tensor:
    """One attention; makes the mask itself of the document of each token."""
    if isinstance(mask, Tensor):
        mask = causal_within(mask)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=kernel_options)


def _attend_layers(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], mask: BlockMask | Tensor, kernel_options: Any
) -> list[Tensor]:
    """Many attentions under one mask."""
    if isinstance(mask, Tensor):
        mask = causal_within(mask)
    layers = zip(q, k, v, strict=True)
    return [_attend(*layer, mask, kernel_options) for layer in layers]


def _leaves(
    problem: Problem, case: Case, layout: Layout
) -> tuple[tuple[list[Tensor], ...], list[Tensor]]:
    """The q, the k and the v of all layers, and the gradients of what comes out of each."""
    inputs = [problem.inputs(layer) for layer in range(case.layers)]
    needs_grad = case.which == "fwdbwd"

    def leaf(x: Tensor) -> Tensor:
        return layout.of(x).detach().requires_grad_(needs_grad)

    leaves = tuple([leaf(x) for x in tensors] for tensors in list(zip(*inputs, strict=True))[:3])
    return leaves, [layout.of(layer.dout) for layer in inputs]


def _with_gradients(
    outs: Sequence[Tensor], leaves: Sequence[list[Tensor]], dout: list[Tensor], case: Case
) -> Sequence[Tensor]:
    """`outs`, and behind them the gradients of q, of k and of v of all layers if the case has a backward."""
    if case.which == "fwd":
        return outs
    flat = list(itertools.chain(*leaves))
    return [*outs, *torch.autograd.grad(outs, flat, dout)]


def check_attention(
    problem: Problem, case: Case, results: Sequence[Tensor], layout: Layout
) -> Check:
    """The first and the last layer, out and gradients, against fp64; the worse of the two."""
    checks = []
    for layer in {0, case.layers - 1}:
        packed = [layout.to_packed(x.detach()) for x in results[layer :: case.layers]]
        checks.append(judge(packed, *problem.reference(layer)))
    return max(checks, key=lambda check: max(x / check.allowed[n] for n, x in check.errors.items()))


def _packed(problem: Problem, case: Case, attend: Callable[..., Tensor]) -> Ready:
    """An eager function of `[tokens, heads, head_dim]`."""
    leaves, dout = _leaves(problem, case, Layout.PACKED)
    q, k, v = (tensors[0] for tensors in leaves)
    return Ready(lambda: _with_gradients([attend(q, k, v)], leaves, dout, case))
