"""`magi-bench plans`: conversions and plans have times, and one that is wrong has none."""

import pytest

from magi_bench import plans
from magi_bench.arguments import Settings
from magi_bench.cli import main
from magi_bench.clock import Rounds
from tests.bench.flat import rows_of

SMALL = Settings(
    "cpu", "float32", (512,), masks=("document_causal", "causal"), rounds=Rounds(1, 0.1)
)


def test_every_case_has_a_time_or_a_reason():
    rows = rows_of(plans.Plans(SMALL))
    status = {row["contender"]: row["status"] for row in rows if row["mask"] == "causal"}
    assert status == {
        **dict.fromkeys(("slices", "padded-slices", "tiles", "padded-tiles"), "ok"),
        **dict.fromkeys(("rank", "rank-of-mask-mod"), "ok"),
        **dict.fromkeys(("graph-tiles", "launch-tiles"), "unavailable"),
    }
    assert all(row["bytes"] > 0 for row in rows if "tiles" in row["contender"] and "ms" in row)


def test_a_wrong_conversion_is_caught(monkeypatch):
    other = plans.masks.AttnSlices.full(512)
    wrong = plans.Conversion("slices", "slices", lambda workload, device: other)
    monkeypatch.setattr(plans.Plans, "everyone", (wrong,))
    assert [row["status"] for row in rows_of(plans.Plans(SMALL))] == ["wrong"] * 2


@pytest.mark.parametrize("argument", ["--contenders", "--masks"])
def test_bad_arguments(argument, capsys):
    with pytest.raises(SystemExit):
        main(["plans", argument, "x"])
    assert "invalid choice" in capsys.readouterr().err
