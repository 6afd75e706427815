"""Random mask_mods give what PyTorch gives, random score_mods do or are refused; nothing else."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.programs.random_functions import Skip, check_mask, check_score, programs

EVERY_TIME_THE_SAME = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "report_multiple_bugs": False,
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_nothing_wrong(check, program, *args, **kwargs):
    try:
        failing = [
            f"{v.route}: {v.outcome}: {v.detail}"
            for v in check(program, *args, **kwargs)
            if v.fails or (v.outcome == "refused" and program.kind == "mask")
        ]
    except Skip:
        return
    assert not failing, "\n".join([*failing, str(program)])


@given(programs("mask"))
@settings(max_examples=150, **EVERY_TIME_THE_SAME)
def test_masks(program):
    assert_nothing_wrong(check_mask, program)


@given(programs("mask"))
@settings(max_examples=4, **EVERY_TIME_THE_SAME)
def test_masks_in_a_graph(program):
    assert_nothing_wrong(check_mask, program, ("compiled",), gradients=True)


@given(programs("score"))
@settings(max_examples=150, **EVERY_TIME_THE_SAME)
def test_scores(program):
    assert_nothing_wrong(check_score, program)
