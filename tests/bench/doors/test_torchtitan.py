"""torchtitan's trainer as `magi-bench doors` runs it, on a CPU: ours and FlexAttention have torchtitan's metrics."""

from dataclasses import replace
from pathlib import Path

import pytest

from magi_bench.doors import torchtitan_runs
from magi_bench.doors.torchtitan_runs import Run

pytest.importorskip(
    "torchtitan", reason="needs torchtitan, which .ci/run installs in an environment of its own"
)

ON_A_CPU = (str(Path(__file__).parent / "torchtitan_on_a_cpu.py"),)
SMALL = Run("magi", 1, 256, 1, "short", 0, "debugmodel", 3, log_every=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_are_torchtitans(ranks):
    ours = torchtitan_runs.train(replace(SMALL, ranks=ranks), 600, ON_A_CPU)
    assert ours["status"] == "ok", ours
    times = ours["passes"]["fwdbwd"]
    assert times["tokens_per_s"] > 0
    assert times["ms"] > 0
    assert ours["graphs"] >= 1
    assert ours["breaks"] == 0


@pytest.mark.slow
def test_what_torchtitan_refuses_is_a_reason():
    outcome = torchtitan_runs.train(replace(SMALL, attention="varlen", ranks=2), 600, ON_A_CPU)
    assert outcome["status"] == "unsupported"
    assert outcome["reason"].startswith("NotImplementedError")
