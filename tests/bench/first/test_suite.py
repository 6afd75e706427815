"""Processes of `magi-bench first` have empty caches of their own, and take turns."""

import os

import pytest

from magi_bench.cli import main
from magi_bench.first import suite
from magi_bench.process import WorkerLost
from magi_bench.results import rows


@pytest.fixture
def asked(monkeypatch):
    """What was asked, and where its caches were: in place of a process."""
    requests = []

    class Fake:
        def __init__(self, arguments, environment):
            self.places = [environment[name] for name in suite.CACHES]

        def ask(self, request, limit_s):
            assert not any(os.path.exists(place) for place in self.places)
            requests.append((request["contender"], request["case"], self.places))
            if request["case"] == "alibi":
                raise WorkerLost("crash", "SIGSEGV: no output")
            return {"forward": float(len(requests)), "backward": 1.0}

        def stop(self):
            pass

    monkeypatch.setattr(suite, "Process", Fake)
    return requests


def test_rows(asked, tmp_path, capsys):
    out = tmp_path / "first"
    command = ["first", "--device", "cpu", "--cases", "causal", "--runs", "3", "--out", str(out)]
    assert main(command) == 0
    assert [name for name, *_ in asked] == ["magi", "flex", "flex", "magi", "magi", "flex"]
    places = [place for *_, of_one in asked for place in of_one]
    assert len(set(places)) == len(places) == 6 * len(suite.CACHES)
    results = rows.load([out.with_suffix(".jsonl")])
    (record,) = results.runs.values()
    assert record["command"] == "magi-bench first --device cpu --cases causal --runs 3 --out first"
    found = {
        (row["contender"], which): (times["ms"], times["reps"])
        for row in results.ok_rows()
        for which, times in row["passes"].items()
    }
    assert found["magi", "forward"] == (4000.0, 3)
    assert found["flex", "backward"] == (1000.0, 3)
    assert "causal     magi  forward 4.00 s, backward 1.00 s" in capsys.readouterr().out
    assert "| forward | 8K |" in out.with_suffix(".md").read_text()


def test_a_process_that_dies(asked, capsys):
    assert main(["first", "--device", "cpu", "--cases", "alibi", "--runs", "1"]) == 1
    assert "SIGSEGV: no output" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process(capsys):
    command = ["first", "--quick", "--device", "cpu", "--contenders", "magi"]
    assert main(command) == 0
    line = capsys.readouterr().out
    assert all(x in line for x in (" forward ", " backward ", "second forward", "BlockMask"))
