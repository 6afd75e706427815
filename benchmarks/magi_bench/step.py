"""`magi-bench step`: wall time of calls and of training steps, host included, in turns with peers in one process.

Tensors, documents and masks of one length, and the results that all are held to; who takes part; and the command: rows
of four groups, at every length, forward and forward with backward.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from magi_bench import arguments, runner
from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Prefetched, Ready
from magi_bench.contenders.base import Contender, Layout, compiled
from magi_bench.contenders.flash_attention import FlashAttention4
from magi_bench.contenders.flex import FlexFlash, no_backward
from magi_bench.gate import Check, Truth, exact_and_plain
from magi_bench.results.rows import Row
from magi_bench.workloads import lengths, workload
from magi_bench.workloads.llama import (
    Llama,
    Pack,
    build,
    causal_within,
    document_of,
    pack,
    steps,
    truth_of,
)
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.masks import create_block_mask
from magi_compile.ops.attention import flex_flash_attention

SAMPLER = "short"


class Way(NamedTuple):
    """A way of calling attention, a row of the table of `step`."""

    name: str  # on the command line and in result files
    group: str  # a name in `suite.GROUPS`
    label: str  # in reports
    # Who makes the mask: "pytorch" or "magi" (`create_block_mask`, outside of the graph and of the time), "graph"
    # (PyTorch's `create_block_mask` inside of the compiled function), or "at hand" (each contender's own form).
    mask: str
    is_new: bool = False  # other documents, and so another mask, in every call
    mode: str | None = None  # torch.compile's


MAKERS: dict[str, Callable[..., BlockMask | Tensor]] = {
    "pytorch": causal_within,
    "magi": partial(causal_within, create=create_block_mask),
    "graph": lambda document: document,
}


class Problem:
    """Attention of packed causal documents. Turn 0 has the documents of rows that always see the same ones."""

    def __init__(self, settings: Settings, tokens: int):
        self.settings, self.tokens = settings, tokens
        self._compiled: dict[Hashable, Any] = {}
        self.inputs = lru_cache(None)(self._inputs)
        self.mask = lru_cache(None)(self.new_mask)
        self.truth = lru_cache(None)(self._truth)
        self.truth_of_step = lru_cache(None)(self._truth_of_step)

    def workload(self, layer: int = 0) -> Workload:
        """As kernels of magi-bench get it; every layer has q, k and v of its own, and all have one mask."""
        settings = self.settings
        case = settings.case("kernel", "document_causal", self.tokens, lengths=SAMPLER)
        made = workload.build(case, settings.device)
        return replace(made, case=replace(case, seed=settings.seed + layer))

    def _inputs(self, layer: int) -> Inputs:
        return self.workload(layer).inputs(self.settings.device)

    def lengths(self, turn: int) -> list[int]:
        """The lengths of the documents of a turn."""
        return lengths.sample(SAMPLER, self.tokens, self.settings.seed + turn)

    def document(self, turn: int) -> Tensor:
        """Int `[tokens]`: the document of each token."""
        return document_of(self.lengths(turn)).to(self.settings.device)

    def pack(self, turn: int) -> Pack:
        """The tokens of a step."""
        return pack(self.settings, self.tokens, turn, self.settings.device, SAMPLER)

    def new_mask(self, turn: int, maker: str = "pytorch") -> BlockMask | Tensor:
        """The mask of a turn, or what one is made from in the graph, by one of `MAKERS`; `mask` keeps it."""
        return MAKERS[maker](self.document(turn))

    def _truth(self, layer: int) -> Truth:
        """Out, dq, dk and dv of turn 0, packed; document by document."""
        inputs, parts, begin = self.inputs(layer), [], 0
        for length in self.lengths(0):
            case = replace(self.workload().case, mask="causal", lengths="whole", seqlen=length)
            document = Inputs(*(x[begin : begin + length] for x in inputs))
            parts.append(exact_and_plain(workload.build(case), document))
            begin += length
        exact, plain = (
            [torch.cat(x) for x in zip(*side, strict=True)] for side in zip(*parts, strict=True)
        )
        return Truth.of(exact, plain, inputs.q.dtype)

    def _truth_of_step(self, layers: int) -> Truth:
        """Loss and gradients of a model's first step."""
        return truth_of(build(self.settings, layers, self.settings.device), self.pack(0))

    def compiled(self, key: Hashable, function: Callable[..., Any], **options: Any) -> Any:
        """`torch.compile(function)`, one for each key, with code of its own for Dynamo to guard."""
        if key not in self._compiled:
            self._compiled[key] = compiled(function, **options)
        return self._compiled[key]


