"""Runs a suite: every contender of a case proves itself right, those that are take turns, and every one gets a row,
or a reason."""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import magi_compile
from magi_bench import arguments
from magi_bench.arguments import Settings
from magi_bench.cases import PASS_TITLES, Case, format_length
from magi_bench.clock import ALONE, Alone, Ready, Turns, in_turns, summary, wait, warm_up, work_of
from magi_bench.contenders.base import Contender
from magi_bench.process import WorkerLost
from magi_bench.progress import said_while
from magi_bench.results import provenance
from magi_bench.results.rows import Ledger, Row
from magi_compile.lowering.report import Decision, lowering_report

# What no contender should end in.
FAULTS = ("wrong", "error", "oom", "crash")
# What times may take of a run's seconds on a GPU, where kernels are counted after them.
TIMING_SHARE = 0.9
# What the turns of a contender's calls without moves have behind its name.
WITHOUT_MOVES = " without moves"


class Suite:
    """The measurement of a command."""

    title: str  # of its report
    notes: str  # what the report says of its numbers
    everyone: Sequence[Contender] = ()  # who can take part
    # Kernels and launches of a call are counted on a GPU, after everything else; what was compiled is kept until then.
    counts_work = False
    has_peak = (
        False  # rows have the memory that a call takes at most, beyond what is there before it
    )
    counts_weights = False  # and that memory has what is there before it, too
    # Cases of one length share graphs, so that only the first of them says how it was lowered.
    shares_graphs = False
    may_recompile = False  # graphs that are compiled again are no fault; those of the warm-up count

    def __init__(self, settings: Settings, world: Alone = ALONE):
        self.settings, self.world = settings, world

    def cases(self) -> Iterator[Case]:
        """In the order in which they run."""
        yield from ()

    def contenders(self, case: Case) -> Sequence[Contender]:
        """Who takes part: everyone, or those that are asked for."""
        asked = self.settings.contenders
        return [x for x in self.everyone if asked is None or x.name in asked]

    def problem(self, case: Case, contender: Contender) -> Any:
        """The inputs of contenders beside the case: tensors, masks, and the truth."""

    def place(self, case: Case) -> Row:
        """`group`, the heading of a case in reports, and `what`, its line."""
        return {"group": PASS_TITLES[case.which], "what": case.mask_label}

    def kind(self, case: Case) -> Hashable:
        """Cases of one kind take a contender about as long, or longer at a larger length."""
        return (case.mask, case.layers, case.which, case.mode)

    def rates(self, case: Case, contender: Contender, ms: float) -> Row:
        """The figures of a pass beside its time."""
        return {}

    def facts(self) -> Row:
        """The fields of the run's record beside its provenance."""
        return {}

    def done(self) -> None:
        """After each case."""

    def rest(self, runner: Runner) -> None:
        """Rows that take no turns, after all cases."""


