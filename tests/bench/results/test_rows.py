"""Every result file of the repository is read by the report, the chart and the comparison."""

import json
from pathlib import Path

import pytest

from magi_bench.cli import main
from magi_bench.report.pages import to_markdown
from magi_bench.results import rows

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_reported(path):
    results = rows.load([path])
    written = [json.loads(line) for line in path.read_text().splitlines()]
    keys = {record["key"] for record in written if record["kind"] == "row"}
    assert results.rows.keys() == keys
    assert results.ok_rows()
    text = to_markdown(results)
    for row in results.rows.values():
        assert row["label"] in text or row["status"] != "ok"


@pytest.mark.skipif(not FILES, reason="needs a checkout")
def test_they_are_reported_drawn_and_compared(tmp_path, capsys):
    path = str(RESULTS / "ranks_8k_h100x2_2026-11-26.jsonl")
    assert main(["report", path, "--output", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r.md").read_text()
    assert text.startswith("# Attention across ranks, NVIDIA H")
    assert "| causal | 8K |" in text
    assert (tmp_path / "r.html").read_text().count("<table") >= 2
    asked = ["--seqlen", "8K", "--masks", "causal", "--contenders", "magi", "ulysses"]
    assert main(["chart", path, *asked, "--output", str(tmp_path / "c.svg")]) == 0
    assert "Forward and backward" in (tmp_path / "c.svg").read_text()
    assert main(["compare", path, path]) == 0
    assert "0 slower" in capsys.readouterr().out


def test_other_json_is_no_result(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"rows": 1}')
    with pytest.raises(ValueError, match=r"x\.jsonl` line 1 is not a result of magi-bench"):
        rows.load([path])
