"""`magi-bench doors`: every attention of a framework proves itself right on a small input,
then all take turns at the full length."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from magi_bench import arguments, runner
from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Prefetched, Protocol, Ready, matmul_tflops
from magi_bench.contenders.base import Contender
from magi_bench.contenders.flex import no_backward
from magi_bench.doors import torchtitan_runs
from magi_bench.gate import Check, Truth, rounding_of_step, truth_of_step
from magi_bench.results.rows import Row
from magi_bench.workloads import lengths
from magi_compile import _compat

#: `attn_implementation` of transformers.
ATTENTIONS = ("magi", "flex_attention", "sdpa", *(f"flash_attention_{x}" for x in (2, 3, 4)))
MODES = ("eager", "compiled")
FRAMEWORKS = ("transformers", "torchtitan")
QUICK = {"tokens": [512], "heads": "4:2", "head_dim": 16, "ffn_dim": 128, "train_layers": 2}
QUICK |= {"vocab": 256, "gate_tokens": 256, "rounds": 2, "turn_ms": 2.0}


class Problem:
    """A model of transformers, whose weights all attentions share, and the truth of a step; `gate` is the same with a
    small input, None for that itself."""

    def __init__(
        self,
        settings: Settings,
        door: ModuleType,
        model: nn.Module,
        tokens: int,
        gate: Problem | None = None,
    ):
        self.settings, self.door, self.model = settings, door, model
        self.tokens, self.gate = tokens, gate or self
        # What the first attention that was right gives; of the small input the truth.
        self.agreed: Truth | None = None
        if gate is None:
            eager, inputs = copy.deepcopy(model), door.make_inputs(settings, tokens, 0)
            self.agreed = truth_of_step(eager, lambda: door.step(eager, eager, inputs))


class Attention(Contender):
    """One of transformers' attentions."""

    def __init__(self, name: str):
        self.name = self.label = name
        self.is_ours = name == "magi"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        is_flex = self.name == "flex_attention"
        return no_backward(case, problem.settings.device) if is_flex else []

    def prepare(self, problem: Problem, case: Case) -> Ready:
        door, settings = problem.door, problem.settings
        model = door.with_attention(problem.model, self.name)
        is_eager = problem.gate is problem or case.mode == "eager"
        backend = "magi" if self.is_ours else "inductor"
        call = model if is_eager else torch.compile(model, backend=backend)
        ahead = Prefetched(lambda turn: door.make_inputs(settings, problem.tokens, turn))
        ahead.renew(1)
        self._facts: Row = {}
        self._before = _compat.num_compiled_graphs(), _compat.num_graph_breaks()
        return Ready(lambda: door.step(model, call, ahead.next()), ahead.renew, self._facts)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        graphs, breaks = self._before
        self._facts["graphs"] = _compat.num_compiled_graphs() - graphs
        self._facts["breaks"] = _compat.num_graph_breaks() - breaks
        if problem.agreed is None:
            allowed = rounding_of_step(getattr(torch, problem.settings.dtype))
            allowed = {what: 2 * error for what, error in allowed.items()}
            problem.agreed = Truth(results, allowed, f"{self.name}, {case.mode}")
        return problem.agreed.check(results, problem.tokens)


