"""The index of the results names what is there."""

from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


DOCUMENTS = [*RESULTS.parents[1].glob("*.md"), *(RESULTS.parents[1] / "docs").rglob("*.md")]


@pytest.mark.skipif(not RESULTS.exists(), reason="needs a checkout")
def test_every_result_is_named_by_a_document():
    """A result that no document needs goes; git keeps it. Pages are made from rows, and not kept."""
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    files = [path for path in RESULTS.iterdir() if path.name != "README.md"]
    assert [path.name for path in files if path.stem not in text] == []
    assert {path.suffix for path in files} <= {".md", ".json", ".jsonl"}


@pytest.mark.skipif(not RESULTS.exists(), reason="needs a checkout")
def test_every_result_has_one_row():
    index = (RESULTS / "README.md").read_text()
    names = {path.stem for path in RESULTS.iterdir() if path.name != "README.md"}
    assert {name: index.count(f"[{name}]") for name in names} == dict.fromkeys(names, 1)
