"""Order, isolation, limits and resumption, with workers that only pretend; one with a real one."""

import json
from typing import ClassVar

import pytest

from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Protocol
from magi_bench.kernel import command
from magi_bench.kernel.command import order
from magi_bench.process import Process, WorkerLost
from magi_bench.results import rows
from magi_bench.results.compare import compare, to_text
from magi_bench.workloads.workload import build, cost

CASES = [
    Case("kernel", mask, seqlen, 4, 2, 16, "float32")
    for seqlen in (64, 128, 256)
    for mask in ("full", "causal")
]
TIMES = {"ms": 2.0, "p20_ms": 1.9, "p80_ms": 2.1, "reps": 3, "tflops": 1.0}
OK = {"status": "ok", "passes": {"fwd": TIMES}, "gate": {"errors": {}, "allowed": {}}}


def execute(cases, names, settings, path, say):
    return command.Run(cases, names, settings, ["magi-bench"], path, say).execute()


def test_order():
    tasks = order([*CASES[2:], *CASES], ["flex", "naive", "magi-cpu"])
    assert [task.names for task in tasks[:4]] == [("naive",), ("magi-cpu",)] * 2
    cases = [task.case for task in tasks[:12:2]]
    assert [case.seqlen for case in cases] == [64, 64, 128, 128, 256, 256]
    assert [case.mask for case in cases[:2]] == ["causal", "full"]
    assert {task.names for task in tasks[12:]} == {("flex",)}
    together = order(CASES, ["flex", "naive"], together=True)
    assert {task.names for task in together} == {("flex", "naive")}
    assert [task.case for task in together] == cases


def test_a_sparse_cell_costs_what_its_density_says():
    sparse = Case("sparse", "uniform_blocks", 256, 4, 2, 16, block=64, density=0.5)
    assert cost(sparse) == build(sparse).pairs * 16


