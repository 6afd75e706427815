"""Trees against each other on a CPU: a copy of this one, and one that computes something else."""

import shutil
from pathlib import Path

import pytest
import torch

from magi_bench.cli import main
from magi_bench.report.tables import ratios_by_contender
from magi_bench.results import rows as files
from magi_bench.trees.suite import TOLERANCE, furthest
from magi_bench.trees.worker import fingerprint

ROOT = Path(__file__).parents[3]
QUICK = ["trees", "--device", "cpu", "--quick"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """This tree once more, with attention that can be told from it."""
    tree = tmp_path_factory.mktemp("tree")
    skipped = shutil.ignore_patterns("__pycache__", "length_tables")
    shutil.copytree(ROOT / "magi_compile", tree / "magi_compile", ignore=skipped)
    return tree


def test_the_same_twice(copy, tmp_path, capsys):
    out = tmp_path / "same"
    trees = ["--tree", f"this={ROOT}", "--tree", f"copy={copy}"]
    assert main([*QUICK, *trees, "--out", str(out)]) == 0
    assert "causal 128 bwd: this " in capsys.readouterr().out
    found = files.load([out.with_suffix(".jsonl")])
    assert [(row["contender"], *row["passes"]) for row in found.rows.values()] == [
        (name, which) for which in ("fwd", "bwd") for name in ("this", "copy")
    ]
    (run,) = found.runs.values()
    assert "--tree this=... --tree copy=..." in run["command"]
    assert str(tmp_path) not in out.with_suffix(".jsonl").read_text()
    assert "| causal | 128 | copy |" in out.with_suffix(".md").read_text()


def test_other_results_are_no_number(copy, capsys):
    kernel = copy / "magi_compile" / "kernels" / "cpu" / "kernel.py"
    text = kernel.read_text()
    kernel.write_text(
        text + "\n_forward_flash_of_this = CpuKernel.forward\n\n\ndef _twice(self, *a, **k):\n"
        "    found = _forward_flash_of_this(self, *a, **k)\n    return found._replace(out=2 * found.out)\n\n\n"
        "CpuKernel.forward = _twice\n"
    )
    trees = ["--tree", f"this={ROOT}", "--tree", f"other={copy}", "--passes", "fwd"]
    assert main([*QUICK, *trees]) == 1
    assert "not what the first tree gives: fingerprint 0" in capsys.readouterr().out


def test_fingerprints():
    """One row of one head that is another, and numbers rounded in another way."""
    x = torch.randn(600, 4, 16, generator=torch.Generator().manual_seed(0))
    x[:3] = 0.0
    one = fingerprint(x)
    assert furthest(one, fingerprint(x.bfloat16())) < TOLERANCE / 3
    for row, head in ((300, 2), (599, 0)):
        wrong = x.clone()
        wrong[row, head] *= -1
        assert furthest(one, fingerprint(wrong)) > TOLERANCE
        wrong[row, head] = torch.nan
        assert not furthest(one, fingerprint(wrong)) <= TOLERANCE
    assert furthest(one, fingerprint(1.05 * x)) > TOLERANCE


def test_means_are_geometric():
    rows = {
        x: {"contender": "b", "is_ours": False, "status": "ok", "passes": {"fwd": {"ratio": x}}}
        for x in (0.5, 2.0)
    } | {0: {"status": "crash"}}
    means = ratios_by_contender(files.Results(rows=rows))
    assert means == {"b": (pytest.approx(1.0), 0.5, 2.0)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tree", f"a={ROOT}"],
            "`--tree` must be given twice or more, under different names, got a",
        ),
        (["--tree", "a"], "must be NAME=PATH, got 'a'"),
        (
            ["--tree", f"a={ROOT}", "--tree", "b=/nowhere"],
            "`--tree b` must be a folder that holds magi_compile, got /nowhere",
        ),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*QUICK, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
