"""Cells whose contenders are timed round by round in one process, in another order each round.

A card at its power limit remembers who ran before, so that what always comes first is faster: contenders that differ by few
percent are compared like this. A contender that crashes ends the run, and memory and time limits hold for nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from magi_bench import contenders
from magi_bench.kernel import timing
from magi_bench.kernel.ledger import Ledger, cheap_first
from magi_bench.kernel.measure import Bench, Prepared
from magi_bench.kernel.settings import Settings
from magi_bench.results import provenance, rows
from magi_bench.workloads.cells import Cell
from magi_bench.workloads.workload import build

Calls = dict[str, Callable[[], object]]


def execute(
    cells: Sequence[Cell],
    names: Sequence[str],
    settings: Settings,
    output: Path,
    rounds: int,
    say: Callable[[str], None] = print,
) -> rows.Results:
    """Measures `cells`, cheap ones first, and appends a row of each contender to `output`.

    Args:
        cells: of the benchmark's grid.
        names: contenders.
        settings: what holds for all cells; limits of time and of processes do not.
        output: a JSONL file; created if there is none.
        rounds: how often each contender is timed.
        say: takes lines of progress.

    Returns:
        All rows of `output`, those of earlier runs included.
    """
    ledger = Ledger(output, settings)
    benches = {
        name: Bench(contenders.load(name), settings.device, settings.gate_seqlen)
        for name in names
        if contenders.load(name).available() is None
    }
    planned = [c for c in cheap_first(cells) if _is_open(c, names, ledger.finished)]
    ledger.begin(
        provenance.describe(settings.device, settings.command),
        {k: v for name in names for k, v in contenders.load(name).versions().items()},
        (rows.row_key(cell, name) for cell in planned for name in names),
        rounds=rounds,
        interleaved=True,
    )
    for number, cell in enumerate(planned, 1):
        outcomes = _measure(cell, benches, settings, rounds)
        for name in names:
            outcome = outcomes.get(name) or {
                "status": "unavailable",
                "reason": contenders.load(name).available(),
            }
            ledger.add(cell, name, outcome)
        say(f"[{number}/{len(planned)}] {cell.key}: {_in_words(outcomes)}")
    return ledger.results()


def _is_open(cell: Cell, names: Sequence[str], finished: set[str]) -> bool:
    """Whether a contender lacks a row: then all of them are measured, beside each other."""
    return not all(rows.row_key(cell, name) in finished for name in names)


def _measure(
    cell: Cell, benches: dict[str, Bench], settings: Settings, rounds: int
) -> dict[str, dict[str, Any]]:
    """What becomes of each contender."""
    workload = build(cell, settings.device)
    inputs = workload.inputs(settings.device)
    outcomes: dict[str, dict[str, Any]] = {}
    prepared: dict[str, Prepared] = {}
    for name, bench in benches.items():
        made = bench.prepare(cell, workload, inputs)
        if isinstance(made, Prepared):
            prepared[name], outcomes[name] = made, {**made.outcome, "passes": {}}
        else:
            outcomes[name] = made
    for which in settings.passes:
        calls = {name: x.passes[which] for name, x in prepared.items() if which in x.passes}
        for name, times in in_rounds(calls, settings, rounds).items():
            result = timing.summary(times)
            result["tflops"] = workload.flops(which) / result["ms"] / 1e9
            outcomes[name]["passes"][which] = result
    return outcomes


def in_rounds(calls: Calls, settings: Settings, rounds: int) -> dict[str, list[float]]:
    """The milliseconds of a call of each, once a round, in an order of its own each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
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
