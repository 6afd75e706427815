"""A share of the sweep; all of it is a command, see `sweep.py`."""

import pytest

from tests.lowering.sweep import HEAD_DIMS, SOFTCAPS, check, chosen


@pytest.mark.parametrize("case", chosen(8, seed=1), ids=str)
def test_on_a_cpu(case):
    assert check(case._replace(lengths="short", batch=1), "cpu") == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("case", chosen(3 * len(HEAD_DIMS) * len(SOFTCAPS), seed=2), ids=str)
def test_on_a_gpu(case):
    check(case, "cuda")
