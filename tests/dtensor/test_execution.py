"""Plans as the op finds them: their stages, and which of these are one call."""

import gc
import weakref
from collections import OrderedDict
from dataclasses import replace
from threading import Thread, current_thread

import pytest
import torch

from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.call import execution
from magi_compile.dtensor.call.execution import unpack
from magi_compile.dtensor.planning import rank_plan
from magi_compile.dtensor.planning.cost import DEFAULT_COST
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.masks import documents

OPTIONS = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=1)


def test_the_plan_has_local_and_remote_keys():
    slices = documents([700, 1, 90, 1257], causal=True)
    merged = plan_rank(slices, 2, 0, OPTIONS)
    waiting = plan_rank(slices, 2, 0, replace(OPTIONS, early=False))
    local, remote = merged.forward
    assert local.transfer is None
    assert remote.transfer.recv_counts[0] == 0  # no row of its own
    assert len(waiting.forward) == 1
    assert merged.forward_is_early
    assert not waiting.forward_is_early
    assert local.slices.area() + remote.slices.area() == waiting.forward[0].slices.area()
    stage = unpack(*merged.tensors("cpu")).merged.side_by_side
    assert stage.slices.area() == waiting.forward[0].slices.area()
    assert unpack(*waiting.tensors("cpu")).merged is None
    blind = replace(OPTIONS, cost=replace(DEFAULT_COST, starts_early=False))
    assert not plan_rank(slices, 2, 0, blind).forward_is_early


def test_ranks_without_remote_keys_do_not_merge():
    slices = AttnSlices.from_cu_seqlens([0, 512, 1024], causal=True)
    options = replace(OPTIONS, strategy="sequential", chunk_size=512)
    for rank in range(2):
        plan = unpack(*plan_rank(slices, 2, rank, options).tensors("cpu"))
        assert plan.merged is None
        assert len(plan.forward) == 1


def calls_and_forgets(group, scored):
    """The number of calls that a plan keeps, and True if it goes at once when nobody keeps it: its tensors may be
    large, and Python may look for cycles late or never."""
    table = torch.ones(128, requires_grad=True)
    score_mod = (lambda score, b, h, q, kv: score + table[q] * table[kv]) if scored else None
    tensors = plan_rank(AttnSlices.causal(128), 1, 0).tensors("cpu")
    q, k, v = (torch.ones(128, 2, 16, requires_grad=True) for _ in range(3))
    gc.collect()
    gc.disable()
    try:
        out = context_parallel_attention(q, k, v, tensors, group, score_mod=score_mod).out
        out.sum().backward()
        plan = weakref.ref(unpack(*tensors))
        calls = len(plan().calls)
        execution._device_plans.clear()
        return calls, plan() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("scored", [False, True])
def test_a_plan_that_is_no_longer_kept_goes_at_once(ranks_of, scored):
    assert ranks_of(1).run(calls_and_forgets, scored) == [(2, True)]


def test_plans_of_several_threads(monkeypatch):
    """None goes while another thread asks for it."""
    here = current_thread()
    first, other = (plan_rank(AttnSlices.causal(n), 1, 0).tensors("cpu") for n in (128, 256))
    thread = Thread(target=lambda: unpack(*other))

    class Kept(OrderedDict):
        def get(self, key):
            found = super().get(key)
            if current_thread() is here and found is not None:
                thread.start()
                thread.join(0.2)
            return found

    monkeypatch.setattr(execution._device_plans, "plans", Kept())
    monkeypatch.setattr(rank_plan, "CACHE_SIZE", 1)
    plan = unpack(*first)
    assert unpack(*first) is plan
    thread.join()
    assert [x.rows for x in execution._device_plans.plans.values()] == [256]