class Compiled(Contender):
    """FlexAttention through torch.compile, with one of its backends."""

    groups: tuple[str, ...] = ("calls", "layers", "training")  # of rows, names in `GROUPS`
    backend = "inductor"
    kernel_options: dict[str, Any] | None = None

    def __init__(self) -> None:
        self._model: Llama | None = None

    def supports(self, problem: Problem, case: Case) -> list[str]:
        device = problem.settings.device
        reasons = [] if self.is_ours else no_backward(case, device)
        if WAYS[case.mask].mode and device == "cpu":
            return reasons or ["CUDA graphs need a GPU"]
        return reasons

    def prepare(self, problem: Problem, case: Case) -> Ready:
        if WAYS[case.mask].group == "training":
            return self._prepare_training(problem, case)
        return self._prepare_attention(problem, case)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        if WAYS[case.mask].group == "training":
            return problem.truth_of_step(case.layers).check(results, problem.tokens)
        return check_attention(problem, case, results, Layout.HEADS_FIRST)

    def _compiled(self, problem: Problem, way: Way, key: Any, function: Any) -> Any:
        options = {"backend": self.backend} | ({"mode": way.mode} if way.mode else {})
        return problem.compiled(
            (self.name, way.mask == "graph", way.mode, key), function, **options
        )

    def _prepare_attention(self, problem: Problem, case: Case) -> Ready:
        way = WAYS[case.mask]
        is_deep = way.group == "layers"
        key, function = (
            (case.layers if is_deep else 0, case.which),
            _attend_layers if is_deep else _attend,
        )
        attend = self._compiled(problem, way, key, function)
        leaves, dout = _leaves(problem, case, Layout.HEADS_FIRST)
        masks = masks_of(problem, way)
        q, k, v = leaves if is_deep else [tensors[0] for tensors in leaves]

        def call() -> Sequence[Tensor]:
            if way.mode:
                torch.compiler.cudagraph_mark_step_begin()
            out = attend(q, k, v, masks.next(), self.kernel_options)
            return _with_gradients([out] if isinstance(out, Tensor) else out, leaves, dout, case)

        masks.renew(1)
        return Ready(call, masks.renew)

    def _prepare_training(self, problem: Problem, case: Case) -> Ready:
        settings, way = problem.settings, WAYS[case.mask]
        if self._model is None:
            self._model = build(settings, case.layers, settings.device, self.kernel_options)
        loss_of = self._compiled(problem, way, ("training", case.which), Llama.forward)

        def make(turn: int) -> tuple[Any, ...]:
            mask = None if way.mask == "graph" else problem.new_mask(turn)
            return (*problem.pack(turn)[:3], mask)

        return steps(self._model, loss_of, Prefetched(make), case.which)


class Flex(Compiled):
    name = "flex"
    label = "FlexAttention"


class FlexByFlash(Compiled):
    name = "flex-flash"
    label = "FlexAttention, FLASH"
    groups = ("calls", "eager", "training")
    kernel_options = {"BACKEND": "FLASH"}  # noqa: RUF012
    devices = ("cuda",)
    module = FlexFlash.module

    def supports(self, problem: Problem, case: Case) -> list[str]:
        if WAYS[case.mask].mode:
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
    devices = ("cuda",)
    module = FlashAttention4.module

    def prepare(self, problem: Problem, case: Case) -> Ready:
        attend = FlashAttention4().prepare(problem.workload(), problem.inputs(0))
        return _packed(problem, case, attend)


#: In the order of reports.
CONTENDERS: tuple[type[Compiled | MagiEager], ...] = (
    *(Flex, FlexByFlash, FlashAttention, Magi, MagiEager),
)


def masks_of(problem: Problem, way: Way) -> Prefetched:
    """The masks of calls to come: BlockMasks, or the document of each token, from which the call makes one."""
    if way.is_new:
        return Prefetched(partial(problem.new_mask, maker=way.mask))
    return Prefetched(lambda turn: problem.mask(0, way.mask))


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
        checks.append(problem.truth(layer).check(packed, problem.tokens))
    return max(checks, key=lambda check: max(x / check.allowed[n] for n, x in check.errors.items()))


def _packed(problem: Problem, case: Case, attend: Callable[..., Tensor]) -> Ready:
    """An eager function of `[tokens, heads, head_dim]`."""
    leaves, dout = _leaves(problem, case, Layout.PACKED)
    q, k, v = (tensors[0] for tensors in leaves)
    return Ready(lambda: _with_gradients([attend(q, k, v)], leaves, dout, case))


