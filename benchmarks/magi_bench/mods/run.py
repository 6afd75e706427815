"""Runs mods: every contender proves itself right, those that are take turns, and every one gets a row, or a reason."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import magi_compile
from magi_bench.kernel import gate
from magi_bench.kernel.gate import Check
from magi_bench.kernel.measure import first_line
from magi_bench.mods.catalogue import MODS
from magi_bench.mods.contenders import FLEX, Attend, Contender, contenders
from magi_bench.mods.mod import Mod
from magi_bench.mods.problem import Problem, Settings, results_of
from magi_bench.mods.report import to_markdown
from magi_bench.results import provenance
from magi_bench.results.rows import write_record
from magi_bench.step.clock import Ready, wait, warm_up
from magi_bench.step.run import TIMING_SHARE, count_work, failure, timed
from magi_compile.lowering.report import Decision, lowering_report

Row = dict[str, Any]


class Execution:
    """One run. Nothing that was compiled is let go before the end: kernels are counted then, since the profiler slows what
    comes after it. Every contender compiles a function of its own for each mod and pass, so none sees what another compiled."""

    def __init__(
        self,
        settings: Settings,
        command: list[str],
        output: Path | None,
        say: Callable[[str], None],
    ):
        self.settings, self.output, self.say = settings, output, say
        self.began = time.monotonic()
        self.share = TIMING_SHARE if settings.device == "cuda" else 1.0
        self.rows: list[Row] = []
        self.prepared: list[tuple[Row, Ready]] = []
        self.longest_s: dict[str, float] = {}
        self.contenders = contenders(settings.kernels, settings.peers)
        described = provenance.describe(settings.device, command) | provenance.versions()
        self.context = described | {"settings": asdict(settings)}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> list[Row]:
        """Measures all mods and writes after each.

        Returns:
            The rows: one for each mod, pass and contender, with a status of `rows.STATUSES`.
        """
        for name in self.settings.mods:
            self._measure(MODS[name])
            self._write()
        if self.settings.device == "cuda":
            count_work(self.prepared, self.began + self.settings.seconds, self.say)
        self._write()
        return self.rows

    def _measure(self, mod: Mod) -> None:
        """All passes and contenders of a mod. One whose tensors cannot be made has a row for each, too."""
        try:
            full = Problem(self.settings, mod, self.settings.tokens)
            is_long = self.settings.tokens > self.settings.gate_tokens
            gated = Problem(self.settings, mod, self.settings.gate_tokens) if is_long else full
        except Exception as error:
            for which in self.settings.passes:
                rows = [row_of(x, mod, which, self.settings) for x in self.contenders]
                self._add([row | failure(error) for row in rows])
            return
        for which in self.settings.passes:
            began = time.monotonic()
            self._add(self._rows(full, gated, which))
            took = time.monotonic() - began
            self.longest_s[which] = max(self.longest_s.get(which, 0.0), took)
            self._let_go()

    def _let_go(self) -> None:
        """Gives memory back: what one mod held must not be missing in the next."""
        gc.collect()
        if self.settings.device == "cuda":
            try:
                torch.cuda.empty_cache()
            except (
                RuntimeError
            ) as error:  # a kernel has ended the CUDA context: the rows to come say so, too
                self.say(first_line(error))

    def _rows(self, full: Problem, gated: Problem, which: str) -> list[Row]:
        rows, ready = {}, {}
        yardstick: Check | None = None
        is_over = self._is_over(which)
        for contender in self.contenders:
            row = rows[contender.name] = row_of(contender, full.mod, which, self.settings)
            reasons = contender.refusals(which, gated)
            if reasons:
                row |= {"status": "unsupported", "reason": "; ".join(reasons)}
                continue
            if is_over:
                reason = f"not begun: no time left of {self.settings.seconds:g} s"
                row |= {"status": "timeout", "reason": reason}
                continue
            outcome, prepared, check = self._prove(contender, full, gated, which, yardstick)
            row |= outcome
            if prepared is not None:
                ready[contender.name] = prepared
            if contender.name == FLEX.name and check is not None and check.passed:
                yardstick = check
        for name, outcome in timed(ready, self.settings.device, self.settings.rounds).items():
            rows[name] |= outcome
        compare(list(rows.values()))
        self.prepared += [(rows[name], ready[name]) for name in ready if "ms" in rows[name]]
        return list(rows.values())

    def _is_over(self, which: str) -> bool:
        """Whether a mod would end too late, if it takes as long as the longest one before it."""
        expected_s = self.longest_s.get(which, 0.0)
        return self.elapsed + expected_s > self.settings.seconds * self.share

    def _prove(
        self,
        contender: Contender,
        full: Problem,
        gated: Problem,
        which: str,
        yardstick: Check | None,
    ) -> tuple[Row, Ready | None, Check | None]:
        """The outcome of the first calls, the contender if it may be timed, and how wrong it is."""
        decisions = lowering_report().decisions
        before, outcome = len(decisions), Row()
        try:
            attend = contender.compiled(self.settings.mask_in_graph)
            ready, results = self._first_call(contender, attend, gated, which, outcome)
            if contender.is_ours and len(decisions) == before:
                raise RuntimeError("no attention was in the graphs that were compiled")
            found = decided(contender, decisions[before:])
            if is_kept(found):
                return outcome | found, None, None
            check = gate.judge(results, gated.exact, gated.plain, gated.names)
            if yardstick is not None:
                check = beside(check, yardstick, gated.plain[0].dtype)
            del results
            outcome["gate"] = check.to_json()
            if check.passed and full is not gated:
                ready, _ = self._first_call(contender, attend, full, which, outcome)
            found = decided(contender, decisions[before:])
            if is_kept(found):
                return outcome | found, None, None
            if not check.passed:
                return outcome | found | {"status": "wrong", "reason": check.worst}, None, check
            warm_up(ready, self.settings.device)
            return outcome | found | {"status": "ok"}, ready, check
        except Exception as error:  # whatever a contender raises costs it this row only
            found = decided(contender, decisions[before:])
            return outcome | failure(error) | found, None, None

    def _first_call(
        self, contender: Contender, attend: Attend, problem: Problem, which: str, outcome: Row
    ) -> tuple[Ready, list[Tensor]]:
        """At a length: what is called, and its results in the order of `Problem.names`. `outcome` gets the time."""
        began = time.perf_counter()
        ready = contender.prepare(attend, problem, which)
        try:
            out, *gradients = ready.call()
            wait(self.settings.device)
        finally:
            # On a GPU a failed check of a mask's data is known now, and must not be raised in another row.
            magi_compile.synchronize_checks()
        outcome["first_s"] = round(time.perf_counter() - began, 2)
        return ready, results_of(out, gradients)

    def _add(self, rows: list[Row]) -> None:
        if rows and self.settings.device == "cuda":
            state = provenance.gpu_state()
            for row in rows:
                row["gpu_state"] = state
        self.rows += rows
        times = [
            f"{row['contender']} " + (f"{row['ms']:.3f} ms" if "ms" in row else row["status"])
            for row in rows
        ]
        self.say(f"[{self.elapsed:.0f} s] {rows[0]['mod']} {rows[0]['pass']}: {', '.join(times)}")

    def _write(self) -> None:
        self.context["took_s"] = round(self.elapsed, 1)
        write_record(self.output, self.context, self.rows, to_markdown(self.context, self.rows))


def beside(check: Check, yardstick: Check, dtype: torch.dtype) -> Check:
    """`check` with the errors of FlexAttention, which is right, in place of those of plain PyTorch."""
    step = torch.finfo(dtype).eps
    allowed = {name: 2 * yardstick.errors[name] + step for name in check.errors}
    return check._replace(allowed=allowed)


def decided(contender: Contender, decisions: Sequence[Decision]) -> Row:
    """What became of the attention of ours, by the lowering's own report; unsupported if FlexAttention runs it."""
    if not contender.is_ours or not decisions:
        return {}
    refused = [decision for decision in decisions if not decision.kernel]
    if refused:
        reasons = "; ".join(" ".join(reason.split()) for reason in refused[0].reasons)
        return {"status": "unsupported", "reason": f"stays on FlexAttention: {reasons}"}
    last = decisions[-1]
    return {
        "way": way_of(last),
        "kernel": last.kernel,
        "mask": last.mask,
        "score": last.score,
        "notes": list(last.notes),
        "passed_over": {name: list(reasons) for name, reasons in last.passed_over},
    }


