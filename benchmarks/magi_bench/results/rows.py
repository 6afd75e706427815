"""Results on disk: JSON lines, appended as they come. A "run" record says where the rows behind it come from.

A row is one contender on one case: `run`, `key`, `contender`, `label`, `is_ours`, `case`, `status` with a `reason`
unless it is "ok", `gate`, and `passes` with what was measured by pass. docs/benchmark.md has all fields.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from magi_bench.cases import Case

Row = dict[str, Any]
#: How a case of a contender can end. Nothing is ever a magic number.
STATUSES = ("ok", "unsupported", "unavailable", "oom", "wrong", "error", "crash", "timeout")
# Worth another try with `--resume`: luck, or what a mended contender does not repeat.
RETRIED = frozenset({"wrong", "error", "crash", "timeout"})


@dataclass
class Results:
    """The contents of result files. Of two rows with one key the later counts."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # their provenance, by id
    rows: dict[str, Row] = field(default_factory=dict)  # by case key and contender
    planned: dict[str, None] = field(default_factory=dict)  # keys that runs set out to measure

    @property
    def finished(self) -> set[str]:
        """Keys that `--resume` leaves alone."""
        return {key for key, row in self.rows.items() if row["status"] not in RETRIED}

    @property
    def not_run(self) -> list[str]:
        return [key for key in self.planned if key not in self.rows]

    def only(self, contenders: Collection[str]) -> Results:
        """The rows of these contenders."""
        rows = {k: row for k, row in self.rows.items() if row["contender"] in contenders}
        planned = [key for key in self.planned if key.rsplit("/", 1)[1] in contenders]
        return Results(self.runs, rows, dict.fromkeys(planned))

    def ok_rows(self) -> list[Row]:
        return [row for row in self.rows.values() if row["status"] == "ok"]

    def failed_rows(self) -> list[Row]:
        """Those that `--resume` repeats."""
        return [row for row in self.rows.values() if row["status"] in RETRIED]

    def take(self, record: dict[str, Any]) -> None:
        """One line of a file; a KeyError if it is none."""
        if record.pop("kind") == "run":
            self.planned.update(dict.fromkeys(record.pop("planned")))
            self.runs[record["run"]] = record
        else:
            self.rows[record["key"]] = record


def row_key(case: Case, contender: str) -> str:
    return f"{case.key}/{contender}"


def load(paths: Iterable[Path]) -> Results:
    """Reads JSONL files, of two rows with one key the later; a ValueError names a line that is no result."""
    results = Results()
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                results.take(json.loads(line))
            except (ValueError, KeyError, AttributeError):
                raise ValueError(
                    f"`{path}` line {number} is not a result of magi-bench: {line[:60]!r}"
                ) from None
    return results


def append(path: Path, kind: str, record: Mapping[str, Any]) -> None:
    """One more line; complete lines survive whatever happens next."""
    with open(path, "a") as file:
        file.write(json.dumps({"kind": kind, **record}) + "\n")


class Ledger:
    """The results of a run and of earlier ones in the file, which are appended to a JSONL file as they come; None
    keeps them in memory. Rows of earlier runs that need no other try are `finished`."""

    def __init__(self, output: Path | None):
        self.output, self.run_id = output, uuid.uuid4().hex[:8]
        self.results = load([output]) if output and output.exists() else Results()
        self.finished = self.results.finished

    @classmethod
    def fresh(cls, output: Path | None) -> Ledger:
        """The path `output` with .jsonl behind it, where nothing of an earlier run is left."""
        path = output and Path(f"{output}.jsonl")
        if path:
            path.unlink(missing_ok=True)
        return cls(path)

    def begin(self, run: Mapping[str, Any], planned: Iterable[str] = ()) -> None:
        """Appends the record of the run: provenance, versions, protocol and settings, and keys of the rows to come."""
        self._append("run", {**run, "run": self.run_id, "planned": list(planned)})

    def add(self, case: Case, contender: str, outcome: Mapping[str, Any]) -> Row:
        """Appends what became of a contender's case, and returns the row. A second row takes the place of the first."""
        where = {"run": self.run_id, "key": row_key(case, contender), "contender": contender}
        self._append("row", {**where, "case": asdict(case), **outcome})
        return self.results.rows[where["key"]]

    def _append(self, kind: str, record: Mapping[str, Any]) -> None:
        self.results.take(json.loads(json.dumps({"kind": kind, **record})))
        if self.output is not None:
            append(self.output, kind, record)