GROUPS = {
    "calls": "One attention a graph",
    "layers": "Many layers of attention in one graph, milliseconds a layer",
    "eager": "Eager calls, the mask at hand",
    "training": "A step of a small Llama: forward, loss, backward",
}
FROM_OUTSIDE, GRAPHS = "BlockMask from outside", "reduce-overhead"
EVERY_WAY = (
    Way("outside", "calls", "BlockMask from PyTorch's create_block_mask", "pytorch"),
    Way("outside_magi", "calls", "BlockMask from magi_compile.create_block_mask", "magi"),
    Way("inside", "calls", "mask made in the graph", "graph"),
    Way("new_layout", "calls", f"{FROM_OUTSIDE}, another in every call", "pytorch", True),
    Way("cuda_graphs", "calls", f'{FROM_OUTSIDE}, mode="{GRAPHS}"', "pytorch", mode=GRAPHS),
    Way("layers_outside", "layers", FROM_OUTSIDE, "pytorch"),
    Way("layers_inside", "layers", "mask made in the graph", "graph"),
    Way("eager", "eager", "packed tensors", "at hand"),
    Way(
        "training_inside",
        "training",
        "mask made in the graph, another in every step",
        "graph",
        True,
    ),
    Way("training_outside", "training", f"{FROM_OUTSIDE}, another in every step", "pytorch", True),
)
WAYS = {way.name: way for way in EVERY_WAY}
# A minute on two cores of a CPU, most of it compilation.
QUICK = {"tokens": [1024], "heads": "2:1", "head_dim": 64, "layers": [2], "train_layers": 1}
QUICK |= {"vocab": 256, "rounds": 3}
QUICK_ROWS = [name for name in WAYS if name not in ("layers_inside", "training_inside")]


class Step(runner.Suite):
    """Wall time of what a user gets."""

    title = "Wall time of attention and of training steps"
    notes = (
        "Milliseconds, host included: medians over rounds in which contenders take turns. Ratios are to ours, above 1 "
        "where ours is faster."
    )
    counts_work = True
    shares_graphs = True

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.everyone: list[Compiled | MagiEager] = [x() for x in CONTENDERS]

    def cases(self) -> Iterator[Case]:
        for tokens in self.settings.tokens:
            self._problem = Problem(self.settings, tokens)
            for way in WAYS.values():
                if way.name in self.settings.rows:
                    yield from self._cases(way, tokens)

    def _cases(self, way: Way, tokens: int) -> Iterator[Case]:
        deep = {"layers": self.settings.layers, "training": (self.settings.train_layers,)}
        for layers in deep.get(way.group, (1,)):
            for which in self.settings.passes:
                more = {"lengths": "short", "layers": layers, "which": which}
                yield self.settings.case("step", way.name, tokens, **more)

    def contenders(self, case: Case) -> Sequence[Contender]:
        group = WAYS[case.mask].group
        able = {x.name for x in self.everyone if group in x.groups}
        return [x for x in super().contenders(case) if x.name in able]

    def problem(self, case: Case, contender: Contender) -> Problem:
        return self._problem

    def place(self, case: Case) -> Row:
        way = WAYS[case.mask]
        return {"group": GROUPS[way.group], "what": way.label}

    def rates(self, case: Case, contender: Contender, ms: float) -> Row:
        deep = WAYS[case.mask].group == "layers"
        return {"layer_ms": ms / case.layers} if deep else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    names = [*GROUPS, *(name for name in WAYS if name not in GROUPS)]
    option, count = parser.add_argument, arguments.count
    words = f"groups, or single rows: {', '.join(names)}"
    option("--rows", nargs="+", choices=names, metavar="NAME", help=words)
    option("--layers", nargs="+", type=count, default=[16], help="of attention in one graph")
    option("--train-layers", type=count, default=4, help="of the Llama")
    option("--contenders", nargs="+", choices=[x.name for x in CONTENDERS])
    more = ("tokens", "vocab", "dtype", "turn_ms", "seed")
    arguments.add(parser, (*arguments.RUN, *more), tokens=[1024, 2048, 4096, 8192, 32768])
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed, or if anybody was compiled again while time was taken."""
    asked = set(args.rows or (QUICK_ROWS if args.quick else GROUPS))
    rows = tuple(name for name, way in WAYS.items() if {name, way.group} & asked)
    return runner.run_command(Step(arguments.settings_of(args, QUICK, rows=rows)), args)