def is_kept(found: Row) -> bool:
    """Whether `decided` says that FlexAttention runs it."""
    return "status" in found


def way_of(decision: Decision) -> str:
    """Which way the mask takes."""
    ways = {"by bit blocks": "bits", "by intervals, or by bit blocks": "intervals, or bits"}
    for begin, way in ways.items():
        if any(note.startswith(begin) for note in decision.notes):
            return way
    return "intervals"


def compare(rows: Sequence[Row]) -> None:
    """Adds to the rows of ours `ratio`: FlexAttention's time relative to it, above 1 where ours is faster."""
    flex = next((row.get("ms") for row in rows if row["contender"] == FLEX.name), None)
    for row in rows:
        if row["is_ours"] and "ms" in row and flex is not None:
            row["ratio"] = flex / row["ms"]


def row_of(contender: Contender, mod: Mod, which: str, settings: Settings) -> Row:
    """What a row says of itself before anything runs."""
    return {
        "mod": mod.name,
        "what": mod.label,
        "kind": mod.kind,
        "tokens": settings.tokens,
        "pass": which,
        "contender": contender.name,
        "label": contender.label,
        "is_ours": contender.is_ours,
    }


def fault(row: Row) -> str:
    """What is wrong with a row, in a line."""
    what = row.get("reason") or f"{row['recompiles']} graphs compiled while time was taken"
    return f"{row['mod']}, {row['pass']}, {row['contender']}: {what}"
