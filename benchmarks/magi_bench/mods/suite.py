"""`magi-bench mods`: mask_mods and score_mods as users of FlexAttention write them, beside FlexAttention."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
    noop_mask,
)

from magi_bench import arguments, runner
from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Ready
from magi_bench.contenders.base import Contender, Layout, compiled
from magi_bench.contenders.flex import no_backward
from magi_bench.gate import RESULTS, Check, Truth, weigh
from magi_bench.mods.catalogue import BLOCK, MASKS, SCORES, Made, Mod, Place, ScoreMod
from magi_bench.results.rows import Row
from magi_bench.workloads import workload
from magi_bench.workloads.workload import Inputs
from magi_compile.kernels.select import KERNELS
from magi_compile.lowering.report import lowering_report

MIN_TOKENS = 256  # so that a neighbourhood fits on the canvas


@lru_cache(maxsize=2)
def inputs_of(settings: Settings, tokens: int) -> Inputs:
    """The same q, k, v and dout for all mods and contenders."""
    case = settings.case("kernel", "full", tokens)
    return workload.build(case, settings.device).inputs(settings.device)


class Leaves(NamedTuple):
    """The tensors of a call, with or without gradients, and the gradient of its out; attention's
    `[1, heads, tokens, head_dim]`."""

    q: Tensor  # queries
    k: Tensor  # keys
    v: Tensor  # values
    learned: list[Tensor]  # tensors that the score_mod captures
    dout: Tensor  # the gradient of out

    @property
    def differentiable(self) -> list[Tensor]:
        """Whose gradients a backward gives, in the order of results."""
        return [self.q, self.k, self.v, *self.learned]


class Problem:
    """A mod at a length; `gate` is the same at a shorter one, which results are held to, by default this one."""

    def __init__(self, settings: Settings, mod: Mod, tokens: int, gate: Problem | None = None):
        self.settings, self.mod, self.tokens, self.gate = settings, mod, tokens, gate or self
        # By pass, how wrong FlexAttention is, where it is right.
        self.yardstick: dict[str, Check] = {}
        # A compiled function of each contender and pass, which both lengths have.
        self.compiled: dict[Any, Any] = {} if gate is None else gate.compiled

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype

    @cached_property
    def made(self) -> Made:
        """The mod, with a BlockMask by PyTorch."""
        settings = self.settings
        place = Place(self.tokens, settings.nheads_q, settings.device, settings.seed)
        return self.mod.build(place)

    def leaves(self, needs_grad: bool, dtype: torch.dtype | None = None) -> Leaves:
        """Fresh ones. With a `dtype`, all floats have it; else learned tensors are fp32."""
        *qkv, dout = (Layout.HEADS_FIRST.of(x) for x in inputs_of(self.settings, self.tokens))

        def leaf(x: Tensor) -> Tensor:
            return x.detach().to(dtype or x.dtype).requires_grad_(needs_grad)

        q, k, v = map(leaf, qkv)
        learned = [leaf(x) for x in self.made.learned.values()]
        return Leaves(q, k, v, learned, dout.to(dtype or dout.dtype))

    @cached_property
    def truth(self) -> Truth:
        """Out, dq, dk, dv and the gradients of learned tensors; all but the last ones packed. Plain PyTorch has the
        dtype of q, but for scores, which FlexAttention has in fp32."""
        names = (*RESULTS, *(f"gradient of {name}" for name in self.made.learned))
        return Truth.of(self._dense(torch.float64), self._dense(None), self.dtype, names)

    def _dense(self, dtype: torch.dtype | None) -> list[Tensor]:
        """One query head after the other."""
        q, k, v, learned, dout = leaves = self.leaves(True, dtype)
        group = self.settings.nheads_q // self.settings.nheads_kv
        wide = torch.promote_types(q.dtype, torch.float32)
        totals = [torch.zeros_like(x, dtype=wide) for x in leaves.differentiable]
        outs, score_mod = [], self.made.score_mod(learned)
        for head in range(self.settings.nheads_q):
            qkv = q[0, head], k[0, head // group], v[0, head // group]
            out = self._dense_head(head, qkv, score_mod)
            outs.append(out.detach())
            gradients = torch.autograd.grad(out, leaves.differentiable, dout[0, head])
            totals = [total + x for total, x in zip(totals, gradients, strict=True)]
        pairs = zip(totals, leaves.differentiable, strict=True)
        return results_of(torch.stack(outs)[None], [x.to(like.dtype) for x, like in pairs])

    def _dense_head(self, head: int, qkv: Sequence[Tensor], score_mod: ScoreMod | None) -> Tensor:
        """One head, of q, k and v `[tokens, head_dim]`. Masks and scores are those of tensors that have all pairs."""
        q, k, v = qkv
        device = self.settings.device
        index = torch.arange(self.tokens, dtype=torch.int32, device=device)
        entry, number = (torch.tensor(x, dtype=torch.int32, device=device) for x in (0, head))
        place = entry, number, index[:, None], index
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
        if score_mod is not None:
            scores = score_mod(scores, *place)
        block_mask, visible = self.made.block_mask, None
        if block_mask is not None:
            visible = block_mask.mask_mod(*place) & self._listed(head)
        return weigh(scores, visible, v)

    def _listed(self, head: int) -> Tensor:
        """Bool `[tokens, tokens]`: the pairs in blocks that the lists name."""
        assert self.made.block_mask is not None
        blocks = self.made.block_mask.to_dense()[0]
        blocks = blocks[head if len(blocks) > 1 else 0].bool()
        pairs = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return pairs[: self.tokens, : self.tokens]


def results_of(out: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call, in the order of `Problem.truth`."""
    packed = [Layout.HEADS_FIRST.to_packed(x.detach()) for x in (out, *gradients[:3])]
    return [*packed, *gradients[3:]]


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
        block_mask = problem.made.block_mask
        reasons = [] if self.is_ours else no_backward(case, problem.settings.device)
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
        check = problem.truth.check(found, problem.tokens)
        if case.which in problem.yardstick:
            check = beside(check, problem.yardstick[case.which], problem.dtype)
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


