"""Runs cases on all ranks: every contender proves itself right, those that are take turns, and every one gets a row."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_bench.kernel.gate import Check
from magi_bench.ranks.contenders import CONTENDERS, Contender, Prepared
from magi_bench.ranks.model import TRAININGS, Training
from magi_bench.ranks.problem import Problem, Settings
from magi_bench.ranks.report import to_markdown
from magi_bench.ranks.world import World
from magi_bench.results import provenance
from magi_bench.results.rows import write_record
from magi_bench.step.clock import Ready, in_turns, wait, warm_up
from magi_bench.step.run import compare, failure, summary
from magi_bench.workloads.cells import format_length

Row = dict[str, Any]


#: The mask of rows of a whole model.
MODEL = "model"


class Case(NamedTuple):
    """A mask at a length, for a pass of `step.cases.PASSES`."""

    mask: str
    tokens: int
    which: str


class Execution:
    """One run, seen from one rank. All ranks come to the same decisions; the first one writes and speaks."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        command: list[str],
        output: Path | None,
        say: Callable[[str], None],
    ):
        self.world, self.settings, self.output, self.say = world, settings, output, say
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self.longest_s: dict[str, float] = {}
        self.contenders = [made() for made in CONTENDERS if made.name in settings.contenders]
        described = provenance.describe(settings.kind, command) | provenance.versions()
        self.context = described | {"ranks": world.size, "settings": asdict(settings)}

    def run(self) -> list[Row]:
        """Measures all cases and writes after each.

        Returns:
            The rows: one for each case and contender, with a status of `rows.STATUSES`.
        """
        for tokens in self.settings.tokens:
            if self.settings.layers:
                for which in self.settings.passes:
                    self._measure_model(Case(MODEL, tokens, which))
                continue
            for mask in self.settings.masks:
                together = Problem(self.settings, self.world, mask, tokens)
                alone = Problem(self.settings, self.world, mask, tokens, is_alone=True)
                for which in self.settings.passes:
                    self._measure(Case(mask, tokens, which), together, alone)
        return self.rows

    def _measure(self, case: Case, together: Problem, alone: Problem) -> None:
        rows = {x.name: row_of(x, case) for x in self.contenders}
        ready = {}
        for contender in self.contenders:
            problem = alone if contender.is_alone else together
            outcome, prepared = self._attempt(
                contender.name,
                contender.refusals(problem, case.which),
                lambda c=contender, p=problem: self._first_call(c, p, case.which),  # type: ignore[misc]
            )
            rows[contender.name] |= outcome
            if prepared is not None:
                ready[contender.name] = prepared
        for name, outcome in self._timed(ready).items():
            rows[name] |= outcome
        for contender in self.contenders:
            row = rows[contender.name]
            if "ms" in row:
                problem = alone if contender.is_alone else together
                row["tflops"] = problem.flops(case.which) / row["ms"] / 1e9
        ours = [row for row in rows.values() if row["contender"] != "one-rank"]
        compare(ours)
        self._add(list(rows.values()))

    def _measure_model(self, case: Case) -> None:
        taking_part = [
            made(self.settings, self.world, case.tokens)
            for made in TRAININGS
            if made.name in self.settings.contenders
        ]
        rows, ready = {x.name: row_of(x, case) for x in taking_part}, {}
        for training in taking_part:
            outcome, prepared = self._attempt(
                training.name,
                training.refusals(case.which),
                lambda x=training: self._first_step(x, case.which),  # type: ignore[misc]
            )
            rows[training.name] |= outcome
            if prepared is not None:
                ready[training.name] = prepared
        for name, outcome in self._timed(ready).items():
            tokens = case.tokens * self.world.size
            rows[name] |= outcome | {"tokens_per_s": tokens / outcome["ms"] * 1e3}
        compare(list(rows.values()))
        self._add(list(rows.values()))

    def _attempt(
        self,
        name: str,
        reasons: Sequence[str],
        first_call: Callable[[], tuple[Row, Ready | None]],
    ) -> tuple[Row, Ready | None]:
        """The outcome of a contender's first call, and the contender if all ranks may time it."""
        if reasons:
            return {"status": "unsupported", "reason": "; ".join(reasons)}, None
        if self._is_over(name):
            reason = f"not begun: no time left of {self.settings.seconds:g} s"
            return {"status": "timeout", "reason": reason}, None
        began, failed = time.monotonic(), None
        try:
            outcome, ready = first_call()
        except Exception as error:  # whatever a contender raises costs it this row only
            outcome, ready, failed = {}, None, failure(error)
        failures = [x for x in self.world.all_of(failed) if x is not None]
        took = self.world.slowest(time.monotonic() - began)
        self.longest_s[name] = max(self.longest_s.get(name, 0.0), took)
        if failures:
            return failures[0], None
        return outcome | {"took_s": round(took, 2)}, ready

    def _timed(self, ready: dict[str, Ready]) -> dict[str, Row]:
        """The times of contenders that are warm."""
        gc.collect()
        turns = in_turns(ready, self.settings.kind, self.settings.rounds, self.world)
        return {name: summary(result) for name, result in turns.items()}

    def _add(self, rows: list[Row]) -> None:
        """The rows of a case, which are written down at once."""
        self.rows += rows
        self.context["took_s"] = round(time.monotonic() - self.began, 1)
        if self.world.rank:
            return
        write_record(self.output, self.context, self.rows, to_markdown(self.context, self.rows))
        times = [
            f"{row['contender']} " + (f"{row['ms']:.3f} ms" if "ms" in row else row["status"])
            for row in rows
        ]
        first = rows[0]
        where = f"{first['mask']} {format_length(first['tokens'])} {first['pass']}"
        self.say(f"[{self.context['took_s']:.0f} s] {where}: {', '.join(times)}")

    def _is_over(self, name: str) -> bool:
        """Whether a contender would end too late, if it takes what it took before."""
        elapsed = time.monotonic() - self.began + self.longest_s.get(name, 0.0)
        return self.world.slowest(elapsed) > self.settings.seconds

    def _first_call(
        self, contender: Contender, problem: Problem, which: str
    ) -> tuple[Row, Ready | None]:
        began = time.perf_counter()
        made = contender.prepare(problem)
        wait(self.settings.kind)
        prepare_s = time.perf_counter() - began
        leaves, dout = leaves_of(problem, made, which)
        ready = Ready(lambda: call(made, leaves, dout, which))
        results = ready.call()
        check = problem.check(results, made.positions)
        del results
        backward = made.received[1] if which == "fwdbwd" else 0
        outcome: Row = {
            "status": "ok",
            "prepare_s": round(self.world.slowest(prepare_s), 3),
            "gate": check.to_json(),
            "received_bytes": int(self.world.slowest(made.received[0] + backward)),
            "counted": made.counted,
        }
        return self._warmed(outcome, ready, check)

    def _first_step(self, training: Training, which: str) -> tuple[Row, Ready | None]:
        ready = training.prepare(which)
        check = training.check(ready.call())
        # Every rank has the whole result.
        worst = max(self.world.all_of(check), key=lambda x: not x.passed)
        return self._warmed({"status": "ok", "gate": worst.to_json()}, ready, worst)

    def _warmed(self, outcome: Row, ready: Ready, check: Check) -> tuple[Row, Ready | None]:
        if not check.passed:
            return outcome | {"status": "wrong", "reason": check.worst}, None
        warm_up(ready, self.settings.kind)
        return outcome | {"peak_bytes": self._peak_bytes(ready)}, ready

    def _peak_bytes(self, ready: Ready) -> int | None:
        """What a call allocates beyond what is there before it, on the rank that allocates most. None on a CPU."""
        if self.settings.kind == "cpu":
            return None
        ready.renew(1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = ready.call()
        wait(self.settings.kind)
        del results
        return int(self.world.slowest(torch.cuda.max_memory_allocated() - before))


def leaves_of(problem: Problem, made: Prepared, which: str) -> tuple[list[Tensor], Tensor]:
    """This rank's q, k and v, and the gradient of its out."""
    *tensors, dout = (x[made.positions] for x in problem.inputs)
    return [x.requires_grad_(which == "fwdbwd") for x in tensors], dout


def call(made: Prepared, leaves: list[Tensor], dout: Tensor, which: str) -> Sequence[Tensor]:
    """Out, and with a backward the gradients of q, k and v."""
    out = made.attend(*leaves)
    if which == "fwd":
        return [out]
    return [out, *torch.autograd.grad(out, leaves, dout)]


def row_of(contender: Contender | Training, case: Case) -> Row:
    """What a row says of itself before anything runs."""
    return {
        "mask": case.mask,
        "tokens": case.tokens,
        "pass": case.which,
        "contender": contender.name,
        "label": contender.label,
        "is_ours": contender.is_ours,
    }
