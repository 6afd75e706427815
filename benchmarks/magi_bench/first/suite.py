"""`magi-bench first`: seconds of the first forward and the first backward of a compiled FlexAttention, ours beside
Inductor's, each in a process of its own with empty caches."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace

from magi_bench import arguments, runner
from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Rounds, summary
from magi_bench.process import Process, WorkerLost
from magi_bench.results.rows import Row

LABELS = {"magi": 'backend="magi"', "flex": "FlexAttention"}
CASES = ("causal", "documents", "alibi")
QUICK = {"tokens": [512], "heads": "2:1", "head_dim": 64, "runs": 1, "masks": ["causal"]}
LIMIT_S = 600.0  # of a process
#: Environment variables that say where caches are.
CACHES = (
    "MAGI_COMPILE_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
)


class First(runner.Suite):
    """Processes with empty caches take turns; a row is one step of them: what is imported, made or called."""

    title = "The first call"
    notes = "Milliseconds of a step in processes of their own, each with empty caches: medians over processes."

    def __init__(self, settings: Settings, *, imports: bool):
        super().__init__(settings)
        self.imports = imports

    def place(self, case: Case) -> Row:
        return {"group": f"First calls, {case.mask}", "what": case.which}

    def rest(self, run: runner.Runner) -> None:
        for tokens in self.settings.tokens:
            for mask in self.settings.masks:
                self._measure(self.settings.case("first", mask, tokens), run)

    def _measure(self, case: Case, run: runner.Runner) -> None:
        names = self.settings.contenders or tuple(LABELS)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        lost: dict[str, WorkerLost] = {}
        for number in range(self.settings.rounds.count):
            for name in names[:: -1 if number % 2 else 1]:
                try:
                    found[name].append(self._with_empty_caches(case, name))
                except WorkerLost as error:
                    lost[name] = error
        rows: list[tuple[Case, str, Row]] = []
        for name, runs in found.items():
            who = {"label": LABELS[name], "is_ours": name == "magi"}
            times = {step: [1e3 * seconds[step] for seconds in runs] for step in (runs or [{}])[0]}
            for step, ms in times.items():
                outcome = {"status": "ok", "passes": {step: summary(ms)}}
                rows.append((replace(case, which=step), name, who | outcome))
            if name in lost:
                rows.append(
                    (replace(case, which="process"), name, who | runner.failure(lost[name]))
                )
            told = ", ".join(
                f"{step} {summary(ms)['ms'] / 1e3:.2f} s" for step, ms in times.items()
            )
            run.say(f"{case.mask:10} {name:5} {told}")
        for step in dict.fromkeys(case.which for case, *_ in rows):
            runner.compare([row for case, _, row in rows if case.which == step])
        for row in rows:
            run.add(*row)

    def _with_empty_caches(self, case: Case, name: str) -> dict[str, float]:
        request = {
            "contender": name,
            "case": case.mask,
            "tokens": case.seqlen,
            "heads": [case.nheads_q, case.nheads_kv],
            "head_dim": case.head_dim,
            "device": self.settings.device,
            "imports": self.imports,
        }
        with tempfile.TemporaryDirectory() as folder:
            places = {name: os.path.join(folder, name.lower()) for name in CACHES}
            worker = Process(["-m", "magi_bench.first.worker"], {**os.environ, **places})
            try:
                return worker.ask(request, LIMIT_S)
            finally:
                worker.stop()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.add_argument("--cases", dest="masks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contenders", nargs="+", choices=LABELS)
    parser.add_argument("--runs", type=arguments.count, default=3, help="processes of each")
    parser.add_argument(
        "--imports", action="store_true", help="import Dynamo and Inductor before the first call"
    )
    names = ("tokens", "heads", "head_dim", "device", "quick", "out")
    arguments.add(parser, names, tokens=[8192])
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if a process of ours failed."""
    settings = arguments.settings_of(args, QUICK)
    settings = replace(settings, rounds=Rounds(args.runs))
    return runner.run_command(First(settings, imports=args.imports), args)
