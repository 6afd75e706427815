"""Who takes part, and how each is called: compiled FlexAttention and ours, and eager functions beside them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from magi_bench.contenders.base import Layout
from magi_bench.contenders.flash_attention import FlashAttention4
from magi_bench.contenders.flex import BLOCK, FlexFlash
from magi_bench.kernel.gate import Check
from magi_bench.step.cases import Case
from magi_bench.step.checks import check_attention, checked_parameters, truth_of_step
from magi_bench.step.clock import Ready
from magi_bench.step.problem import MAKERS, Problem
from magi_bench.workloads.derive import block_areas
from magi_bench.workloads.llama import Llama, Shape, causal_within
from magi_compile.ops.attention import flex_flash_attention

NO_BACKWARD = "FlexAttention has no backward on a CPU"


class Contender(ABC):
    """One way to compute a case.

    Attributes:
        name: in result files and on the command line.
        label: in reports.
        groups: whose rows it takes part in, names in `cases.GROUPS`.
        is_ours: whether ratios are to its time; one contender of each row.
    """

    name: str
    label: str
    groups: tuple[str, ...]
    is_ours: bool = False

    def unavailable(self, device: str) -> str | None:
        """Why it cannot be had here, or None."""
        return None

    def refusals(self, case: Case, device: str) -> list[str]:
        """Every reason against a case; empty if it runs."""
        return []

    @abstractmethod
    def prepare(self, problem: Problem, case: Case) -> Ready:
        """Everything that comes before the first call."""

    @abstractmethod
    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        """Holds the results of the first call, which are those of turn 0, to the truth."""


class Compiled(Contender):
    """FlexAttention through torch.compile, with one of its backends."""

    groups: tuple[str, ...] = ("calls", "layers", "training")
    backend = "inductor"
    kernel_options: dict[str, Any] | None = None

    def __init__(self) -> None:
        self._model: Llama | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._before: dict[str, Tensor] = {}

    def refusals(self, case: Case, device: str) -> list[str]:
        if case.row.mode == "reduce-overhead" and device == "cpu":
            return ["CUDA graphs need a GPU"]
        return []

    def prepare(self, problem: Problem, case: Case) -> Ready:
        if case.row.group == "training":
            return self._prepare_training(problem, case)
        return self._prepare_attention(problem, case)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        if case.row.group == "training":
            return self._check_training(problem, case, results)
        return check_attention(problem, case, results, Layout.HEADS_FIRST)

    def _options(self, case: Case) -> dict[str, Any]:
        return {"backend": self.backend} | ({"mode": case.row.mode} if case.row.mode else {})

    def _prepare_attention(self, problem: Problem, case: Case) -> Ready:
        is_deep, is_inside = case.row.group == "layers", case.row.mask == "graph"
        key = (self.name, case.layers if is_deep else 0, is_inside, case.row.mode, case.which)
        function = _attend_layers if is_deep else _attend
        attend = problem.compiled(key, function, **self._options(case))
        leaves, dout = _leaves(problem, case, Layout.HEADS_FIRST)
        masks = Masks(problem, case)
        q, k, v = leaves if is_deep else [tensors[0] for tensors in leaves]

        def call() -> Sequence[Tensor]:
            if case.row.mode:
                torch.compiler.cudagraph_mark_step_begin()
            out = attend(q, k, v, masks.next(), self.kernel_options)
            return _with_gradients([out] if isinstance(out, Tensor) else out, leaves, dout, case)

        masks.renew(1)
        return Ready(call, masks.renew)

    def _prepare_training(self, problem: Problem, case: Case) -> Ready:
        model = self._model = self._model or _build(problem, case, self.kernel_options)
        if problem.settings.has_optimizer and self._optimizer is None:
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        key = (self.name, "training", case.row.mask == "graph", case.which)
        loss_of = problem.compiled(key, Llama.forward, **self._options(case))
        packs = Packs(problem, case)

        def forward() -> Sequence[Tensor]:
            with torch.no_grad():
                return [loss_of(model, *packs.next())]

        def step() -> Sequence[Tensor]:
            model.zero_grad()
            loss = loss_of(model, *packs.next())
            loss.backward()
            gradients = [x.grad for x in checked_parameters(model) if x.grad is not None]
            if self._optimizer is not None:
                self._optimizer.step()
            return [loss.detach(), *gradients]

        packs.renew(1)
        if self._optimizer is not None:
            self._before = {name: x.clone() for name, x in model.state_dict().items()}
        return Ready(forward if case.which == "fwd" else step, packs.renew)

    def _check_training(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        """Compares with the same model without FlexAttention and torch.compile, with the weights of the first step."""
        model = _build(problem, case, None)
        assert self._model is not None
        model.load_state_dict(
            self._before if self._optimizer is not None else self._model.state_dict()
        )
        tokens, targets, document, _ = Packs(problem, case).make(0)

        def run() -> list[Tensor]:
            loss = model(tokens, targets, document, problem.lengths(0))
            return [loss.detach(), *torch.autograd.grad(loss, checked_parameters(model))]

        return truth_of_step(model, run).check(results, problem.tokens)


class Flex(Compiled):
    name = "flex"
    label = "FlexAttention"

    def refusals(self, case: Case, device: str) -> list[str]:
        if case.which == "fwdbwd" and device == "cpu":
            return [NO_BACKWARD]
        return super().refusals(case, device)


class FlexByFlash(Compiled):
    name = "flex-flash"
    label = "FlexAttention, FLASH"
    groups = ("calls", "eager", "training")
    kernel_options = {"BACKEND": "FLASH"}  # noqa: RUF012

    def unavailable(self, device: str) -> str | None:
        return "runs on cuda, not on cpu" if device == "cpu" else FlexFlash().available()

    def refusals(self, case: Case, device: str) -> list[str]:
        if case.row.mode == "reduce-overhead":
            # With torch 2.11, a NameError in the graph. The next contender's CUDA graphs then fail an assertion.
            return [
                "its graph fails while CUDA graph trees record it, and nobody can use these afterwards"
            ]
        return super().refusals(case, device)


class Magi(Compiled):
    name = "magi"
    label = 'backend="magi"'
    backend = "magi"
    is_ours = True


class MagiEager(Contender):
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


class MaskOnly(Contender):
    """Makes a BlockMask of the document of each token."""

    name = "pytorch-mask"
    label = "PyTorch's create_block_mask"
    groups = ("masks",)

    def prepare(self, problem: Problem, case: Case) -> Ready:
        make, documents = self._maker(problem), Masks(problem, case)

        def call() -> Sequence[Tensor]:
            mask = make(documents.next())
            counts, indices = mask.full_kv_num_blocks, mask.full_kv_indices
            assert counts is not None and indices is not None
            return [mask.kv_num_blocks, mask.kv_indices, counts, indices]

        documents.renew(1)
        return Ready(call, documents.renew)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        """The blocks that are listed, partial ones and full ones, are those that the slices say; all of them."""
        areas = block_areas(problem.workload().slices, BLOCK, results[0].device)
        is_full = areas == BLOCK**2
        errors = {
            name: float((_listed(*lists) != expected).double().mean())
            for name, lists, expected in (
                ("partial blocks", results[:2], (areas > 0) & ~is_full),
                ("full blocks", results[2:], is_full),
            )
        }
        return Check(problem.tokens, errors, dict.fromkeys(errors, 1e-9))

    def _maker(self, problem: Problem) -> Callable[[Any], BlockMask]:
        return MAKERS["pytorch"]


class CompiledMaskOnly(MaskOnly):
    name = "pytorch-mask-compiled"
    label = "PyTorch's, compiled"

    def _maker(self, problem: Problem) -> Callable[[Any], BlockMask]:
        return problem.compiled(self.name, MAKERS["pytorch"])


class MagiMaskOnly(MaskOnly):
    name = "magi-mask"
    label = "magi_compile.create_block_mask"
    is_ours = True

    def _maker(self, problem: Problem) -> Callable[[Any], BlockMask]:
        return MAKERS["magi"]


#: In the order of reports.
CONTENDERS: tuple[type[Contender], ...] = (
    Flex,
    FlexByFlash,
    FlashAttention,
    Magi,
    MagiEager,
    MaskOnly,
    CompiledMaskOnly,
    MagiMaskOnly,
)


class Masks:
    """The mask of the next call: a BlockMask, or the document of each token, from which the call makes one."""

    def __init__(self, problem: Problem, case: Case):
        self._problem, self._row = problem, case.row
        self._turns = itertools.count()
        self._made: list[BlockMask | Tensor] = []

    def renew(self, calls: int) -> None:
        """Makes the masks of so many calls, if they are to have new ones."""
        if self._row.is_new or not self._made:
            self._made = [self._make(turn) for turn in itertools.islice(self._turns, calls)][::-1]

    def next(self) -> BlockMask | Tensor:
        return self._made.pop() if self._row.is_new else self._made[0]

    def _make(self, turn: int) -> BlockMask | Tensor:
        if self._row.mask in ("graph", "measured"):
            return self._problem.document(turn)
        maker = "magi" if self._row.mask == "magi" else "pytorch"
        if self._row.is_new:
            return self._problem.new_block_mask(turn, maker)
        return self._problem.block_mask(turn, maker)


class Packs:
    """The tokens of the next step, what follows each, the document of each, and a BlockMask that is made outside."""

    def __init__(self, problem: Problem, case: Case):
        self._problem, self._row = problem, case.row
        self._turns = itertools.count()
        self._made: list[tuple[Any, ...]] = []

    def renew(self, calls: int) -> None:
        """Makes so many steps' packs."""
        self._made = [self.make(turn) for turn in itertools.islice(self._turns, calls)][::-1]

    def next(self) -> tuple[Any, ...]:
        return self._made.pop()

    def make(self, turn: int) -> tuple[Tensor, Tensor, Tensor, BlockMask | None]:
        """Those of a turn."""
        problem, settings = self._problem, self._problem.settings
        generator = torch.Generator().manual_seed(settings.seed + turn)
        tokens = torch.randint(settings.vocab, (1, problem.tokens), generator=generator)
        tokens, document = tokens.to(settings.device), problem.document(turn)
        is_followed = F.pad(document[1:] == document[:-1], (0, 1))
        targets = torch.where(is_followed, tokens.roll(-1, 1), -1)
        mask = None if self._row.mask == "graph" else problem.new_block_mask(turn)
        return tokens, targets, document, mask


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Bool `[q blocks, k blocks]`: what the lists of a BlockMask of one batch entry and head hold."""
    counts, indices = counts[0, 0], indices[0, 0].long()
    is_listed = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    return torch.zeros_like(is_listed).scatter(1, indices, is_listed)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | Tensor,
    kernel_options: Any,
) -> Tensor:
    """One attention; makes the mask itself of the document of each token."""
    if isinstance(mask, Tensor):
        mask = causal_within(mask)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=kernel_options)


def _attend_layers(
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    mask: BlockMask | Tensor,
    kernel_options: dict[str, Any] | None,
) -> list[Tensor]:
    """Many attentions under one mask."""
    if isinstance(mask, Tensor):
        mask = causal_within(mask)
    options: dict[str, Any] = {"enable_gqa": True, "kernel_options": kernel_options}
    layers = zip(q, k, v, strict=True)
    return [flex_attention(*layer, block_mask=mask, **options) for layer in layers]


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


def _packed(problem: Problem, case: Case, attend: Callable[..., Tensor]) -> Ready:
    """An eager function of `[tokens, heads, head_dim]`."""
    leaves, dout = _leaves(problem, case, Layout.PACKED)
    q, k, v = (tensors[0] for tensors in leaves)
    return Ready(lambda: _with_gradients([attend(q, k, v)], leaves, dout, case))


def _build(problem: Problem, case: Case, kernel_options: dict[str, Any] | None) -> Llama:
    """The model, the same from every call."""
    settings = problem.settings
    dim = settings.nheads_q * settings.head_dim
    heads = settings.nheads_q, settings.nheads_kv
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = Llama(Shape(case.layers, dim, 2 * dim, *heads, settings.vocab), kernel_options)
    return model.to(getattr(torch, settings.dtype))
