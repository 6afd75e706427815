"""Planning leaves PyTorch's threads as they were, and takes one."""

import pytest
import torch

from magi_compile.dtensor.planning import rank_plan
from magi_compile.dtensor.planning.one_thread import one_thread
from magi_compile.masks.slices import AttnSlices


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_threads_come_back_after_an_exception(threads):
    seen = []

    @one_thread()
    def fails():
        seen.append(torch.get_num_threads())
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [1]
    assert torch.get_num_threads() == threads


def test_a_plan_is_made_on_one_thread(threads, monkeypatch):
    seen = []
    real = rank_plan._plan
    monkeypatch.setattr(
        rank_plan, "_plan", lambda *args: seen.append(torch.get_num_threads()) or real(*args)
    )
    rank_plan.plan_rank(AttnSlices.causal(1024 + 128), 2, 0)
    assert seen == [1]
    assert torch.get_num_threads() == threads
