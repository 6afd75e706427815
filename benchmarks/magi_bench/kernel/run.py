"""Runs cases: every contender in a process of its own, cheap cases first, so that a run cut short lacks few of many.

First all contenders prove themselves right, side by side; then they are timed, one at a time. Contenders that compile
slowly come last, so that they cost the others nothing when time runs out. Interleaved, one process has all contenders
and times them round by round: a card at its power limit remembers who ran before, so that what always comes first is
faster.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from magi_bench import contenders
from magi_bench.cases import Case, format_length
from magi_bench.process import Process, WorkerLost
from magi_bench.progress import said_while
from magi_bench.results import rows
from magi_bench.results.rows import Ledger, Row
from magi_bench.settings import Settings
from magi_bench.workloads.workload import cost

# A worker imports PyTorch and a contender's package first.
PROBE_LIMIT_S = 180.0


@dataclass(frozen=True)
class Task:
    """A case, and who is measured on it by one process."""

    case: Case
    names: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        return [rows.row_key(self.case, name) for name in self.names]


def order(cases: Sequence[Case], names: Sequence[str], *, together: bool = False) -> list[Task]:
    """Contenders that compile quickly first; of each kind cheap cases first, all contenders of a case together."""
    cases = sorted(dict.fromkeys(cases), key=cost)
    if together:
        return [Task(case, tuple(names)) for case in cases]
    tasks = [Task(case, (name,)) for case in cases for name in names]
    return sorted(tasks, key=_is_slow)


def _is_slow(task: Task) -> bool:
    return len(task.names) == 1 and contenders.load(task.names[0]).compiles_slowly


def worker_of(names: Sequence[str], settings: Settings) -> Process:
    """The process of some contenders."""
    arguments = (settings.device, str(settings.gate_tokens), *names)
    return Process(["-m", "magi_bench.kernel.measure", *arguments])


def execute(
    cases: Sequence[Case],
    names: Sequence[str],
    settings: Settings,
    command: Sequence[str],
    output: Path,
    say: Callable[[str], None] = print,
) -> rows.Results:
    """Measures all contenders `names` on `cases` that the JSONL file `output` does not hold yet, and appends it there;
    returns all rows of the file. With several rounds in the protocol, interleaved."""
    ledger, together = Ledger(output), settings.protocol.rounds > 1
    tasks = [x for x in order(cases, names, together=together) if {*x.keys} - ledger.finished]
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
        self.command, self.began, self.done = list(command), time.monotonic(), 0
        self.workers = {task.names: worker_of(task.names, settings) for task in tasks}
        self.reasons: dict[str, str] = {}  # of contenders that cannot be had

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        return self.elapsed > self.settings.seconds

    def execute(self) -> None:
        if not self.tasks:
            self.say("nothing left to run")
            return
        try:
            self._probe()
            for is_slow in (False, True):
                self._execute_tier([task for task in self.tasks if _is_slow(task) == is_slow])
        finally:
            for worker in self.workers.values():
                worker.stop()
        if left := len(self.tasks) - self.done:
            self.say(f"time limit: {left} of {len(self.tasks)} not run; --resume continues")

    def _execute_tier(self, tasks: list[Task]) -> None:
        self._prove(tasks)
        for task in tasks:
            missing = [name for name in task.names if name in self.reasons]
            for name in missing:
                self._add(task.case, name, {"status": "unavailable", "reason": self.reasons[name]})
            if len(missing) < len(task.names) and self.is_over:
                return
            self.done += 1
            if names := [name for name in task.names if name not in missing]:
                self._time(task, names)

    def _probe(self) -> None:
        """Why contenders cannot be had, and the record of the run with the versions of those that can."""
        versions: dict[str, str] = {}
        waiting = set(self.workers)

        def probe(names: tuple[str, ...]) -> None:
            try:
                answer = self.workers[names].ask({"op": "probe"}, PROBE_LIMIT_S)
            except WorkerLost as lost:
                reason = f"{lost.status}: {lost.reason}"
                answer = {"reasons": dict.fromkeys(names, reason), "versions": {}}
            self.reasons.update(answer["reasons"])
            if len(answer["reasons"]) == len(names):
                self.workers[names].stop()
            versions.update(answer["versions"])
            waiting.discard(names)

        with self._said_while(lambda: f"starting {_told(sorted(waiting))}"):
            self._side_by_side(probe, self.workers)
        for name, reason in sorted(self.reasons.items()):
            self.say(f"{name} is unavailable: {reason}")
        described: dict[str, Any] = {"device": self.settings.device}
        protocol = asdict(self.settings.protocol)
        able = [worker for names, worker in self.workers.items() if {*names} - {*self.reasons}]
        if able:
            request = {"op": "describe", "command": self.command, "protocol": protocol}
            described = able[0].ask(request, PROBE_LIMIT_S)
        record: dict[str, Any] = {
            "versions": versions,
            "protocol": protocol,
            "passes": self.settings.passes,
        }
        planned = (key for task in self.tasks for key in task.keys)
        record["gate_seqlen"] = self.settings.gate_tokens
        self.ledger.begin({**described, **record}, planned)

    def _prove(self, tasks: list[Task]) -> None:
        """The gates of all tasks; the workers remember what comes of them."""
        begun: dict[tuple[str, ...], str] = {}

        def prove(names: tuple[str, ...]) -> None:
            checked = set()
            for task in tasks:
                case = task.case
                small = case.at(min(case.seqlen, self.settings.gate_tokens))
                if task.names != names or small in checked or self.is_over:
                    continue
                checked.add(small)
                begun[names] = f"{', '.join(names)}, its {len(checked)}. case, {small.key}"
                request = {"op": "gate", "case": case.to_json()}
                try:
                    self.workers[names].ask(request, self.settings.cell_limit)
                except WorkerLost as lost:
                    told = f"{', '.join(names)}, checking {small.key}"
                    self.say(f"{told}: {lost.status}, {lost.reason}")
            begun.pop(names, None)

        able = [names for names in {task.names: 0 for task in tasks} if {*names} - {*self.reasons}]
        with self._said_while(lambda: f"checking {'; '.join(list(begun.values()))}"):
            self._side_by_side(prove, able)
        if able:
            self.say(f"checked {_told(able)} after {self.elapsed:.0f} s")

    def _said_while(self, doing: Callable[[], str]) -> AbstractContextManager[None]:
        return said_while(lambda: f"[{self.elapsed:.0f} s] {doing()}", self.say)

    def _side_by_side(
        self, step: Callable[[tuple[str, ...]], None], names: Iterable[tuple[str, ...]]
    ) -> None:
        with concurrent.futures.ThreadPoolExecutor(self.settings.jobs) as pool:
            list(pool.map(step, names))

    def _time(self, task: Task, names: list[str]) -> None:
        request = {
            "op": "time",
            "case": task.case.to_json(),
            "passes": self.settings.passes,
            "protocol": asdict(self.settings.protocol),
        }
        try:
            limit_s = self.settings.cell_limit * len(names)
            with self._said_while(lambda: f"timing {', '.join(names)}, {task.case.key}"):
                outcomes = self.workers[task.names].ask(request, limit_s)
        except WorkerLost as lost:
            outcomes = {x: {"status": lost.status, "reason": lost.reason} for x in names}
        case, told = task.case, []
        for name in names:
            row = self._add(case, name, outcomes[name])
            speeds = (f"{which} {x['tflops']:.3g}" for which, x in row.get("passes", {}).items())
            failed = f"{row['status']}: {row.get('reason')}"[:100]
            told.append(f"{name}: {', '.join(speeds) if row['status'] == 'ok' else failed}")
        where = f"{case.mask_label} {format_length(case.seqlen)} {case.heads}"
        place = f"[{self.done}/{len(self.tasks)}, {self.elapsed:.0f} s]"
        self.say(f"{place} {where}, TFLOP/s, {'; '.join(told)}")

    def _add(self, case: Case, name: str, outcome: Row) -> Row:
        contender = contenders.load(name)
        who = {"label": contender.label, "is_ours": contender.is_ours}
        return self.ledger.add(case, name, {**who, **outcome})


def _told(workers: Iterable[tuple[str, ...]]) -> str:
    """The contenders of workers."""
    return ", ".join(name for names in workers for name in names)
