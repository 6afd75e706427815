"""Times every case in every tree, in turns: a process for each tree, on one device."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi_bench.kernel.process import Process, WorkerLost
from magi_bench.workloads.cells import Cell, format_length
from magi_bench.workloads.workload import build

Row = dict[str, Any]
WORKER = Path(__file__).with_name("worker.py")
TURN_MS, MOST_CALLS = 10.0, 12
PREPARE_LIMIT_S, TURN_LIMIT_S = 180.0, 60.0
TOLERANCE = 0.03  # between fingerprints of results: trees round and add up in other orders


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    device: str
    dtype: str
    masks: tuple[str, ...]
    tokens: tuple[int, ...]
    heads: tuple[str, ...]
    head_dim: int
    passes: tuple[str, ...]
    lengths: str
    rounds: int
    seconds: float
    seed: int = 42

    def cases(self) -> Iterator[dict[str, Any]]:
        """Cheap ones first; as the workers take them."""
        for tokens, heads, which, mask in itertools.product(
            sorted(self.tokens), self.heads, self.passes, self.masks
        ):
            nheads_q, nheads_kv = map(int, heads.split(":"))
            shape = (tokens, nheads_q, nheads_kv, self.head_dim, self.dtype)
            cell = Cell("kernel", mask, *shape, lengths=self.lengths, seed=self.seed)
            slices = build(cell).slices
            ranges = (slices.q_ranges, slices.k_ranges, slices.mask_types[:, None])
            lists = zip(*(x.tolist() for x in ranges), strict=True)
            yield {
                "mask": mask,
                "tokens": tokens,
                "nheads_q": nheads_q,
                "nheads_kv": nheads_kv,
                "head_dim": self.head_dim,
                "pass": which,
                "dtype": self.dtype,
                "device": self.device,
                "seed": self.seed,
                "slices": [list(itertools.chain(*parts)) for parts in lists],
            }


def measure(trees: Mapping[str, Path], settings: Settings, say: Callable[[str], None]) -> list[Row]:
    """A row for each case: `ms` by the name of the tree, medians over rounds, or the `reason` why there is none."""
    begin, rows, order = time.monotonic(), [], random.Random(settings.seed)
    workers = {name: _worker(path) for name, path in trees.items()}
    try:
        for case in settings.cases():
            if time.monotonic() - begin > settings.seconds:
                say("time limit: the longest cases were not run")
                break
            row = {name: x for name, x in case.items() if name not in ("slices", "device", "seed")}
            try:
                row |= _timed(workers, case, settings.rounds, order)
            except WorkerLost as lost:
                row |= {"reason": f"{lost.status}: {lost.reason}"}
            rows.append(row)
            say(to_text(row))
    finally:
        for worker in workers.values():
            worker.stop()
    return rows


def _worker(tree: Path) -> Process:
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Process([str(WORKER)], os.environ | {"PYTHONPATH": os.pathsep.join(paths)})


def _timed(
    workers: Mapping[str, Process], case: dict[str, Any], rounds: int, order: random.Random
) -> Row:
    request = {"op": "prepare", "case": case}
    results = {name: worker.ask(request, PREPARE_LIMIT_S) for name, worker in workers.items()}
    first, *others = results.values()
    for name, other in zip(list(results)[1:], others, strict=True):
        differences = [_furthest(x, y) for x, y in zip(first, other, strict=True)]
        if not all(x <= TOLERANCE for x in differences):
            return {"reason": f"{name} has other results: fingerprints differ by {differences}"}

    def turn(name: str, calls: int) -> float:
        return workers[name].ask({"op": "time", "calls": calls}, TURN_LIMIT_S)

    calls = max(1, min(MOST_CALLS, int(TURN_MS / turn(next(iter(workers)), 2))))
    found: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name in order.sample(list(workers), len(workers)):
            found[name].append(turn(name, calls))
    return {"ms": {name: round(statistics.median(times), 4) for name, times in found.items()}}


def _furthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference; NaN where there is one."""
    found = [abs(x - y) for x, y in zip(one, other, strict=True)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def ratios(row: Row) -> dict[str, float]:
    """The time of each tree but the first, of that of the first."""
    first, *others = row["ms"]
    return {name: row["ms"][name] / row["ms"][first] for name in others}


def means(rows: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
    """By tree: the geometric mean of its ratios, the smallest and the largest."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, ratio in ratios(row).items() if "ms" in row else ():
            found.setdefault(name, []).append(ratio)
    return {name: (statistics.geometric_mean(x), min(x), max(x)) for name, x in found.items()}


def heads_of(row: Row) -> str:
    return f"{row['nheads_q']}:{row['nheads_kv']}"


def to_text(row: Row) -> str:
    shape = f"{format_length(row['tokens'])} {heads_of(row)} d{row['head_dim']}"
    where = f"{row['pass']} {row['mask']} {shape}"
    if "ms" not in row:
        return f"{where}: {row['reason']}"
    others = "".join(f", {name} {ratio:.3f}" for name, ratio in ratios(row).items())
    return f"{where}: {next(iter(row['ms'].values())):.3f} ms{others}"
