"""`magi-bench kernel` and `sparse`: every contender in a process of its own, cheap cases first, so that a run cut short
lacks few of many.

First all contenders prove themselves right, side by side; then they are timed, one at a time. Contenders that compile
slowly come last, so that they cost the others nothing when time runs out. Interleaved, one process has all contenders
and times them round by round: a card at its power limit remembers who ran before, so that what always comes first is
faster.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from magi_bench import arguments, contenders
from magi_bench.arguments import Settings, count, length, positive, say
from magi_bench.cases import PASSES, Case, format_length
from magi_bench.clock import Protocol
from magi_bench.contenders.base import refusals
from magi_bench.process import Process, WorkerLost
from magi_bench.progress import said_while
from magi_bench.results import rows
from magi_bench.results.rows import Ledger, Row
from magi_bench.runner import failure, who
from magi_bench.workloads.lengths import SAMPLERS
from magi_bench.workloads.presets import PRESETS, Preset
from magi_bench.workloads.workload import SPARSE_MASKS, build, cost
from magi_compile.masks.library import MASKS as NAMED_MASKS

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


class Run:
    """Measures all contenders `names` on `cases` that the JSONL file `output` does not hold yet, and appends it there.
    With several rounds in the protocol, interleaved."""

    def __init__(
        self,
        cases: Sequence[Case],
        names: Sequence[str],
        settings: Settings,
        command: Sequence[str],
        output: Path,
        say: Callable[[str], None] = print,
    ):
        self.settings, self.command, self.ledger, self.say = settings, command, Ledger(output), say
        tasks = order(cases, names, together=settings.protocol.rounds > 1)
        self.tasks = [task for task in tasks if {*task.keys} - self.ledger.finished]
        self.began, self.done = time.monotonic(), 0
        self.workers = {task.names: worker_of(task.names, settings) for task in self.tasks}
        self.reasons: dict[str, str] = {}  # of contenders that cannot be had

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        return self.elapsed > self.settings.seconds

    def execute(self) -> rows.Results:
        """Gives all rows of the file."""
        if not self.tasks:
            self.say("nothing left to run")
            return self.ledger.results
        try:
            self._probe()
            for is_slow in (False, True):
                self._execute_tier([task for task in self.tasks if _is_slow(task) == is_slow])
        finally:
            for worker in self.workers.values():
                worker.stop()
        if left := len(self.tasks) - self.done:
            self.say(f"time limit: {left} of {len(self.tasks)} not run; --resume continues")
        return self.ledger.results

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
            request = {"op": "describe", "command": list(self.command), "protocol": protocol}
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
                small = replace(case, seqlen=min(case.seqlen, self.settings.gate_tokens))
                if task.names != names or small in checked or self.is_over:
                    continue
                checked.add(small)
                begun[names] = f"{', '.join(names)}, its {len(checked)}. case, {small.key}"
                request = {"op": "gate", "case": asdict(case)}
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
            "case": asdict(task.case),
            "passes": self.settings.passes,
            "protocol": asdict(self.settings.protocol),
        }
        try:
            limit_s = self.settings.cell_limit * len(names)
            with self._said_while(lambda: f"timing {', '.join(names)}, {task.case.key}"):
                outcomes = self.workers[task.names].ask(request, limit_s)
        except WorkerLost as lost:
            outcomes = dict.fromkeys(names, failure(lost))
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
        return self.ledger.add(case, name, who(contenders.load(name)) | outcome)


def _told(workers: Iterable[tuple[str, ...]]) -> str:
    """The contenders of workers."""
    return ", ".join(name for names in workers for name in names)


def add_arguments(parser: argparse.ArgumentParser, level: str) -> None:
    """Every option of a command, "kernel" or "sparse"."""
    option = parser.add_argument
    several: dict[str, Any] = {"nargs": "+"}
    names: dict[str, Any] = {"choices": contenders.names(), "metavar": "NAME", **several}
    seconds: dict[str, Any] = {"type": positive, "metavar": "SECONDS"}
    masks = SPARSE_MASKS if level == "sparse" else tuple(NAMED_MASKS)
    option("--preset", choices=PRESETS, default=["smoke"], help="one, or several", **several)
    option("--masks", choices=masks, help="only these", **several)
    option("--seqlens", type=length, help="only these, or others", **several)
    option("--heads", type=arguments.heads, metavar="Q:KV", help="only these, or others", **several)
    option("--head-dim", type=arguments.head_dims, metavar="D[:DV]", help="of q and k, and of v")
    option("--lengths", choices=SAMPLERS, help="how documents are drawn")
    if level == "sparse":
        option("--blocks", type=count, help="only these sizes", **several)
        option("--densities", type=arguments.share, help="only these", **several)
    option("--contenders", **names)
    option("--without", default=[], **names)
    option("--passes", choices=PASSES, default=PASSES, **several)
    arguments.add(parser, ("dtype", "device", "seed"), seed=None)
    option("--output", type=Path, default=Path("magi-bench.jsonl"), help="JSONL file")
    option("--resume", action="store_true", help="go on with the output file")
    option("--dry-run", action="store_true", help="say what would run, and why not")
    option("--time-limit", default=float("inf"), **seconds)
    option("--cell-limit", default=120.0, **seconds)
    option("--budget-ms", type=positive, help="for the repetitions of a pass")
    option("--min-reps", type=count, default=Protocol.min_reps)
    option("--gate-seqlen", type=length, help="longest sequence checked")
    words = "time contenders round by round in one process, not one after another in their own"
    option("--interleaved", type=count, metavar="ROUNDS", default=1, help=words)
    words = "contenders checked at a time; by default 1 on a CPU, all on a GPU"
    option("--jobs", type=count, help=words)
    parser.set_defaults(command=run, level=level)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed."""
    device = arguments.device_of(args.device)
    presets = [PRESETS[name] for name in args.preset]
    cases = _filtered([case for x in presets for case in x.cases(args.level, device)], args)
    _check_filters(cases, args)
    if not cases:
        raise ValueError(f"no {args.level} case of {', '.join(args.preset)} matches the options")
    preset = presets[0]
    names = _contenders(args, preset, device)
    if args.dry_run:
        return _dry_run(cases, names, device)
    if args.output.exists() and not args.resume:
        raise FileExistsError(f"`{args.output}` exists: add --resume, or choose another --output")
    settings = Settings(
        device=device,
        passes=tuple(args.passes),
        protocol=Protocol(
            budget_ms=args.budget_ms or preset.budget_ms,
            min_reps=args.min_reps,
            flush_bytes=0 if device == "cpu" else Protocol.flush_bytes,
            rounds=args.interleaved,
        ),
        gate_tokens=args.gate_seqlen or preset.gate_seqlens[args.level],
        cell_limit=args.cell_limit,
        seconds=args.time_limit,
        jobs=args.jobs or (len(names) if device == "cuda" else 1),
    )
    command = list(map(shlex.quote, arguments.as_typed(args.command_line, args.output)))
    results = Run(cases, names, settings, command, args.output, say).execute()
    ok, failed, left = results.ok_rows(), results.failed_rows(), results.not_run
    say(f"{len(ok)} measured, {len(failed)} failed, {len(left)} not run: {args.output}")
    return int(any(row["is_ours"] for row in failed))


