"""Runs cases: every contender in a process of its own, cheap cases first, so that a run cut short lacks few of many.

First all contenders prove themselves right, side by side; then they are timed, one at a time. Contenders that compile
slowly come last, so that they cost the others nothing when time runs out.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi_bench import contenders
from magi_bench.cases import Case, format_length
from magi_bench.process import Worker, WorkerLost
from magi_bench.progress import said_while
from magi_bench.results import rows
from magi_bench.results.rows import Ledger
from magi_bench.settings import Settings
from magi_bench.workloads.workload import cost

# A worker imports PyTorch and a contender's package first.
PROBE_LIMIT_S = 180.0


@dataclass(frozen=True)
class Task:
    case: Case
    contender: str

    @property
    def key(self) -> str:
        return rows.row_key(self.case, self.contender)


def order(cases: Sequence[Case], names: Sequence[str]) -> list[Task]:
    """Contenders that compile quickly first; of each kind cheap cases first, all contenders of a case together."""
    tasks = [Task(case, name) for case in cheap_first(cases) for name in names]
    return sorted(tasks, key=lambda task: contenders.load(task.contender).compiles_slowly)


def cheap_first(cases: Sequence[Case]) -> list[Case]:
    """Each case once, so ordered that a run cut short lacks few of many."""
    return sorted(dict.fromkeys(cases), key=cost)


def begin(
    ledger: Ledger,
    settings: Settings,
    described: Mapping[str, Any],
    versions: Mapping[str, str],
    planned: Iterable[str],
    **protocol: Any,
) -> None:
    """Records a run: its provenance, the versions of contenders' packages, and keys of the rows to come."""
    record = {
        "versions": versions,
        "protocol": settings.protocol.to_json() | protocol,
        "passes": settings.passes,
        "gate_seqlen": settings.gate_tokens,
    }
    ledger.begin({**described, **record}, planned)


def add(ledger: Ledger, case: Case, name: str, outcome: Mapping[str, Any]) -> None:
    """Records what became of a contender's case."""
    contender = contenders.load(name)
    who = {"label": contender.label, "is_ours": contender.is_ours}
    ledger.add(case, name, {**who, **outcome})


def execute(
    cases: Sequence[Case],
    names: Sequence[str],
    settings: Settings,
    command: Sequence[str],
    output: Path,
    say: Callable[[str], None] = print,
) -> rows.Results:
    """Measures all that `output` does not hold yet, and appends it there.

    Args:
        cases: of the benchmark's grid.
        names: contenders.
        settings: what holds for all cases.
        command: how the run was started, for the record.
        output: a JSONL file; created if there is none.
        say: takes lines of progress.

    Returns:
        All rows of `output`, those of earlier runs included.
    """
    ledger = Ledger(output)
    tasks = [task for task in order(cases, names) if task.key not in ledger.finished]
    _Run(tasks, settings, command, ledger, say).execute()
    return ledger.results


