"""Cases whose contenders are timed round by round in one process, in another order each round.

A card at its power limit remembers who ran before, so that what always comes first is faster: contenders that differ by
few percent are compared like this. A contender that crashes ends the run, and memory and time limits hold for nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from magi_bench import contenders, timing
from magi_bench.cases import Case
from magi_bench.kernel import run
from magi_bench.kernel.measure import Bench, Prepared
from magi_bench.results import provenance, rows
from magi_bench.settings import Settings
from magi_bench.workloads.workload import build

Calls = dict[str, Callable[[], object]]


def execute(
    cases: Sequence[Case],
    names: Sequence[str],
    settings: Settings,
    command: Sequence[str],
    output: Path,
    say: Callable[[str], None] = print,
) -> rows.Results:
    """As `run.execute`, for `settings.rounds`; limits of time and of processes do not hold."""
    ledger = rows.Ledger(output)
    every = {name: contenders.load(name) for name in names}
    missing = {name: contender.available() for name, contender in every.items()}
    benches = {
        name: Bench(contender, settings.device, settings.gate_tokens)
        for name, contender in every.items()
        if missing[name] is None
    }
    planned = [c for c in run.cheap_first(cases) if _is_open(c, names, ledger.finished)]
    run.begin(
        ledger,
        settings,
        provenance.describe(settings.device, list(command)),
        {k: v for name in benches for k, v in every[name].versions().items()},
        (rows.row_key(case, name) for case in planned for name in names),
        rounds=settings.rounds.count,
        interleaved=True,
    )
    for number, case in enumerate(planned, 1):
        outcomes = _measure(case, benches, settings)
        for name in names:
            unavailable = {"status": "unavailable", "reason": missing[name]}
            run.add(ledger, case, name, outcomes.get(name, unavailable))
        say(f"[{number}/{len(planned)}] {case.key}: {_in_words(outcomes)}")
    return ledger.results


def _is_open(case: Case, names: Sequence[str], finished: set[str]) -> bool:
    """True if a contender lacks a row: then all of them are measured, beside each other."""
    return not all(rows.row_key(case, name) in finished for name in names)


def _measure(
    case: Case, benches: dict[str, Bench], settings: Settings
) -> dict[str, dict[str, Any]]:
    """Measures each contender, or records why not."""
    workload = build(case, settings.device)
    inputs = workload.inputs(settings.device)
    outcomes: dict[str, dict[str, Any]] = {}
    prepared: dict[str, Prepared] = {}
    for name, bench in benches.items():
        made = bench.prepare(case, workload, inputs)
        if isinstance(made, Prepared):
            prepared[name], outcomes[name] = made, {**made.outcome, "passes": {}}
        else:
            outcomes[name] = made
    for which in settings.passes:
        calls = {name: x.passes[which] for name, x in prepared.items() if which in x.passes}
        for name, times in in_rounds(calls, settings).items():
            result = timing.summary(times)
            result["tflops"] = workload.flops(which) / result["ms"] / 1e9
            outcomes[name]["passes"][which] = result
    return outcomes


def in_rounds(calls: Calls, settings: Settings) -> dict[str, list[float]]:
    """The milliseconds of a call of each, once a round, in an order of its own each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(settings.rounds.count):
        random.shuffle(order)
        for name in order:
            times[name].append(timing.of_one_round(calls[name], settings.device, settings.protocol))
    return times


def _in_words(outcomes: dict[str, dict[str, Any]]) -> str:
    return ", ".join(
        f"{name} "
        + (
            "/".join(f"{x['tflops']:.3g}" for x in outcome["passes"].values())
            if outcome["status"] == "ok"
            else outcome["status"]
        )
        for name, outcome in outcomes.items()
    )