class Runner:
    """One run, seen from one rank. All ranks come to the same decisions; the first one speaks, and writes .jsonl and
    .md behind the name of `output`."""

    def __init__(
        self,
        suite: Suite,
        command: Sequence[str] = (),
        output: Path | None = None,
        say: Callable[[str], None] = print,
    ):
        self.suite, self.settings, self.world = suite, suite.settings, suite.world
        self.output = None if self.world.rank else output
        self.say = say if self.world.rank == 0 else lambda line: None
        self.began = time.monotonic()
        self.limit_s = self.settings.seconds
        if suite.counts_work and self.settings.device == "cuda":
            self.limit_s *= TIMING_SHARE
        self.longest_s: dict[Hashable, float] = {}
        self.kept: dict[Hashable, Row] = {}
        self.prepared: list[tuple[Case, Row, Ready]] = []
        self.ledger = Ledger.fresh(self.output)
        described = provenance.describe(self.settings.device, list(command))
        protocol = {"rounds": self.settings.rounds.count, "in_turns": True}
        self.ledger.begin(
            {**described, "versions": provenance.versions(), "protocol": protocol, **suite.facts()}
            | {"settings": self.settings.asked(), "notes": suite.notes}
            | {"title": f"{suite.title}, {described['device']}"}
        )

    @property
    def rows(self) -> list[Row]:
        return list(self.ledger.results.rows.values())

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def left_s(self) -> float:
        """Until nothing begins any more."""
        return self.limit_s - self.elapsed

    def run(self) -> list[Row]:
        """Measures all cases and writes after each; gives a row for each case and contender."""
        for case in self.suite.cases():
            self._measure(case)
        self.suite.rest(self)
        if self.settings.device == "cuda":
            self.count_work()
        self._write()
        return self.rows

    def add(self, case: Case, contender: str, outcome: Row) -> Row:
        """The row of a contender, which is written down at once."""
        return self.ledger.add(case, contender, {**self.suite.place(case), **outcome})

    def _measure(self, case: Case) -> None:
        contenders = self.suite.contenders(case)
        outcomes, ready = {}, {}
        for contender in contenders:
            outcome, prepared = self._attempt(contender, case)
            outcomes[contender.name] = who(contender) | outcome
            if prepared is not None:
                ready[contender.name] = prepared
        gc.collect()
        turns, failed = self._turns(ready)
        state = provenance.gpu_state() if ready and self.settings.device == "cuda" else None
        for contender in contenders:
            row = outcomes[contender.name]
            if contender.name in turns:
                measured = self._times(case, contender, turns[contender.name], row)
                if still := turns.get(contender.name + WITHOUT_MOVES):
                    measured["exposed_ms"] = measured["ms"] - summary(still.times_ms)["ms"]
                row["passes"] = {case.which: measured}
            elif contender.name in ready:
                row |= failed
            if state:
                row["gpu_state"] = state
        compare([outcomes[x.name] for x in contenders if not x.is_alone])
        for name, outcome in outcomes.items():
            row = self.add(case, name, outcome)
            if name in turns and self.suite.counts_work:
                self.prepared.append((case, row, ready[name]))
        ready.clear()
        self.suite.done()
        self._let_go()
        self._write()
        times = (
            f"{name} {row['passes'][case.which]['ms']:.3f} ms"
            if "passes" in row
            else f"{name} {row['status']}"
            for name, row in outcomes.items()
        )
        self.say(f"[{self.elapsed:.0f} s] {where(case)}: {', '.join(times)}")

    def _attempt(self, contender: Contender, case: Case) -> tuple[Row, Ready | None]:
        """The outcome of a contender's first call, and the contender if everybody may time it."""
        missing = contender.unavailable(self.settings.device)
        if missing is not None:
            return {"status": "unavailable", "reason": missing}, None
        began, failed, name = time.monotonic(), None, (contender.name, self.suite.kind(case))
        outcome, ready = Row(), None
        decisions = lowering_report().decisions
        before = len(decisions)
        try:
            problem = self.suite.problem(case, contender)
            reasons = contender.supports(problem, case)
            if reasons:
                return {"status": "unsupported", "reason": "; ".join(reasons)}, None
            longest = self.longest_s.get(name, 0.0)
            if self.world.slowest(self.elapsed + longest) > self.limit_s:
                reason = f"not begun: no time left of {self.settings.seconds:g} s"
                return {"status": "timeout", "reason": reason}, None
            doing = f"{where(case)}: {contender.name}, first call and check"
            with said_while(lambda: f"[{self.elapsed:.0f} s] {doing}", self.say):
                ready = self._prove(contender, problem, case, outcome)
        except Exception as error:  # whatever a contender raises costs it this row only
            ready, failed = None, failure(error)
        if failed:
            self._let_go()
        failures = [x for x in self.world.all_of(failed) if x is not None]
        took = self.world.slowest(time.monotonic() - began)
        self.longest_s[name] = max(self.longest_s.get(name, 0.0), took)
        outcome = {"status": "ok", **outcome, **(failures[0] if failures else {})}
        found = self._lowered(contender, case, decisions[before:])
        if "status" in found:
            ready = None
        if failures:
            return outcome | found, None
        return outcome | found | {"took_s": round(took, 2)}, ready

    def _prove(self, contender: Contender, problem: Any, case: Case, outcome: Row) -> Ready | None:
        """The contender, warm, if it is right; `outcome` gets the fields of its row."""
        decisions, ready = lowering_report().decisions, None
        before = len(decisions)
        # Where a problem is too long for its truth, or has one for all, results are checked at a shorter one before.
        gate = getattr(problem, "gate", problem)
        for at in (problem,) if gate is problem else (gate, problem):
            began = time.perf_counter()
            ready = contender.prepare(at, case)
            try:
                results = ready.call()
                wait(self.settings.device)
            finally:
                # On a GPU a failed check of a mask's data is known now, and must not be raised in another row.
                magi_compile.synchronize_checks()
            outcome["first_s"] = round(time.perf_counter() - began, 2)
            if "status" in self._lowered(contender, case, decisions[before:]):
                return None
            check = contender.check(at, case, results)
            del results
            for name, x in ready.facts.items():
                outcome[name] = self.world.slowest(x) if isinstance(x, (int, float)) else x
            if check is None:
                continue
            check = max(self.world.all_of(check), key=lambda x: not x.passed)
            outcome.setdefault("gate", check.to_json())
            if not check.passed:
                outcome |= {"status": "wrong", "reason": check.worst}
                return None
        assert ready is not None
        again = warm_up(ready, self.settings.device)
        outcome |= {"recompiles": again} if self.suite.may_recompile else {}
        if self.suite.has_peak:
            outcome["peak_bytes"] = self._peak_bytes(ready)
        return ready

    def _lowered(self, contender: Contender, case: Case, decisions: Sequence[Decision]) -> Row:
        """The outcome by `decided`; for calls that share a graph, that of its compilation."""
        found, key = decided(contender, decisions), (contender.name, case.seqlen)
        if "status" in found and self.suite.shares_graphs:
            self.kept.setdefault(key, found)
        return self.kept.get(key, found)

    def _turns(self, ready: dict[str, Ready]) -> tuple[dict[str, Turns], Row]:
        """The turns of contenders that are warm; if anybody raises, nobody knows who, and nobody has a time."""
        still = {
            name + WITHOUT_MOVES: x._replace(call=x.without_moves)
            for name, x in ready.items()
            if x.without_moves is not None
        }
        timed = ready | still
        try:
            return in_turns(timed, self.settings.device, self.settings.rounds, self.world), {}
        except Exception as error:
            if self.world.size > 1:
                raise
            return {}, failure(error)

    def _times(self, case: Case, contender: Contender, turns: Turns, row: Row) -> Row:
        """The times of a contender's pass, from its turns."""
        times = summary(turns.times_ms)
        recompiles = turns.recompiles + row.pop("recompiles", 0)
        measured = {**times, "calls": turns.calls, "recompiles": recompiles}
        if self.settings.device == "cuda" and any(turns.host_ms):
            measured["host_ms"] = statistics.median(turns.host_ms)
        if "peak_bytes" in row:
            measured["peak_bytes"] = row.pop("peak_bytes")
        return measured | self.suite.rates(case, contender, times["ms"])

    def _peak_bytes(self, ready: Ready) -> int | None:
        """The bytes that a call allocates beyond those before it, on the rank that allocates most. None on a CPU."""
        if self.settings.device == "cpu":
            return None
        ready.renew(1)
        torch.cuda.reset_peak_memory_stats()
        before = 0 if self.suite.counts_weights else torch.cuda.memory_allocated()
        results = ready.call()
        wait(self.settings.device)
        del results
        return int(self.world.slowest(torch.cuda.max_memory_allocated() - before))

    def _let_go(self) -> None:
        """Gives memory back: what one case held must not be missing in the next."""
        gc.collect()
        if self.settings.device == "cuda":
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:
                # A kernel has ended the CUDA context: the rows to come say so, too.
                self.say(first_line(error))

    def count_work(self) -> None:
        """Kernels and launches of what was timed, as long as there is time; the profiler slows what comes after it."""
        for case, row, ready in self.prepared:
            if self.elapsed > self.settings.seconds:
                self.say("kernels of the other rows are not counted: no time left")
                return
            with contextlib.suppress(RuntimeError):
                row["passes"][case.which] |= work_of(ready)._asdict()
                self.ledger.add(case, row["contender"], row)

    def _write(self) -> None:
        from magi_bench.report.pages import to_markdown

        if self.output:
            Path(f"{self.output}.md").write_text(to_markdown(self.ledger.results))


