"""A run finds in its file what earlier runs have finished, and appends what it finishes itself."""

import dataclasses

from magi_bench.kernel.ledger import Ledger, cheap_first
from magi_bench.kernel.settings import Settings
from magi_bench.results.rows import row_key
from tests.bench.kernel.test_run import CELLS


def test_rows_are_of_their_run_and_finished_by_their_status(tmp_path):
    path = tmp_path / "r.jsonl"
    first = Ledger(path, Settings("cpu", passes=("fwd",)))
    assert first.finished == set()
    keys = [row_key(CELLS[0], name) for name in ("naive", "math")]
    first.begin({"device": "a machine"}, {"math": "1.0"}, keys, rounds=3)
    first.add(CELLS[0], "naive", {"status": "ok", "passes": {}})
    first.add(CELLS[0], "math", {"status": "timeout", "reason": "slow"})

    results = first.results()
    protocol = dataclasses.asdict(Settings("cpu").protocol)
    record = results.runs[first.run_id]
    assert record["device"] == "a machine"
    assert record["passes"] == ["fwd"]
    assert record["protocol"] == {**protocol, "rounds": 3}
    assert list(results.planned) == keys
    assert {row["run"] for row in results.rows.values()} == {first.run_id}
    assert Ledger(path, Settings("cpu")).finished == {keys[0]}


def test_cheap_cells_come_first_and_once():
    cells = cheap_first([*CELLS[2:], *CELLS])
    assert [cell.seqlen for cell in cells] == [64, 64, 128, 128, 256, 256]
    assert len(set(cells)) == len(CELLS)
