"""Results on disk: JSON lines, appended as they come. A "run" record says where the rows behind it come from."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magi_bench.workloads.cells import Cell

#: How a cell of a contender can end. Nothing is ever a magic number.
STATUSES = ("ok", "unsupported", "unavailable", "oom", "wrong", "error", "crash", "timeout")
# Worth another try with `--resume`: luck, or what a mended contender does not repeat.
RETRIED = frozenset({"wrong", "error", "crash", "timeout"})


@dataclass
class Results:
    """What result files hold. Of two rows with one key the later counts.

    Attributes:
        runs: the provenance of every run, by its id.
        rows: by cell key and contender.
        planned: the keys that the runs set out to measure.
    """

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    planned: dict[str, None] = field(default_factory=dict)

    @property
    def finished(self) -> set[str]:
        """Keys that `--resume` leaves alone."""
        return {key for key, row in self.rows.items() if row["status"] not in RETRIED}

    @property
    def not_run(self) -> list[str]:
        return [key for key in self.planned if key not in self.rows]

    def only(self, contenders: Collection[str]) -> Results:
        """What concerns these contenders."""
        rows = {k: row for k, row in self.rows.items() if row["contender"] in contenders}
        planned = [key for key in self.planned if key.rsplit("/", 1)[1] in contenders]
        return Results(self.runs, rows, dict.fromkeys(planned))

    def ok_rows(self) -> list[dict[str, Any]]:
        return [row for row in self.rows.values() if row["status"] == "ok"]

    def failed_rows(self) -> list[dict[str, Any]]:
        """Those that `--resume` repeats."""
        return [row for row in self.rows.values() if row["status"] in RETRIED]


def row_key(cell: Cell, contender: str) -> str:
    return f"{cell.key}/{contender}"


def load(paths: Iterable[Path]) -> Results:
    """Reads result files, earlier ones first.

    Args:
        paths: JSONL files.

    Returns:
        Their rows and runs; of two rows with one key the later.

    Raises:
        ValueError: a line is no result; the message says which.
    """
    results = Results()
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                kind = record.pop("kind")
            except (ValueError, KeyError, AttributeError):
                raise ValueError(
                    f"`{path}` line {number} is not a result of magi-bench: {line[:60]!r}"
                ) from None
            if kind == "run":
                results.planned.update(dict.fromkeys(record.pop("planned")))
                results.runs[record["run"]] = record
            else:
                results.rows[record["key"]] = record
    return results


def append(path: Path, kind: str, record: dict[str, Any]) -> None:
    """One more line; complete lines survive whatever happens next."""
    with open(path, "a") as file:
        file.write(json.dumps({"kind": kind, **record}) + "\n")


def write_record(
    output: Path | None, context: dict[str, Any], rows: list[dict[str, Any]], markdown: str
) -> None:
    """`output` with .json and .md behind it, all of a measurement at once; nothing where there is none."""
    if output is None:
        return
    record = {"context": context, "rows": rows}
    Path(f"{output}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{output}.md").write_text(markdown)