def who(contender: Contender) -> Row:
    """The fields of a row that name a contender."""
    return {"label": contender.label, "is_ours": contender.is_ours}


def where(case: Case) -> str:
    """A case in a line of progress."""
    deep = f"{case.layers} layers" if case.layers > 1 else ""
    ranks = f"{case.ranks} ranks" if case.ranks > 1 else ""
    return " ".join(
        filter(None, (case.mask, format_length(case.seqlen), deep, ranks, case.mode, case.which))
    )


def decided(contender: Contender, decisions: Sequence[Decision]) -> Row:
    """The outcome of our attention, by the lowering's own report; unsupported if FlexAttention runs it."""
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


def way_of(decision: Decision) -> str:
    """The path of the mask: slices, bits or a map of blocks."""
    ways = {
        "by bit blocks": "bits",
        "by intervals, or by bit blocks": "intervals, or bits",
        "by the block table": "map",
    }
    for begin, way in ways.items():
        if any(note.startswith(begin) for note in decision.notes):
            return way
    return "intervals"


def compare(rows: Sequence[Row]) -> None:
    """Adds to the passes of one case `ratio`: a time relative to ours, above 1 where we are faster."""
    ours: dict[str, float] = {}
    for row in rows:
        for which, times in row.get("passes", {}).items() if row["is_ours"] else ():
            ours.setdefault(which, times["ms"])
    for row in rows:
        for which, times in row.get("passes", {}).items():
            if which in ours:
                times["ratio"] = times["ms"] / ours[which]