class FakeWorker:
    """Answers at once; what it does about a case is looked up by contender."""

    behaviour: ClassVar[dict[str, object]] = {}

    def __init__(self, names, settings):
        self.names = names

    def ask(self, request, limit_s):
        found = {name: self.behaviour.get(name) for name in self.names}
        if request["op"] == "probe":
            reasons = {name: x for name, x in found.items() if isinstance(x, str)}
            return {"reasons": reasons, "versions": {}}
        if request["op"] == "describe":
            return {"device": "fake", "command": "magi-bench"}
        for lost in found.values():
            if isinstance(lost, WorkerLost):
                raise lost
        return dict.fromkeys(self.names, OK)

    def stop(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(command, "worker_of", FakeWorker)
    monkeypatch.setattr(FakeWorker, "behaviour", {})
    return FakeWorker


def test_every_outcome_is_a_row(fake, tmp_path):
    fake.behaviour |= {"math": "no such thing", "naive": WorkerLost("crash", "SIGSEGV: bad")}
    said = []
    path = tmp_path / "r.jsonl"
    results = execute(CASES, ["magi-cpu", "math", "naive"], Settings("cpu"), path, said.append)
    statuses = {(r["contender"], r["status"]) for r in results.rows.values()}
    assert statuses == {("magi-cpu", "ok"), ("math", "unavailable"), ("naive", "crash")}
    assert len(results.rows) == 18
    assert "math is unavailable: no such thing" in said
    assert any("naive: crash: SIGSEGV: bad" in line for line in said)


def test_interleaved_contenders_share_a_process(fake, tmp_path):
    fake.behaviour |= {"math": "no such thing"}
    settings, names = Settings("cpu", protocol=Protocol(rounds=3)), ["magi-cpu", "naive", "math"]
    results = execute(CASES[:2], names, settings, tmp_path / "a.jsonl", print)
    statuses = [row["status"] for row in results.rows.values()]
    assert sorted(statuses) == ["ok"] * 4 + ["unavailable"] * 2
    (record,) = results.runs.values()
    assert record["protocol"]["rounds"] == 3
    fake.behaviour["naive"] = WorkerLost("crash", "SIGSEGV: bad")
    results = execute(CASES[:2], names, settings, tmp_path / "b.jsonl", print)
    assert {row["status"] for row in results.rows.values()} == {"crash", "unavailable"}


@pytest.mark.parametrize("status", rows.STATUSES)
def test_resume_repeats_what_failed_only(status):
    results = rows.Results(rows={"key": {"status": status}})
    assert (results.finished == set()) == (status in ("wrong", "error", "crash", "timeout"))


def test_resume_goes_on(fake, tmp_path):
    path = tmp_path / "r.jsonl"
    fake.behaviour["naive"] = WorkerLost("timeout", "slow")
    execute(CASES[:1], ["magi-cpu", "naive"], Settings("cpu"), path, print)
    fake.behaviour.clear()
    results = execute(CASES[:1], ["magi-cpu", "naive"], Settings("cpu"), path, print)
    assert {row["status"] for row in results.rows.values()} == {"ok"}
    assert len(path.read_text().splitlines()) == 5  # 2 runs, 2 rows, then 1
    said = []
    execute(CASES[:1], ["magi-cpu", "naive"], Settings("cpu"), path, said.append)
    assert said == ["nothing left to run"]


def test_time_limit(fake, tmp_path):
    said = []
    settings = Settings("cpu", seconds=0.0)
    results = execute(CASES, ["magi-cpu"], settings, tmp_path / "r.jsonl", said.append)
    assert not results.rows
    assert len(results.not_run) == 6
    assert said[-1] == "time limit: 6 of 6 not run; --resume continues"


def worker_of(program: str) -> Process:
    return Process(["-c", program])


def test_a_crash_is_told_and_the_worker_starts_again():
    worker = worker_of("import os, sys; print('last words', file=sys.stderr); os.abort()")
    for _ in range(2):
        with pytest.raises(WorkerLost, match="SIGABRT: last words") as caught:
            worker.ask({"op": "probe"}, 60)
        assert caught.value.status == "crash"


def test_an_exit_is_told():
    worker = worker_of("raise SystemExit(3)")
    with pytest.raises(WorkerLost, match="exit code 3: no output"):
        worker.ask({"op": "probe"}, 60)


def test_a_hang_is_stopped():
    worker = worker_of("import time; time.sleep(600)")
    with pytest.raises(WorkerLost, match="time limit") as caught:
        worker.ask({"op": "probe"}, 0.2)
    assert caught.value.status == "timeout"
    assert worker._running is None


ECHO = """
import json, os, sys
for line in sys.stdin:
    answer = json.loads(line) | {"pid": os.getpid()}
    print(json.dumps({"answer": answer, "spent": answer["spent"]}), flush=True)
"""


def test_long_answers_arrive_whole():
    worker = worker_of(ECHO)
    request = {"text": "x" * 300_000, "spent": False}
    assert worker.ask(request, 60)["text"] == request["text"]
    worker.stop()


def test_a_spent_worker_is_replaced():
    worker = worker_of(ECHO)
    pids = [worker.ask({"spent": spent}, 60)["pid"] for spent in (False, True, False)]
    worker.stop()
    assert pids[0] == pids[1] != pids[2]


def make_results(ms: float, status: str = "ok", spread: float = 0.05) -> rows.Results:
    times = {"ms": ms, "p20_ms": ms * (1 - spread), "p80_ms": ms * (1 + spread), "tflops": 1 / ms}
    row = {"key": "a/b", "status": status, "passes": {"fwd": times}, "run": "1", "contender": "b"}
    return rows.Results(rows={"a/b": row})


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (make_results(1.0), "same"),
        (make_results(0.8), "faster"),
        (make_results(1.3), "slower"),
        (make_results(1.3, spread=0.5), "same"),
        (make_results(1.0, status="wrong"), "lost"),
    ],
)
def test_verdicts(after, verdict):
    (found,) = compare(make_results(1.0), after)
    assert found.verdict == verdict
    assert f"1 {verdict}" in to_text([found])


def test_nothing_to_compare():
    with pytest.raises(ValueError, match="no measured row in common"):
        compare(make_results(1.0), rows.Results())
    with pytest.raises(ValueError, match="`threshold` must not be negative, got -1"):
        compare(make_results(1.0), make_results(1.0), -1)


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    rows.append(path, "row", {"key": "a/b", "status": "ok"})
    with open(path, "a") as file:
        file.write(json.dumps({"key": 1})[:5])
    with pytest.raises(ValueError, match=r"r\.jsonl` line 2 is not a result of magi-bench"):
        rows.load([path])
