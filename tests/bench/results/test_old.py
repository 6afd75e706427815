"""Results of before are read as if they were written today: by the report, the chart and the comparison."""

import json
from pathlib import Path

import pytest

from magi_bench.cli import main
from magi_bench.report import tables
from magi_bench.results import rows

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
KINDS = ("step", "mods", "ranks", "doors", "trees")


def files():
    """Those of the commands that wrote JSON."""
    for path in sorted(RESULTS.glob("*.json")):
        command = str(json.loads(path.read_text()).get("context", {}).get("command", "")).split()
        if command[:1] == ["magi-bench"]:
            yield path


@pytest.mark.skipif(not RESULTS.exists(), reason="needs a checkout")
def test_every_file_is_read():
    found = list(files())
    assert {path.stem.split("_")[0] for path in found} == set(KINDS)
    for path in found:
        flat = json.loads(path.read_text())["rows"]
        results = rows.load([path])
        timed = sum(
            len(row["ms"]) if isinstance(row.get("ms"), dict) else "ms" in row for row in flat
        )
        assert len(results.ok_rows()) == timed
        assert results.not_run == []
        assert tables.sections(results)


@pytest.mark.skipif(not RESULTS.exists(), reason="needs a checkout")
def test_they_are_reported_drawn_and_compared(tmp_path, capsys):
    path = str(next(path for path in files() if path.stem.startswith("ranks_8k")))
    assert main(["report", path, "--output", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r.md").read_text()
    assert text.startswith("# Attention across ranks, NVIDIA H")
    assert "| causal | 8K |" in text
    assert (tmp_path / "r.html").read_text().count("<table") >= 2
    asked = ["--seqlen", "8K", "--masks", "causal", "--contenders", "magi", "ulysses-magi"]
    assert main(["chart", path, *asked, "--output", str(tmp_path / "c.svg")]) == 0
    assert "Forward and backward" in (tmp_path / "c.svg").read_text()
    assert main(["compare", path, path]) == 0
    assert "0 slower" in capsys.readouterr().out


def test_rows_of_before_have_todays_contender(tmp_path):
    """The kernel of Hopper was called `cuda`."""
    path = tmp_path / "r.jsonl"
    run = {"kind": "run", "run": "r", "planned": ["kernel/causal/magi-cuda", "kernel/causal/fa4"]}
    row = {"key": "kernel/causal/magi-cuda", "contender": "magi-cuda", "status": "ok"}
    path.write_text("\n".join(map(json.dumps, (run, {"kind": "row", **row}))))
    results = rows.load([path])
    assert results.rows["kernel/causal/magi-hopper"]["contender"] == "magi-hopper"
    assert results.not_run == ["kernel/causal/fa4"]


@pytest.mark.parametrize("text", ['{\n "context": {}, "rows": []}', '{\n "rows": 1}'])
def test_other_json_is_no_result(text, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="`x` is not a result of magi-bench"):
        rows.load([path])