class Doors(runner.Suite):
    """Models of other frameworks; all attentions share one model's weights."""

    title = "Training steps of other frameworks' models"
    notes = (
        "A step is forward, loss and backward on a pack of causal documents, other ones in every step. Of "
        "transformers: medians of wall time over rounds in which attentions take turns; ratios are to ours, above 1 "
        "where ours is faster; MFU is the model's FLOPs, without what is computed again, over the rate of a large "
        "matmul in the same run; graphs are those of the first step, recompilations those of all later ones; peak "
        "memory is that of PyTorch's allocator, weights and gradients included. Of torchtitan: its own log, the "
        "median of its last lines, each of some steps, with its optimizer, its MFU and its memory."
    )
    has_peak = True
    counts_weights = True
    may_recompile = True

    def __init__(self, settings: Settings, door: ModuleType | None = None):
        super().__init__(settings)
        self.peak_tflops = matmul_tflops(settings.device, Protocol())
        self._door, self._missing = door, ""
        self.everyone = [Attention(name) for name in settings.attentions]
        if door is None and "transformers" in settings.frameworks:
            try:
                from magi_bench.doors import transformers

                self._door = transformers
            except ImportError as error:
                self._missing = str(error)

    def facts(self) -> Row:
        found: Row = {"matmul_tflops": round(self.peak_tflops, 1)}
        return found | ({"transformers": self._door.VERSION} if self._door else {})

    @cached_property
    def model(self) -> nn.Module:
        """The model of transformers."""
        assert self._door is not None
        made: nn.Module = self._door.build(self.settings)
        return made

    def cases(self) -> Iterator[Case]:
        settings, door = self.settings, self._door
        if door is None or "transformers" not in settings.frameworks:
            return
        gate = Problem(settings, door, self.model, settings.gate_tokens)
        for tokens in settings.tokens:
            self._problem = Problem(settings, door, self.model, tokens, gate)
            for mode in settings.modes:
                yield case_of(settings, "transformers", tokens, mode=mode)

    def problem(self, case: Case, contender: Contender) -> Problem:
        return self._problem

    def place(self, case: Case) -> Row:
        return {"group": case.mask, "what": case.mode}

    def kind(self, case: Case) -> str:
        return case.mode

    def rates(self, case: Case, contender: Contender, ms: float) -> Row:
        share = model_flops(self.settings, case.seqlen) / ms / 1e9 / self.peak_tflops
        return {"tokens_per_s": case.seqlen / ms * 1e3, "mfu": share}

    def done(self) -> None:
        self.model.zero_grad()
        torch.compiler.reset()

    def rest(self, run: runner.Runner) -> None:
        if self._missing:
            outcome = {
                "status": "unavailable",
                "reason": self._missing,
                "label": "-",
                "is_ours": False,
            }
            run.add(case_of(self.settings, "transformers", 0), "-", outcome)
        if "torchtitan" in self.settings.frameworks:
            for train, outcome in torchtitan_runs.rows(self.settings, run.left_s, run.say):
                sizes = (self.settings, "torchtitan", train.tokens)
                case = case_of(*sizes, mode="compiled", ranks=train.ranks)
                run.add(case, train.attention, outcome)


def case_of(settings: Settings, framework: str, tokens: int, **more: Any) -> Case:
    """Steps of a framework's model."""
    return settings.case(
        "doors", framework, tokens, which="fwdbwd", layers=settings.train_layers, **more
    )


def model_flops(settings: Settings, tokens: int) -> float:
    """Counts those of forward and backward: 6 for each weight of a matrix and token, 12 for each visible pair, head and
    its dimension; without what is computed again. The pairs are those of the first pack."""
    dim, kv_dim = settings.dim, settings.nheads_kv * settings.head_dim
    layer = 2 * dim * dim + 2 * dim * kv_dim + 3 * dim * settings.ffn_dim
    weights = settings.train_layers * layer + dim * settings.vocab
    documents = lengths.sample(settings.lengths, tokens, settings.seed)
    pairs = sum(count * (count + 1) // 2 for count in documents)
    return 6.0 * weights * tokens + 12.0 * settings.train_layers * pairs * dim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = (
        "Training steps of a Llama of transformers and of torchtitan with each of their attentions, random weights, "
        "packed documents. Compiling takes most of the time: on a GPU half a minute for each attention and length."
    )
    option, count = parser.add_argument, arguments.count
    for name, choices in (("frameworks", FRAMEWORKS), ("attentions", ATTENTIONS), ("modes", MODES)):
        option(f"--{name}", nargs="+", choices=choices, default=list(choices))
    degrees: dict[str, Any] = {"nargs": "+", "type": count, "default": list(torchtitan_runs.RANKS)}
    words = "ranks of torchtitan's context parallelism"
    option("--cp", dest="cp_degrees", help=words, **degrees)
    option("--layers", dest="train_layers", type=count, default=4)
    option("--ffn-dim", type=count, default=14336)
    names = [name for name in arguments.RUN if name != "passes"]
    more = ("tokens", "lengths", "dtype", "vocab", "gate_tokens", "turn_ms", "seed")
    # Llama 3 has 128256 tokens, whose logits of 32K take 50 GB.
    defaults = {"tokens": [8192, 32768], "vocab": 32768, "gate_tokens": 512, "turn_ms": 200.0}
    arguments.add(parser, (*names, *more), **defaults)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed."""
    return runner.run_command(Doors(arguments.settings_of(args, QUICK)), args)
