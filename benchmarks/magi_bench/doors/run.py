"""Runs cases: every attention proves itself right on a small input, then all take turns at the full length."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from magi_bench.doors import torchtitan_runs
from magi_bench.doors.report import to_markdown
from magi_bench.doors.settings import Settings
from magi_bench.kernel.timing import Protocol, matmul_tflops
from magi_bench.results import provenance
from magi_bench.results.rows import write_record
from magi_bench.step.checks import StepTruth, rounding_of_step, truth_of_step
from magi_bench.step.clock import Ready, in_turns, wait, warm_up
from magi_bench.step.contenders import NO_BACKWARD
from magi_bench.step.run import compare, failure, summary
from magi_bench.workloads import lengths
from magi_bench.workloads.cells import format_length
from magi_compile import _compat
from magi_compile.lowering.report import lowering_report

Row = dict[str, Any]


class Case(NamedTuple):
    """A length, and a name in `settings.MODES`."""

    tokens: int
    mode: str


class Execution:
    """One run. All attentions share one model's weights."""

    def __init__(
        self,
        settings: Settings,
        command: list[str],
        output: Path | None,
        say: Callable[[str], None],
    ):
        self.settings, self.output, self.say = settings, output, say
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self.longest_s: dict[tuple[str, str], float] = {}
        self.peak_tflops = matmul_tflops(settings.device, Protocol())
        described = provenance.describe(settings.device, command) | provenance.versions()
        self.context = described | {"matmul_tflops": round(self.peak_tflops, 1)}

    def run(self) -> list[Row]:
        """Measures all cases and writes after each.

        Returns:
            The rows: one for each case and attention, with a status of `rows.STATUSES`.
        """
        if "transformers" in self.settings.frameworks:
            try:
                from magi_bench.doors import transformers as door
            except ImportError as error:
                self._add([missing_row("transformers", str(error))])
            else:
                self.context["transformers"] = door.VERSION
                Transformers(self, door).run()
        if "torchtitan" in self.settings.frameworks:
            self._add(torchtitan_runs.rows(self.settings, self._left_s, self.say))
        return self.rows

    def _left_s(self) -> float:
        return self.settings.seconds - (time.monotonic() - self.began)

    def is_over(self, name: str, mode: str) -> bool:
        """Whether an attention would end too late, if it takes what it took before."""
        return self.longest_s.get((name, mode), 0.0) > self._left_s()

    def _add(self, rows: list[Row]) -> None:
        self.rows += rows
        self.context["took_s"] = round(time.monotonic() - self.began, 1)
        context = self.context | {"settings": asdict(self.settings)}
        write_record(self.output, context, self.rows, to_markdown(context, self.rows))

    def add(self, case: Case, rows: list[Row]) -> None:
        """The rows of a case, which are written down at once."""
        self._add(rows)
        times = [
            f"{row['attention']} " + (f"{row['ms']:.1f} ms" if "ms" in row else row["status"])
            for row in rows
        ]
        where = f"{format_length(case.tokens)} {case.mode}"
        self.say(f"[{self.context['took_s']:.0f} s] {where}: {', '.join(times)}")


