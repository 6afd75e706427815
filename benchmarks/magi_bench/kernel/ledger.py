"""The result file of a run: which cells it holds already, and the records that the run appends."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from magi_bench.kernel.settings import Settings
from magi_bench.results import rows
from magi_bench.workloads.cells import Cell
from magi_bench.workloads.workload import cost


class Ledger:
    """Appends a record of the run and a row for each cell of a contender to a JSONL file; created if there is none.

    Args:
        output: the file.
        settings: what holds for all cells.

    Attributes:
        finished: keys of the rows that need no other try.
    """

    def __init__(self, output: Path, settings: Settings):
        self.output, self.settings = output, settings
        self.run_id = uuid.uuid4().hex[:8]
        self.finished = rows.load([output]).finished if output.exists() else set()

    def begin(
        self,
        provenance: Mapping[str, Any],
        versions: Mapping[str, str],
        planned: Iterable[str],
        **protocol: Any,
    ) -> None:
        """Appends the record of the run.

        Args:
            provenance: machine, software and command.
            versions: of the contenders' packages.
            planned: keys of the rows to come.
            **protocol: what is said of the timing besides `settings.protocol`.
        """
        settings = self.settings
        record = {
            **provenance,
            "run": self.run_id,
            "versions": versions,
            "protocol": settings.protocol.to_json() | protocol,
            "passes": settings.passes,
            "gate_seqlen": settings.gate_seqlen,
            "planned": list(planned),
        }
        rows.append(self.output, "run", record)

    def add(self, cell: Cell, contender: str, outcome: Mapping[str, Any]) -> None:
        """Appends what became of a contender's cell."""
        where = {"run": self.run_id, "key": rows.row_key(cell, contender), "contender": contender}
        rows.append(self.output, "row", {**where, "cell": cell.to_json(), **outcome})

    def results(self) -> rows.Results:
        """All that the file holds."""
        return rows.load([self.output])


def cheap_first(cells: Sequence[Cell]) -> list[Cell]:
    """Each cell once, so ordered that a run cut short lacks few of many."""
    return sorted(dict.fromkeys(cells), key=cost)
