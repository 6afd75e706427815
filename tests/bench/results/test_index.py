"""The index of the results names what is there."""

from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.skipif(not RESULTS.exists(), reason="needs a checkout")
def test_every_result_has_one_row():
    index = (RESULTS / "README.md").read_text()
    names = {path.stem for path in RESULTS.iterdir() if path.name != "README.md"}
    assert {name: index.count(f"[{name}]") for name in names} == dict.fromkeys(names, 1)