class Transformers:
    """The part of a run that measures a model of transformers; `door` is the module of that name."""

    def __init__(self, execution: Execution, door: ModuleType):
        self.execution, self.settings, self.door = execution, execution.settings, door
        self.model = door.build(self.settings)
        self.truth = self._small_truth()
        self.outcomes: dict[str, Row] = {}  # of the small input

    def run(self) -> None:
        """All cases."""
        for tokens in self.settings.tokens:
            agreed: dict[str, StepTruth] = {}
            for mode in self.settings.modes:
                self._measure(Case(tokens, mode), agreed)

    def _measure(self, case: Case, agreed: dict[str, StepTruth]) -> None:
        rows = {name: row_of(name, case) for name in self.settings.attentions}
        ready = {}
        for name in self.settings.attentions:
            if name not in self.outcomes:
                self.outcomes[name] = self._small(name)
            rows[name] |= self.outcomes[name]
            if rows[name]["status"] != "ok":
                continue
            if self.execution.is_over(name, case.mode):
                reason = f"not begun: no time left of {self.settings.seconds:g} s"
                rows[name] |= {"status": "timeout", "reason": reason}
                continue
            began = time.monotonic()
            try:
                outcome, prepared = self._prepare(name, case, agreed)
            except Exception as error:  # whatever an attention raises costs it this row only
                outcome, prepared = failure(error), None
                self._forget()
            took = time.monotonic() - began
            key = (name, case.mode)
            longest = self.execution.longest_s
            longest[key] = max(longest.get(key, 0.0), took)
            rows[name] |= outcome | {"first_s": round(took, 2)}
            if prepared is not None:
                ready[name] = prepared
        for name, turns in in_turns(ready, self.settings.device, self.settings.rounds).items():
            rows[name] |= summary(turns)
            rows[name]["recompiles"] += rows[name].pop("recompiles_before")
            rows[name] |= self._rates(case, rows[name]["ms"])
        compare(list(rows.values()))
        self.execution.add(case, list(rows.values()))
        ready.clear()
        self._forget()
        torch.compiler.reset()

    def _prepare(
        self, name: str, case: Case, agreed: dict[str, StepTruth]
    ) -> tuple[Row, Ready | None]:
        """The first calls at full length, whose results must be those of whoever was right first."""
        door, settings = self.door, self.settings
        model = door.with_attention(self.model, name)
        call = model if case.mode == "eager" else door.compiled(model, name)
        packs: list[Any] = []
        turns = itertools.count()

        def renew(calls: int) -> None:
            chosen = itertools.islice(turns, calls)
            packs[:] = [door.make_inputs(settings, case.tokens, turn) for turn in chosen][::-1]

        ready = Ready(lambda: door.step(model, call, packs.pop()), renew)
        graphs, breaks = _compat.num_compiled_graphs(), _compat.num_graph_breaks()
        refused = len(lowering_report().refused)
        renew(1)
        results = ready.call()
        outcome: Row = {
            "status": "ok",
            "graphs": _compat.num_compiled_graphs() - graphs,
            "breaks": _compat.num_graph_breaks() - breaks,
        }
        kept = lowering_report().refused[refused:]
        if kept and name == "magi":
            reason = f"stays on FlexAttention: {'; '.join(kept[0].reasons)}"
            return outcome | {"status": "unsupported", "reason": reason}, None
        if not agreed:
            allowed = rounding_of_step(getattr(torch, settings.dtype))
            agreed[f"{name}, {case.mode}"] = StepTruth(
                results, {what: 2 * error for what, error in allowed.items()}
            )
        ((whose, truth),) = agreed.items()
        check = truth.check(results, case.tokens)
        if not check.passed:
            reason = f"not what {whose} gives: {check.worst}"
            return outcome | {"status": "wrong", "reason": reason}, None
        del results
        graphs = _compat.num_compiled_graphs()
        warm_up(ready, settings.device)
        outcome["recompiles_before"] = _compat.num_compiled_graphs() - graphs
        return outcome | {"peak_bytes": self._peak_bytes(ready)}, ready

    def _small_truth(self) -> StepTruth:
        """Of transformers' own eager attention, by a copy of the model."""
        model = copy.deepcopy(self.model)
        inputs = self.door.make_inputs(self.settings, self.settings.gate_tokens, 0)
        return truth_of_step(model, lambda: self.door.step(model, model, inputs))

    def _small(self, name: str) -> Row:
        """Whether an attention can be had, and is right on the small input in eager code."""
        if name == "flex_attention" and self.settings.device == "cpu":
            return {"status": "unsupported", "reason": NO_BACKWARD}
        tokens = self.settings.gate_tokens
        inputs = self.door.make_inputs(self.settings, tokens, 0)
        try:
            model = self.door.with_attention(self.model, name)
            results = self.door.step(model, model, inputs)
        except ImportError as error:
            return {"status": "unavailable", "reason": str(error).splitlines()[0]}
        except Exception as error:  # whatever it raises costs it its rows only
            return failure(error)
        check = self.truth.check(results, tokens)
        outcome: Row = {"status": "ok", "gate": check.to_json()}
        return outcome if check.passed else outcome | {"status": "wrong", "reason": check.worst}

    def _peak_bytes(self, ready: Ready) -> int | None:
        """What the allocator holds at most in a step, weights included. None on a CPU."""
        if self.settings.device == "cpu":
            return None
        ready.renew(1)
        self.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        ready.call()
        wait(self.settings.device)
        return torch.cuda.max_memory_allocated()

    def _rates(self, case: Case, ms: float) -> Row:
        """Tokens a second, and the share of a large matmul's rate that the model's FLOPs are done at."""
        flops = model_flops(self.settings, case.tokens)
        share = flops / ms / 1e9 / self.execution.peak_tflops
        return {"tokens_per_s": case.tokens / ms * 1e3, "mfu": share}

    def _forget(self) -> None:
        self.model.zero_grad()
        gc.collect()
        if self.settings.device == "cuda":
            torch.cuda.empty_cache()


def model_flops(settings: Settings, tokens: int) -> float:
    """Of forward and backward: 6 for each weight of a matrix and token, 12 for each visible pair, head and its dimension;
    without what is computed again. The pairs are those of the first pack."""
    dim, kv_dim = settings.dim, settings.nheads_kv * settings.head_dim
    layer = 2 * dim * dim + 2 * dim * kv_dim + 3 * dim * settings.ffn_dim
    weights = settings.layers * layer + dim * settings.vocab
    documents = lengths.sample(settings.lengths, tokens, settings.seed)
    pairs = sum(count * (count + 1) // 2 for count in documents)
    return 6.0 * weights * tokens + 12.0 * settings.layers * pairs * dim


def row_of(name: str, case: Case) -> Row:
    """What a row says of itself before anything runs."""
    return {
        "framework": "transformers",
        "attention": name,
        "mode": case.mode,
        "tokens": case.tokens,
        "ranks": 1,
        "is_ours": name == "magi",
    }


def missing_row(framework: str, reason: str) -> Row:
    """The only row of a framework that is not there."""
    place = {"attention": "-", "mode": "-", "tokens": 0, "ranks": 1, "is_ours": False}
    return {"framework": framework, **place, "status": "unavailable", "reason": reason}
