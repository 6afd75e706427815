"""Runs cases: every contender proves itself right, those that are take turns, and every one gets a row, or a reason."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from magi_bench.kernel.measure import first_line
from magi_bench.results import provenance
from magi_bench.results.rows import write_record
from magi_bench.step.cases import Case, Settings, cases
from magi_bench.step.clock import Ready, Rounds, Turns, in_turns, wait, warm_up, work_of
from magi_bench.step.contenders import CONTENDERS, Contender
from magi_bench.step.problem import Problem
from magi_bench.step.report import to_markdown
from magi_bench.workloads.cells import format_length
from magi_compile.lowering.report import lowering_report

Row = dict[str, Any]
# What no contender should end in.
FAULTS = ("wrong", "error", "oom")
# What times may take of a run's seconds on a GPU, where kernels are counted after them.
TIMING_SHARE = 0.9


def execute(
    settings: Settings, command: list[str], output: Path | None, say: Callable[[str], None]
) -> list[Row]:
    """Measures all cases and writes `output` with .json and .md behind it, after every case.

    Args:
        settings: cases, contenders and how they are timed.
        command: how the run was started, for the record.
        output: a path; .json and .md are added to its name. None writes nothing.
        say: takes lines of progress.

    Returns:
        The rows: one for each case and contender, with a status of `rows.STATUSES`.
    """
    return _Execution(settings, command, output, say).run()


def fault(row: Row) -> str:
    """What is wrong with a row, in a line."""
    what = row.get("reason") or f"{row['recompiles']} graphs compiled while time was taken"
    return f"{row['row']}, {row['tokens']} tokens, {row['pass']}, {row['contender']}: {what}"


class _Execution:
    """One run. Nothing that was compiled is let go before the end: kernels are counted then."""

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
        self.longest_s: dict[tuple[str, int, str], float] = {}
        self.kept: dict[int, str] = {}  # why ours was not lowered, by tokens
        self.contenders = [
            made()
            for made in CONTENDERS
            if settings.contenders is None or made.name in settings.contenders
        ]
        self.unavailable = {x.name: x.unavailable(settings.device) for x in self.contenders}
        described = provenance.describe(settings.device, command) | provenance.versions()
        self.context = described | {"settings": asdict(settings)}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> list[Row]:
        for tokens in self.settings.tokens:
            problem = Problem(self.settings, tokens)
            for case in cases(self.settings, tokens):
                self._measure(problem, case)
                self._write()
            problem.forget_reference()
        if self.settings.device == "cuda":
            count_work(self.prepared, self.began + self.settings.seconds, self.say)
        self.context["took_s"] = round(self.elapsed, 1)
        self._write()
        return self.rows

    def _measure(self, problem: Problem, case: Case) -> None:
        """All contenders of a case. One that takes part in no such row has none."""
        began = time.monotonic()
        present = [x for x in self.contenders if case.row.group in x.groups]
        rows = {x.name: _row(x, case) for x in present}
        ready, is_over = {}, self._is_over(case)
        for contender in present:
            outcome, prepared = self._prove(contender, problem, case, is_over)
            rows[contender.name] |= outcome
            if prepared is not None:
                ready[contender.name] = prepared
        for name, outcome in timed(ready, self.settings.device, self.settings.rounds).items():
            rows[name] |= outcome
        compare(list(rows.values()))
        if ready and self.settings.device == "cuda":
            state = provenance.gpu_state()
            rows = {name: row | {"gpu_state": state} for name, row in rows.items()}
            gc.collect()
            torch.cuda.empty_cache()  # what one row held must not be missing in the next
        self.rows += rows.values()
        self.prepared += [(rows[name], ready[name]) for name in ready if "ms" in rows[name]]
        kind = (case.row.name, case.layers, case.which)
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), time.monotonic() - began)
        self._say_progress(case, list(rows.values()))

    def _is_over(self, case: Case) -> bool:
        """Whether `case` would end too late, if it takes what its row took before."""
        expected_s = self.longest_s.get((case.row.name, case.layers, case.which), 0.0)
        return self.elapsed + expected_s > self.settings.seconds * self.share

    def _prove(
        self, contender: Contender, problem: Problem, case: Case, is_over: bool
    ) -> tuple[Row, Ready | None]:
        """The outcome of the first call, and the contender if it may be timed."""
        reason = self.unavailable[contender.name]
        if reason is not None:
            return {"status": "unavailable", "reason": reason}, None
        reasons = contender.refusals(case, self.settings.device)
        if reasons:
            return {"status": "unsupported", "reason": "; ".join(reasons)}, None
        if is_over:
            reason = f"not begun: no time left of {self.settings.seconds:g} s"
            return {"status": "timeout", "reason": reason}, None
        try:
            return self._first_call(contender, problem, case)
        except Exception as error:  # whatever a contender raises costs it this row only
            return failure(error), None

    def _first_call(
        self, contender: Contender, problem: Problem, case: Case
    ) -> tuple[Row, Ready | None]:
        began, refused = time.perf_counter(), len(lowering_report().refused)
        ready = contender.prepare(problem, case)
        results = ready.call()
        wait(self.settings.device)
        outcome: Row = {"status": "ok", "first_s": round(time.perf_counter() - began, 2)}
        if contender.is_ours:
            for decision in lowering_report().refused[refused:]:
                self.kept.setdefault(case.tokens, "; ".join(decision.reasons))
            if case.tokens in self.kept:  # rows share graphs, and only the first compiles them
                reason = f"stays on FlexAttention: {self.kept[case.tokens]}"
                return {"status": "unsupported", "reason": reason}, None
        check = contender.check(problem, case, results)
        del results
        outcome["gate"] = check.to_json()
        if not check.passed:
            return outcome | {"status": "wrong", "reason": check.worst}, None
        warm_up(ready, self.settings.device)
        return outcome, ready

    def _write(self) -> None:
        markdown = to_markdown(self.context, self.rows)
        write_record(self.output, self.context, self.rows, markdown)

    def _say_progress(self, case: Case, rows: list[Row]) -> None:
        times = [
            f"{row['contender']} {row['ms']:.3f} ms"
            if "ms" in row
            else f"{row['contender']} {row['status']}"
            for row in rows
        ]
        deep = f" {case.layers} layers" if case.layers > 1 else ""
        where = f"{case.row.name} {format_length(case.tokens)}{deep} {case.which}"
        self.say(f"[{self.elapsed:.0f} s] {where}: {', '.join(times)}")


def timed(ready: dict[str, Ready], device: str, rounds: Rounds) -> dict[str, Row]:
    """What the rows of contenders that are warm say of their times."""
    gc.collect()
    try:
        turns = in_turns(ready, device, rounds)
    except Exception as error:  # of whom, nobody knows: nobody has a time then
        return {name: failure(error) for name in ready}
    return {name: summary(result) for name, result in turns.items()}


def count_work(
    prepared: Sequence[tuple[Row, Ready]], until: float, say: Callable[[str], None]
) -> None:
    """Adds to rows the kernels and launches of what was timed, until the clock `time.monotonic` says `until`."""
    for row, ready in prepared:
        if time.monotonic() > until:
            say("kernels of the other rows are not counted: no time left")
            return
        try:
            row |= work_of(ready)._asdict()
        except RuntimeError as error:
            row["work_error"] = first_line(error)


def conclude(
    rows: Sequence[Row],
    output: Path | None,
    say: Callable[[str], None],
    describe: Callable[[Row], str],
) -> int:
    """Says what is wrong with rows and how many have times.

    Args:
        rows: of a run.
        output: where they were written.
        say: takes lines.
        describe: what is wrong with a row, in a line.

    Returns:
        1 if ours was wrong or failed, or if anybody was compiled again while time was taken.
    """
    for row in rows:
        if row["status"] in FAULTS or row.get("recompiles"):
            say(describe(row))
    measured = sum("ms" in row for row in rows)
    say(f"{measured} measured, {len(rows) - measured} not" + (f": {output}.md" if output else ""))
    return int(
        any(row.get("recompiles") or (row["is_ours"] and row["status"] in FAULTS) for row in rows)
    )


def summary(turns: Turns) -> Row:
    """What a row says of times: the median over rounds, the fastest and the slowest of them."""
    return {
        "ms": statistics.median(turns.times_ms),
        "min_ms": min(turns.times_ms),
        "max_ms": max(turns.times_ms),
        "rounds": len(turns.times_ms),
        "calls": turns.calls,
        "recompiles": turns.recompiles,
    }


def compare(rows: Sequence[Row]) -> None:
    """Adds to the rows of one case `ratio`: a time relative to ours, above 1 where we are faster."""
    ours = next((row["ms"] for row in rows if row["is_ours"] and "ms" in row), None)
    for row in rows:
        if ours is not None and "ms" in row:
            row["ratio"] = row["ms"] / ours


def _row(contender: Contender, case: Case) -> Row:
    return {
        "group": case.row.group,
        "row": case.row.name,
        "tokens": case.tokens,
        "layers": case.layers,
        "pass": case.which,
        "contender": contender.name,
        "label": contender.label,
        "is_ours": contender.is_ours,
    }


def failure(error: Exception) -> Row:
    """The outcome of a contender that raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "oom", "reason": first_line(error)}
    return {"status": "error", "reason": f"{type(error).__name__}: {first_line(error)}"}