def failure(error: Exception) -> Row:
    """The outcome of a contender that raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "oom", "reason": first_line(error)}
    if isinstance(error, WorkerLost):
        return {"status": error.status, "reason": str(error)}
    if isinstance(error, ImportError):
        return {"status": "unavailable", "reason": first_line(error)}
    return {"status": "error", "reason": f"{type(error).__name__}: {first_line(error)}"}


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def recompiled(row: Row) -> int:
    """The number of graphs compiled while time was taken."""
    return sum(times.get("recompiles") or 0 for times in row.get("passes", {}).values())


def fault(row: Row) -> str:
    """The fault of a row, in a line."""
    what = row.get("reason") or f"{recompiled(row)} graphs compiled while time was taken"
    return f"{where(Case(**row['case']))}, {row['contender']}: {what}"


def conclude(done: Runner) -> int:
    """Says what is wrong with rows and how many have times; 1 if ours was wrong or failed, or if anybody was compiled
    again while time was taken and that is a fault."""
    rows, may_recompile = done.rows, done.suite.may_recompile
    again = [row for row in rows if recompiled(row) and not may_recompile]
    for row in rows:
        if row["status"] in FAULTS or row in again:
            done.say(fault(row))
    measured = sum("passes" in row for row in rows)
    where = f": {done.output}.md" if done.output else ""
    done.say(f"{measured} measured, {len(rows) - measured} not{where}")
    return int(bool(again) or any(x["is_ours"] and x["status"] in FAULTS for x in rows))


def run(suite: Suite, command: Sequence[str], output: Path | None) -> int:
    """Measures; the exit code of `conclude`."""
    done = Runner(suite, command, output, arguments.say)
    done.run()
    return conclude(done)


def run_command(suite: Suite, args: argparse.Namespace) -> int:
    """Measures what a command asks for."""
    return run(suite, arguments.as_typed(args.command_line, args.out), args.out)