class _Run:
    def __init__(
        self,
        tasks: list[Task],
        settings: Settings,
        command: Sequence[str],
        ledger: Ledger,
        say: Callable[[str], None],
    ):
        self.tasks, self.settings, self.ledger, self.say = tasks, settings, ledger, say
        self.command = list(command)
        self.begin = time.monotonic()
        self.done = 0
        self.timed = 0
        self.timed_s = 0.0
        self.workers = {
            name: Worker(name, settings.device, settings.gate_tokens)
            for name in dict.fromkeys(task.contender for task in tasks)
        }

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    @property
    def is_over(self) -> bool:
        return self.elapsed > self.settings.seconds

    def execute(self) -> None:
        if not self.tasks:
            self.say("nothing left to run")
            return
        try:
            reasons, versions = self._probe()
            self._record_run(versions, reasons)
            tasks = []
            for task in self.tasks:
                if task.contender in reasons:
                    self._record(task, {"status": "unavailable", "reason": reasons[task.contender]})
                else:
                    tasks.append(task)
            for slow in (False, True):
                self._execute_tier(
                    [t for t in tasks if contenders.load(t.contender).compiles_slowly == slow]
                )
        finally:
            for worker in self.workers.values():
                worker.stop()
        left = len(self.tasks) - self.done
        if left:
            self.say(f"time limit: {left} of {len(self.tasks)} not run; --resume continues")

    def _execute_tier(self, tasks: list[Task]) -> None:
        self._prove(tasks)
        for task in tasks:
            if self.is_over:
                return
            begin = time.monotonic()
            outcome = self._time(task)
            self.timed += 1
            self.timed_s += time.monotonic() - begin
            self._record(task, outcome)
            self._say_progress(task, outcome)

    def _probe(self) -> tuple[dict[str, str], dict[str, str]]:
        """Why contenders cannot be had, and the versions of those that can."""
        reasons: dict[str, str] = {}
        versions: dict[str, str] = {}
        waiting = set(self.workers)

        def probe(name: str) -> None:
            try:
                answer = self.workers[name].ask({"op": "probe"}, PROBE_LIMIT_S)
            except WorkerLost as lost:
                answer = {"reason": f"{lost.status}: {lost.reason}", "versions": {}}
            if answer["reason"]:
                reasons[name] = answer["reason"]
                self.workers[name].stop()
            versions.update(answer["versions"])
            waiting.discard(name)

        with self._said_while(lambda: f"starting {', '.join(sorted(waiting))}"):
            self._side_by_side(probe, self.workers)
        for name, reason in sorted(reasons.items()):
            self.say(f"{name} is unavailable: {reason}")
        return reasons, versions

    def _prove(self, tasks: list[Task]) -> None:
        """The gates of all tasks; the workers remember what comes of them."""
        begun: dict[str, str] = {}

        def prove(name: str) -> None:
            checked = set()
            for task in tasks:
                small = task.case.at(min(task.case.seqlen, self.settings.gate_tokens))
                if task.contender != name or small.key in checked or self.is_over:
                    continue
                checked.add(small.key)
                begun[name] = f"{name}, its {len(checked)}. case, {small.key}"
                request = {"op": "gate", "case": task.case.to_json()}
                try:
                    self.workers[name].ask(request, self.settings.cell_limit)
                except WorkerLost as lost:
                    self.say(f"{name}, checking {small.key}: {lost.status}, {lost.reason}")
            begun.pop(name, None)

        names = list(dict.fromkeys(task.contender for task in tasks))
        with self._said_while(lambda: f"checking {'; '.join(list(begun.values()))}"):
            self._side_by_side(prove, names)
        if names:
            self.say(f"checked {', '.join(names)} after {_clock(self.elapsed)}")

    def _said_while(self, doing: Callable[[], str]) -> AbstractContextManager[None]:
        return said_while(lambda: f"[{_clock(self.elapsed)}] {doing()}", self.say)

    def _side_by_side(self, step: Callable[[str], None], names: Iterable[str]) -> None:
        with concurrent.futures.ThreadPoolExecutor(self.settings.jobs) as pool:
            list(pool.map(step, names))

    def _time(self, task: Task) -> dict[str, Any]:
        request = {
            "op": "time",
            "case": task.case.to_json(),
            "passes": self.settings.passes,
            "protocol": self.settings.protocol.to_json(),
        }
        try:
            with self._said_while(lambda: f"timing {task.contender}, {task.case.key}"):
                return self.workers[task.contender].ask(request, self.settings.cell_limit)
        except WorkerLost as lost:
            return {"status": lost.status, "reason": lost.reason}

    def _record_run(self, versions: dict[str, str], reasons: dict[str, str]) -> None:
        available = [name for name in self.workers if name not in reasons]
        provenance: dict[str, Any] = {"device": self.settings.device}
        if available:
            request = {
                "op": "describe",
                "command": self.command,
                "protocol": self.settings.protocol.to_json(),
            }
            provenance = self.workers[available[0]].ask(request, PROBE_LIMIT_S)
        planned = (task.key for task in self.tasks)
        begin(self.ledger, self.settings, provenance, versions, planned)

    def _record(self, task: Task, outcome: dict[str, Any]) -> None:
        self.done += 1
        add(self.ledger, task.case, task.contender, outcome)

    def _say_progress(self, task: Task, outcome: dict[str, Any]) -> None:
        wanted = self.timed_s / self.timed * (len(self.tasks) - self.done)
        left = max(min(wanted, self.settings.seconds - self.elapsed), 0.0)
        if outcome["status"] == "ok":
            parts = (f"{name} {x['tflops']:.3g}" for name, x in outcome["passes"].items())
            result = ", ".join(parts) + " TFLOP/s"
        else:
            result = f"{outcome['status']}: {outcome['reason']}"[:100]
        case = task.case
        where = f"{case.mask_label} {format_length(case.seqlen)} {case.heads}"
        self.say(
            f"[{self.done}/{len(self.tasks)}, {_clock(self.elapsed)}, {_clock(left)} left] "
            f"{where} {task.contender}: {result}"
        )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