MODS = {
    build.__name__: Mod(kind, build)
    for kind, builds in (("mask", MASKS), ("score", SCORES))
    for build in builds
}
# A minute on two cores of a CPU, most of it compilation.
QUICK_MODS = ["documents", "window_by_head", "block_lists", "relative_bias", "latent_positions"]
QUICK = {"tokens": [512], "heads": "4:2", "head_dim": 32, "rounds": 3, "turn_ms": 5.0}
DESCRIPTION = """Attention with mask_mods and score_mods as users of FlexAttention write them, host included: ours
beside FlexAttention, in turns. Most of the time is compilation: each mod, pass and contender compiles a graph. Exits
with 1 if ours was wrong or raised."""
MADE_BY = {
    False: "BlockMasks are made before, by PyTorch, and ours is derived from them in the first call.",
    True: "Every call makes its BlockMask, in the function that is compiled.",
}
NOTES = (
    "Times are of a call, host included: medians over rounds in which contenders take turns. {masks} Ratios are to "
    "the first of ours, above 1 where ours is faster. A mask goes to kernels by intervals of keys, by blocks of bits, "
    "or, on a CPU, as its data decide."
)


class Mods(runner.Suite):
    """Every mod beside FlexAttention. Every contender compiles a function of its own for each mod and pass, so none
    sees what another compiled."""

    title = "mask_mods and score_mods beside FlexAttention"
    counts_work = True

    def __init__(self, settings: Settings, taking_part: Sequence[Compiled] | None = None):
        super().__init__(settings)
        self.notes = NOTES.format(masks=MADE_BY[settings.mask_in_graph])
        self.everyone = taking_part or contenders(settings.kernels, settings.peers)
        self._problem = lru_cache(1)(self._new_problem)

    def cases(self) -> Iterator[Case]:
        for tokens in self.settings.tokens:
            for mod in self.settings.mods:
                for which in self.settings.passes:
                    yield self.settings.case("mods", mod, tokens, which=which)

    def problem(self, case: Case, contender: Contender) -> Problem:
        return self._problem(case.mask, case.seqlen)

    def _new_problem(self, mod: str, tokens: int) -> Problem:
        gated = Problem(self.settings, MODS[mod], min(tokens, self.settings.gate_tokens))
        return gated if gated.tokens == tokens else Problem(self.settings, MODS[mod], tokens, gated)

    def place(self, case: Case) -> Row:
        return {**super().place(case), "what": case.mask, **MODS[case.mask].facts}

    def kind(self, case: Case) -> str:
        return case.which


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = DESCRIPTION
    option = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    option("--mods", choices=MODS, help=f"only these, of {', '.join(MODS)}", **several)
    words = "ours also with each of these asked for by name"
    option("--kernels", choices=KERNELS, default=[], help=words, **several)
    words = "beside FlexAttention's own kernels: flex-flash, its FLASH backend (flash-attn-4)"
    option("--peers", choices=PEERS, default=[], help=words, **several)
    words = (
        "every call makes its BlockMask, in the function that is compiled; else it is made before"
    )
    option("--mask-in-graph", action="store_true", help=words)
    more = ("tokens", "gate_tokens", "dtype", "turn_ms", "seed")
    arguments.add(parser, (*arguments.RUN, *more), tokens=[8192])
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed, or if anybody was compiled again while time was taken."""
    mods = tuple(args.mods or (QUICK_MODS if args.quick else MODS))
    settings = arguments.settings_of(args, QUICK, mods=mods)
    for name, counts in (("tokens", settings.tokens), ("gate-tokens", (settings.gate_tokens,))):
        for count in counts:
            if count % BLOCK or count < MIN_TOKENS:
                least = f"a multiple of {BLOCK}, at least {MIN_TOKENS}"
                raise ValueError(f"`--{name}` must be {least}, got {count}")
    return runner.run_command(Mods(settings), args)
