"""The commands, from arguments to files."""

import re
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from magi_bench.cases import Case
from magi_bench.cli import main
from magi_bench.report import tables
from magi_bench.report.pages import BEGIN, END, write_report
from magi_bench.report.tables import groups
from magi_bench.results import rows

ONE_CASE = ["kernel", "--device", "cpu", "--seqlens", "256", "--masks", "document_causal"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One case by our CPU kernel and plain PyTorch, measured in their own processes."""
    path = tmp_path_factory.mktemp("bench") / "results.jsonl"
    run = [*ONE_CASE, "--contenders", "magi-cpu", "naive", "--budget-ms", "2"]
    assert main([*run, "--jobs", "2", "--output", str(path)]) == 0
    return path


def test_results_say_where_they_come_from(results):
    loaded = rows.load([results])
    assert [row["status"] for row in loaded.rows.values()] == ["ok", "ok"]
    assert loaded.not_run == []
    (run,) = loaded.runs.values()
    assert run["command"].startswith("magi-bench kernel --device cpu")
    assert {"torch", "python", "commit", "date", "matmul_tflops", "protocol"} <= set(run)


def test_interleaved_contenders_are_rows_like_others(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    run = [*ONE_CASE, "--interleaved", "3", "--passes", "fwd", "bwd", "--output", str(path)]
    names = ["magi-cpu", "naive", "magi-hopper"]
    assert main([*run, "--contenders", *names]) == 0
    loaded = rows.load([path])
    statuses = {row["contender"]: row["status"] for row in loaded.rows.values()}
    assert statuses.pop("magi-hopper") in ("unsupported", "unavailable")
    assert statuses == {"magi-cpu": "ok", "naive": "ok"}
    for row in loaded.ok_rows():
        assert set(row["passes"]) == {"fwd", "bwd"}
        assert all(x["reps"] == 3 and x["tflops"] > 0 for x in row["passes"].values())
    out = tables.facts(loaded)
    assert any("3 rounds, contenders interleaved" in str(line) for line in out)
    assert main([*run, "--contenders", *names, "--resume"]) == 0
    assert len(rows.load([path]).rows) == 3


def test_a_row_of_ours_that_failed_is_exit_code_1(tmp_path, capsys):
    """A worker that is stopped at once costs a row each."""
    run = [*ONE_CASE, "--passes", "fwd", "--contenders", "magi-cpu", "--cell-limit", "0.001"]
    assert main([*run, "--output", str(tmp_path / "results.jsonl")]) == 1
    assert "0 measured, 1 failed, 0 not run" in capsys.readouterr().out


def test_an_old_file_is_not_overwritten(results, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*ONE_CASE, "--output", str(results)])
    assert caught.value.code == 2
    assert "exists: add --resume" in capsys.readouterr().err


def test_resume_has_nothing_left(results, capsys):
    run = [*ONE_CASE, "--contenders", "magi-cpu", "naive", "--resume"]
    assert main([*run, "--output", str(results)]) == 0
    assert "nothing left to run" in capsys.readouterr().out


def test_report(results, tmp_path, capsys):
    output = tmp_path / "report"
    words = ["--title", "A & B", "--note", "on <one> machine"]
    assert main(["report", str(results), "--output", str(output), *words]) == 0
    page, text = (output.with_suffix(suffix).read_text() for suffix in (".html", ".md"))
    assert "<h1>A &amp; B</h1>" in page
    assert page.count("<svg") == 1
    assert not re.search(r"<script|https?://|@import|<link", page)
    assert "| document causal | 256 |" in text
    assert "magi_compile (CPU)" in text
    assert text.startswith("# A & B\n\non <one> machine\n")
    assert "<p>on &lt;one&gt; machine</p>" in page
    for report in (page, text):
        assert "calls within about 2 ms" in report
        assert "magi-bench kernel --device cpu" in report


def test_report_of_several_runs():
    """What they have in common is said once; of matmuls the best."""
    case = Case("kernel", "causal", 1024, 64, 8, 128)
    runs = {
        name: {
            "run": name,
            "date": f"2026-01-0{day}",
            "device": "d",
            "driver": "5",
            "versions": {"p": version},
            "protocol": {"min_reps": 3, "max_reps": 5, "budget_ms": 2.0},
            "matmul_tflops": matmul,
        }
        for name, day, version, matmul in (("b", 2, "1", 700.0), ("a", 1, "2", 800.0))
    }
    runs["unused"] = {"run": "unused", "device": "other"}
    row = {"case": asdict(case), "contender": "naive", "label": "n", "is_ours": False}
    row["status"] = "ok"
    results = rows.Results(runs, {name: row | {"run": name} for name in "ba"})
    facts = dict(tables.facts(results))
    assert facts["device"] == "d"
    assert facts["software"] == "driver 5, p 1 or 2"
    assert facts["timing"] == "median of 3 to 5 calls within about 2 ms"
    assert facts["large matmul"] == "800 TFLOP/s"
    _, header, lines, _ = tables.run_table(results)
    assert [line[header.index("matmul, TFLOP/s")] for line in lines] == ["800", "700"]
    assert [line[header.index("measured")] for line in lines] == ["1", "1"]


def test_report_of_some_contenders(results, tmp_path):
    output = tmp_path / "report"
    main(["report", str(results), "--contenders", "naive", "--output", str(output)])
    text = output.with_suffix(".md").read_text()
    assert "naive PyTorch" in text
    assert "magi_compile (CPU)" not in text


def test_readme_table(results, tmp_path):
    readme = tmp_path / "README.md"
    command = ["report", str(results), "--output", str(tmp_path / "r"), "--readme", str(readme)]
    readme.write_text("no marks")
    with pytest.raises(SystemExit):
        main(command)
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main(command) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| mask | tokens | forward, magi_compile (CPU) |" in text


def test_wrong_results_are_never_drawn(results, tmp_path):
    loaded = rows.load([results])
    row = loaded.rows[next(key for key in loaded.rows if key.endswith("naive"))]
    row["passes"]["fwd"]["tflops"] = 98765.0  # what no other contender reaches
    _, page = write_report(loaded, tmp_path / "right", "right")
    drawn = ">98765<"
    assert drawn in page.read_text()
    del row["passes"]
    row |= {"status": "wrong", "reason": "dq: relative error 1"}
    _, page = write_report(loaded, tmp_path / "wrong", "wrong")
    text = page.read_text()
    assert drawn not in text
    assert "dq: relative error 1" in text


def test_presets_in_one_file_are_reported_apart(tmp_path):
    path = tmp_path / "r.jsonl"
    rows.append(path, "run", {"run": "1", "device": "d", "planned": []})
    for lengths in ("seeds", "longca", "blocks"):
        case = Case("kernel", "block_causal_document", 1024, 64, 8, 128, lengths=lengths)
        row = {"run": "1", "key": case.key, "contender": "naive", "status": "ok"}
        row |= {"label": "naive PyTorch", "is_ours": False, "case": asdict(case)}
        rows.append(path, "row", row)
    found = groups(rows.load([path]))
    assert [(group.documents, len(group.rows)) for group in found] == [("seeds", 1), ("longca", 2)]
    assert found[1].title.startswith("Kernels, longca, heads 64:8")


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="at least one measured row"):
        write_report(rows.Results(), tmp_path / "r", "t")


def test_compare(results, capsys):
    assert main(["compare", str(results), str(results), "--fail-on-regression"]) == 0
    assert "6 same" in capsys.readouterr().out


def test_dry_run(capsys):
    assert main([*ONE_CASE, "--dry-run", "--contenders", "magi-cpu", "fa4", "fa2"]) == 0
    printed = capsys.readouterr().out
    assert "fa4 is unavailable: " in printed
    assert "not fa2: runs on cuda, not on cpu" in printed
    assert "document causal 256 2:1 d64 float32" in printed
    assert printed.endswith("1 measurements of 1 cases on cpu\n")


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["kernel", "--preset", "seeds", "--seqlens", "1K"], 6),
        (["kernel", "--preset", "longca", "--seqlens", "1K", "--masks", "full"], 2),
        (["kernel", "--preset", "seeds", "longca", "--seqlens", "2K", "16K", "--masks", "full"], 4),
        (["kernel", "--preset", "longca", "--seqlens", "16K", "3K", "--masks", "full"], 4),
        (["kernel", "--preset", "seeds", "--heads", "64:8", "48:8", "--masks", "full"], 16),
        (["sparse", "--blocks", "64", "--densities", "0.5", "--seed", "7"], 3),
        (["kernel", "--heads", "8:8", "--head-dim", "32", "--dtype", "float32"], 12),
        (["kernel", "--heads", "8:8", "--head-dim", "32:16", "--dtype", "float32"], 12),
    ],
)
def test_presets_and_filters(arguments, count, capsys):
    assert main([*arguments, "--device", "cpu", "--dry-run", "--contenders", "naive"]) == 0
    assert f"of {count} cases on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernel", "--heads", "8"], "heads must look like 64:8, got '8'"),
        (["kernel", "--heads", "8:3"], "heads must be Q:KV with Q a multiple of KV"),
        (["kernel", "--masks", "x"], "invalid choice: 'x'"),
        (["sparse", "--preset", "seeds"], "no sparse case of seeds matches the options"),
        (
            ["sparse", "--preset", "longca", "--densities", "0.2", "0.3"],
            "`--densities` 0.3 is in no sparse case of longca",
        ),
        (["report", "no-such-file"], "No such file"),
        (["report", "."], "Is a directory"),
        (["kernel", "--seqlens", "0"], "a number of tokens such as 8192, 8K or 1M, got '0'"),
        (["kernel", "--head-dim", "0"], "--head-dim: must be a positive integer, got '0'"),
        (["kernel", "--head-dim", "64:"], "--head-dim: must be a positive integer, got ''"),
        (["kernel", "--min-reps", "-1"], "--min-reps: must be a positive integer, got '-1'"),
        (["kernel", "--jobs", "0"], "--jobs: must be a positive integer, got '0'"),
        (["kernel", "--cell-limit", "0"], "--cell-limit: must be a positive number, got '0'"),
        (["kernel", "--budget-ms", "x"], "--budget-ms: must be a positive number, got 'x'"),
        (
            ["sparse", "--densities", "1.5"],
            "--densities: must be a share of at most 1, above 0, got '1.5'",
        ),
        (["sparse", "--blocks", "0"], "--blocks: must be a positive integer, got '0'"),
        (["masks", "--show", "uniform_blocks", "--block", "0"], "must be a positive integer"),
        (["masks", "--show", "no_such_mask"], "`mask` must be one of "),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_masks(tmp_path, capsys):
    assert main(["masks"]) == 0
    assert "causal_blockwise" in capsys.readouterr().out
    assert main(["masks", "--show", "uniform_blocks", "--seqlen", "1K"]) == 0
    assert "density" in capsys.readouterr().out
    picture = tmp_path / "mask.svg"
    main(["masks", "--show", "causal", "--seqlen", "64", "--output", str(picture)])
    assert "<svg" in picture.read_text()


CHART = ["--seqlen", "256", "--masks", "document_causal", "--contenders", "magi-cpu", "naive"]


def test_chart(results, tmp_path):
    picture = tmp_path / "speed.svg"
    assert main(["chart", str(results), *CHART, "--output", str(picture)]) == 0
    root = ElementTree.fromstring(picture.read_text())
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    speeds = {
        row["contender"]: [row["passes"][which]["tflops"] for which in ("fwd", "bwd")]
        for row in rows.load([results]).rows.values()
    }
    for value in (x for found in speeds.values() for x in found):
        assert tables.number(value if "TFLOP/s, more" in str(texts) else 1e3 * value) in texts
    bars = [node for node in root.iter("{http://www.w3.org/2000/svg}rect") if node.get("x")]
    assert len(bars) == 2 + 4  # in the legend, and in the two panels
    heights = [float(bar.get("height")) for bar in bars[2:]]
    slow, fast = sorted(speeds, key=lambda name: speeds[name][0])
    forward = dict(zip(("magi-cpu", "naive"), heights[:2], strict=True))
    assert forward[slow] / forward[fast] == pytest.approx(speeds[slow][0] / speeds[fast][0], 0.05)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--seqlen", "512"], "`masks` names 'document causal', which has no number at 512"),
        (["--contenders", *(["naive"] * 5)], "`contenders` must be at most 4, got 5"),
    ],
)
def test_chart_of_what_is_not_there(results, tmp_path, capsys, changed, message):
    with pytest.raises(SystemExit):
        main(["chart", str(results), *CHART, *changed, "--output", str(tmp_path / "x.svg")])
    assert message in capsys.readouterr().err
