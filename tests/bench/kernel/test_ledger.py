"""A run finds in its file what earlier runs have finished, and appends what it finishes itself."""

import dataclasses

from magi_bench.kernel import run
from magi_bench.results.rows import Ledger, row_key
from magi_bench.settings import Settings
from tests.bench.kernel.test_run import CASES


def test_rows_are_of_their_run_and_finished_by_their_status(tmp_path):
    path, settings = tmp_path / "r.jsonl", Settings("cpu", passes=("fwd",))
    first = Ledger(path)
    assert first.finished == set()
    keys = [row_key(CASES[0], name) for name in ("naive", "math")]
    run.begin(first, settings, {"device": "a machine"}, {"math": "1.0"}, keys, rounds=3)
    run.add(first, CASES[0], "naive", {"status": "ok", "passes": {}})
    run.add(first, CASES[0], "math", {"status": "timeout", "reason": "slow"})

    again = Ledger(path)
    assert again.results == first.results
    record = again.results.runs[first.run_id]
    assert record["device"] == "a machine"
    assert record["passes"] == ["fwd"]
    assert record["protocol"] == {**dataclasses.asdict(settings.protocol), "rounds": 3}
    assert list(again.results.planned) == keys
    assert {row["run"] for row in again.results.rows.values()} == {first.run_id}
    assert again.finished == {keys[0]}


def test_cheap_cases_come_first_and_once():
    cases = run.cheap_first([*CASES[2:], *CASES])
    assert [case.seqlen for case in cases] == [64, 64, 128, 128, 256, 256]
    assert len(set(cases)) == len(CASES)
