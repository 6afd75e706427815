"""A run finds in its file what earlier runs have finished, and appends what it finishes itself."""

from magi_bench.results.rows import Ledger, row_key
from tests.bench.kernel.test_run import CASES


def test_rows_are_of_their_run_and_finished_by_their_status(tmp_path):
    path = tmp_path / "r.jsonl"
    first = Ledger(path)
    assert first.finished == set()
    keys = [row_key(CASES[0], name) for name in ("naive", "math")]
    first.begin({"device": "a machine", "versions": {"math": "1.0"}}, keys)
    first.add(CASES[0], "naive", {"status": "ok", "passes": {}})
    first.add(CASES[0], "math", {"status": "timeout", "reason": "slow"})

    again = Ledger(path)
    assert again.results == first.results
    record = again.results.runs[first.run_id]
    assert record["device"] == "a machine"
    assert list(again.results.planned) == keys
    assert {row["run"] for row in again.results.rows.values()} == {first.run_id}
    assert again.finished == {keys[0]}
