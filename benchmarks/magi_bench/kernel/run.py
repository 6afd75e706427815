"""Runs cells: every contender in a process of its own, cheap cells first, so that a run cut short lacks few of many.

First all contenders prove themselves right, side by side; then they are timed, one at a time. Contenders that compile
slowly come last, so that they cost the others nothing when time runs out.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi_bench import contenders
from magi_bench.kernel.ledger import Ledger, cheap_first
from magi_bench.kernel.process import Worker, WorkerLost
from magi_bench.kernel.settings import Settings
from magi_bench.results import rows
from magi_bench.workloads.cells import Cell, format_length

# A worker imports PyTorch and a contender's package first.
PROBE_LIMIT_S = 180.0


@dataclass(frozen=True)
class Task:
    cell: Cell
    contender: str

    @property
    def key(self) -> str:
        return rows.row_key(self.cell, self.contender)


def order(cells: Sequence[Cell], names: Sequence[str]) -> list[Task]:
    """Contenders that compile quickly first; of each kind cheap cells first, all contenders of a cell together."""
    tasks = [Task(cell, name) for cell in cheap_first(cells) for name in names]
    return sorted(tasks, key=lambda task: contenders.load(task.contender).compiles_slowly)


def execute(
    cells: Sequence[Cell],
    names: Sequence[str],
    settings: Settings,
    output: Path,
    say: Callable[[str], None] = print,
) -> rows.Results:
    """Measures all that `output` does not hold yet, and appends it there.

    Args:
        cells: of the benchmark's grid.
        names: contenders.
        settings: what holds for all cells.
        output: a JSONL file; created if there is none.
        say: takes lines of progress.

    Returns:
        All rows of `output`, those of earlier runs included.
    """
    ledger = Ledger(output, settings)
    tasks = [task for task in order(cells, names) if task.key not in ledger.finished]
    _Run(tasks, settings, ledger, say).execute()
    return ledger.results()


class _Run:
    def __init__(
        self, tasks: list[Task], settings: Settings, ledger: Ledger, say: Callable[[str], None]
    ):
        self.tasks, self.settings, self.ledger, self.say = tasks, settings, ledger, say
        self.begin = time.monotonic()
        self.done = 0
        self.timed = 0
        self.timed_s = 0.0
        self.workers = {
            name: Worker(name, settings.device, settings.gate_seqlen)
            for name in dict.fromkeys(task.contender for task in tasks)
        }

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    @property
    def is_over(self) -> bool:
        return self.elapsed > self.settings.time_limit_s

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

        def probe(name: str) -> None:
            try:
                answer = self.workers[name].ask({"op": "probe"}, PROBE_LIMIT_S)
            except WorkerLost as lost:
                answer = {"reason": f"{lost.status}: {lost.reason}", "versions": {}}
            if answer["reason"]:
                reasons[name] = answer["reason"]
                self.workers[name].stop()
            versions.update(answer["versions"])

        self._side_by_side(probe, self.workers)
        for name, reason in sorted(reasons.items()):
            self.say(f"{name} is unavailable: {reason}")
        return reasons, versions

    def _prove(self, tasks: list[Task]) -> None:
        """The gates of all tasks; the workers remember what comes of them."""

        def prove(name: str) -> None:
            checked = set()
            for task in tasks:
                small = task.cell.at(min(task.cell.seqlen, self.settings.gate_seqlen))
                if task.contender != name or small.key in checked or self.is_over:
                    continue
                checked.add(small.key)
                request = {"op": "gate", "cell": task.cell.to_json()}
                try:
                    self.workers[name].ask(request, self.settings.cell_limit_s)
                except WorkerLost as lost:
                    self.say(f"{name}, checking {small.key}: {lost.status}, {lost.reason}")

        names = list(dict.fromkeys(task.contender for task in tasks))
        self._side_by_side(prove, names)
        if names:
            self.say(f"checked {', '.join(names)} after {_clock(self.elapsed)}")

    def _side_by_side(self, step: Callable[[str], None], names: Iterable[str]) -> None:
        with concurrent.futures.ThreadPoolExecutor(self.settings.jobs) as pool:
            list(pool.map(step, names))

    def _time(self, task: Task) -> dict[str, Any]:
        request = {
            "op": "time",
            "cell": task.cell.to_json(),
            "passes": self.settings.passes,
            "protocol": self.settings.protocol.to_json(),
        }
        try:
            return self.workers[task.contender].ask(request, self.settings.cell_limit_s)
        except WorkerLost as lost:
            return {"status": lost.status, "reason": lost.reason}

    def _record_run(self, versions: dict[str, str], reasons: dict[str, str]) -> None:
        available = [name for name in self.workers if name not in reasons]
        provenance: dict[str, Any] = {"device": self.settings.device}
        if available:
            request = {
                "op": "describe",
                "command": self.settings.command,
                "protocol": self.settings.protocol.to_json(),
            }
            provenance = self.workers[available[0]].ask(request, PROBE_LIMIT_S)
        self.ledger.begin(provenance, versions, (task.key for task in self.tasks))

    def _record(self, task: Task, outcome: dict[str, Any]) -> None:
        self.done += 1
        self.ledger.add(task.cell, task.contender, outcome)

    def _say_progress(self, task: Task, outcome: dict[str, Any]) -> None:
        wanted = self.timed_s / self.timed * (len(self.tasks) - self.done)
        left = max(min(wanted, self.settings.time_limit_s - self.elapsed), 0.0)
        if outcome["status"] == "ok":
            parts = (f"{name} {x['tflops']:.3g}" for name, x in outcome["passes"].items())
            result = ", ".join(parts) + " TFLOP/s"
        else:
            result = f"{outcome['status']}: {outcome['reason']}"[:100]
        cell = task.cell
        where = f"{cell.mask_label} {format_length(cell.seqlen)} {cell.heads}"
        self.say(
            f"[{self.done}/{len(self.tasks)}, {_clock(self.elapsed)}, {_clock(left)} left] "
            f"{where} {task.contender}: {result}"
        )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