def _filters(args: argparse.Namespace) -> dict[str, list[Any]]:
    """The values that are asked for, by option; each is an attribute of a case, in the plural."""
    options = ("masks", "seqlens", "heads", "blocks", "densities")
    return {name: found for name in options if (found := getattr(args, name, None))}


def _of(option: str) -> Callable[[Case], Any]:
    """The attribute of a case that an option filters by."""
    return attrgetter({"heads": "heads", "densities": "density"}.get(option, option[:-1]))


def _check_filters(cases: list[Case], args: argparse.Namespace) -> None:
    """Raises ValueError where no case has a value that is asked for."""
    for option, wanted in _filters(args).items():
        known = set(map(_of(option), cases))
        if missing := [x for x in wanted if x not in known]:
            raise ValueError(
                f"`--{option}` {missing[0]} is in no {args.level} case of {', '.join(args.preset)} that matches the "
                "other options; `--dry-run` without them lists all"
            )


def _filtered(cases: list[Case], args: argparse.Namespace) -> list[Case]:
    """The cases that the filters leave. A length or heads that no preset has are put in place of theirs."""
    for option, wanted in _filters(args).items():
        value = _of(option)
        known = set(map(value, cases))
        kept = [case for case in cases if value(case) in wanted]
        for new in (x for x in wanted if x not in known):
            if option == "seqlens":
                kept += [replace(case, seqlen=new) for case in cases]
            elif option == "heads":
                q, kv = map(int, new.split(":"))
                kept += [replace(case, nheads_q=q, nheads_kv=kv) for case in cases]
        cases = kept
    changes = {name: getattr(args, name) for name in ("dtype", "lengths", "seed")}
    changes = {name: value for name, value in changes.items() if value is not None}
    if args.head_dim:
        changes["head_dim"], changes["head_dim_v"] = args.head_dim
    return list(dict.fromkeys(replace(case, **changes) for case in cases))


def _contenders(args: argparse.Namespace, preset: Preset, device: str) -> list[str]:
    """Those asked for; else the preset's, or all that know the level and the device."""
    if args.contenders:
        return [name for name in args.contenders if name not in args.without]
    asked = preset.contenders_on_cpu if device == "cpu" else None
    made = map(contenders.load, asked or contenders.names())
    able = (x.name for x in made if args.level in x.levels and device in x.devices)
    return [name for name in able if name not in args.without]


def _dry_run(cases: list[Case], names: list[str], device: str) -> int:
    """Prints every case with the contenders that would run, and the reasons of the others."""
    missing = {name: contenders.load(name).available() for name in names}
    for name, reason in missing.items():
        if reason:
            say(f"{name} is unavailable: {reason}")
    counted, described = 0, dict.fromkeys(task.case for task in order(cases, names))
    for case in described:
        workload = build(case)
        runs, reasons = [], []
        for name in names:
            against = [] if missing[name] else refusals(contenders.load(name), workload, device)
            if against:
                reasons.append(f"    not {name}: {'; '.join(against)}")
            elif not missing[name]:
                runs.append(name)
        counted += len(runs)
        density = workload.pairs / case.nheads_q / case.seqlen**2
        say(
            f"{case.mask_label} {format_length(case.seqlen)} {case.heads} d{case.head_dims_label} "
            f"{case.dtype}, {len(workload.documents)} documents, density {density:.1%}: "
            f"{', '.join(runs) or 'nobody'}"
        )
        for line in reasons:
            say(line)
    say(f"{counted} measurements of {len(described)} cases on {device}")
    return 0
