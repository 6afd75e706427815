"""Attention that begins with local keys while the others travel: the plan of it, and over gloo that it is right."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from magi_compile.dtensor.backward import backward
from magi_compile.dtensor.execution import Execution, unpack
from magi_compile.dtensor.forward import forward
from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads
from magi_compile.dtensor.planning.cost import DEFAULT_COST
from magi_compile.dtensor.planning.dispatch import dispatch
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.dtensor.planning.stages import (
    EARLY_BACKWARD_COST,
    TIE,
    backward_begins_early,
    backward_seconds,
    choose_degree,
    early_backward_seconds,
    early_seconds,
    forward_begins_early,
    forward_seconds,
)
from magi_compile.dtensor.tools.documents import document_packs
from magi_compile.dtensor.transport.all_to_all import SMS
from magi_compile.dtensor.transport.collectives import COLLECTIVES, refuse_to_be_recorded
from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.kernels.select import KERNELS, problem_of
from magi_compile.masks.slices import AttnSlices
from magi_compile.testing.cases import Heads
from tests.dtensor.support import early_on_cpus
from tests.dtensor.support.across_ranks import run_on_ranks
from tests.dtensor.support.masks import SQUARE, documents

OPTIONS = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=1)
HEADS = Heads(4, 2, 16, 16)
PROBLEM = AttnProblem("cpu", None, torch.float32, 4, 2, 16, 16, 1.0)
MASKS = ["varlen_causal", "varlen_full", "holes", "shared_prefix", "causal_129x129"]


def run_early(group, case, options, dtype):
    early_on_cpus.free.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "early_cpu", f"{early_on_cpus.__name__}:EarlyCpuKernel")
        run_on_ranks(group, case, options, dtype, kernel="early_cpu")
    return early_on_cpus.free[:]


def run_early_backward(group, case, options, dtype, collective="signalling", may_be_early=True):
    early_on_cpus.steps.clear()
    with pytest.MonkeyPatch.context() as patch:
        module = early_on_cpus.__name__
        patch.setitem(KERNELS, "early_cpu", f"{module}:EarlyCpuKernel")
        patch.setitem(COLLECTIVES, "signalling", f"{module}:Signalling")
        patch.setattr(early_on_cpus, "may_be_early", may_be_early)
        run_on_ranks(group, case, options, dtype, kernel="early_cpu", collective=collective)
    return early_on_cpus.steps[:]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_kernel_that_begins_early(ranks_of, size, name):
    case = replace(SQUARE[name], heads=HEADS)
    calls = ranks_of(size).run(run_early, case, OPTIONS, torch.float32)
    assert any(calls)
    assert all(free == SMS for of_rank in calls for free in of_rank)


def test_bf16_and_chosen_degrees(ranks_of):
    case = replace(SQUARE["shared_prefix"], heads=HEADS)
    options = ContextParallelOptions(chunk_size=16)
    assert any(ranks_of(2).run(run_early, case, options, torch.bfloat16))


# What moves takes so long that to hide any of it pays.
EARLY_BACKWARD = replace(
    OPTIONS, backward_degree=0, cost=replace(DEFAULT_COST, latency_seconds=1.0)
)


@pytest.mark.parametrize("name", [*MASKS, "nobody_sees_anything"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_backward_that_begins_early(ranks_of, size, name):
    case = replace(SQUARE[name], heads=HEADS)
    for steps in ranks_of(size).run(run_early_backward, case, EARLY_BACKWARD, torch.float32):
        # A rank whose keys nobody sees takes part in the cast and the reduce, and has nothing to work on.
        assert [x.split()[0] for x in steps] in ([], ["local", "main", "finish"])
        assert steps or name in ("nobody_sees_anything", "holes") or size == 1


@pytest.mark.parametrize(
    "more",
    [
        (replace(EARLY_BACKWARD, early=False), torch.float32),
        (EARLY_BACKWARD, torch.float32, "all_to_all"),
        (EARLY_BACKWARD, torch.float32, "signalling", False),
    ],
    ids=["off", "no_signals", "no_kernel"],
)
def test_a_backward_that_waits(ranks_of, more):
    case = replace(SQUARE["varlen_causal"], heads=HEADS)
    assert ranks_of(2).run(run_early_backward, case, *more) == [[], []]


@pytest.mark.parametrize(
    "options", [replace(OPTIONS, early=False), replace(OPTIONS, degree=1)], ids=["off", "degree_1"]
)
def test_only_where_asked_for(ranks_of, options):
    case = replace(SQUARE["varlen_causal"], heads=HEADS)
    assert ranks_of(2).run(run_early, case, options, torch.float32) == [[], []]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_kernel_that_waits_attends_all_keys_at_once(ranks_of, size, name):
    case = replace(SQUARE[name], heads=HEADS)
    ranks_of(size).run(run_on_ranks, case, OPTIONS, torch.float32)


def test_the_plan_has_near_and_far_keys():
    slices = documents([700, 1, 90, 1257], causal=True)
    merged = plan_rank(slices, 2, 0, OPTIONS)
    waiting = plan_rank(slices, 2, 0, replace(OPTIONS, early=False))
    near, far = merged.forward
    assert near.transfer is None
    assert far.transfer.recv_counts[0] == 0  # no row of its own
    assert len(waiting.forward) == 1
    assert merged.forward_is_early
    assert not waiting.forward_is_early
    assert near.slices.area() + far.slices.area() == waiting.forward[0].slices.area()
    stage = unpack(*merged.tensors("cpu")).merged.side_by_side
    assert stage.slices.area() == waiting.forward[0].slices.area()
    assert unpack(*waiting.tensors("cpu")).merged is None
    blind = replace(OPTIONS, cost=replace(DEFAULT_COST, starts_early=False))
    assert not plan_rank(slices, 2, 0, blind).forward_is_early


def test_near_keys_of_a_backward():
    slices = documents([700, 1, 90, 1257], causal=True)
    for rank in range(2):
        plan = plan_rank(slices, 2, rank, EARLY_BACKWARD)
        ready = unpack(*plan.tensors("cpu"))
        assert ready.backward_is_early
        (stage,) = ready.backward
        plans = stage.early_backward_plan(early_on_cpus.EarlyCpuKernel(), PROBLEM, rank)
        _, is_near = plans
        # Rows of the buffer by the rank that has them.
        owner = torch.full((stage.route.num_received,), -1)
        for peer, row, _, count in stage.route.host_recvs.tolist():
            owner[row : row + count] = peer
        assert torch.equal(is_near, owner == rank)
        assert is_near.any()
        assert not is_near.all()
    blind = replace(EARLY_BACKWARD.cost, backward_starts_early=False)
    for options in (
        OPTIONS,
        replace(EARLY_BACKWARD, early=False),
        replace(EARLY_BACKWARD, cost=blind),
    ):
        assert not unpack(*plan_rank(slices, 2, 0, options).tensors("cpu")).backward_is_early


@pytest.mark.parametrize("name", ["early_backward_plan", "plan"])
def test_what_fails_in_a_backward_does_so_before_rows_are_on_their_way(name, monkeypatch):
    kernel = early_on_cpus.EarlyCpuKernel()

    def refuse(*_):
        raise RuntimeError("no plan")

    monkeypatch.setattr(kernel, name, refuse, raising=False)
    collective = SimpleNamespace(
        signals=early_on_cpus.Signalling().signals,
        casts=lambda *_: pytest.fail("rows are on their way"),
    )
    # Plans are kept, and this one is new.
    slices = documents([900 + len(name), 1148], causal=True)
    plan = unpack(*plan_rank(slices, 2, 0, EARLY_BACKWARD).tensors("cpu"))
    q, k, v = (torch.zeros(plan.rows, heads, 16) for heads in (4, 2, 2))
    group = SimpleNamespace(rank=lambda: 0)
    execution = Execution(plan, kernel, PROBLEM, collective, group, group)
    with pytest.raises(RuntimeError, match="no plan"):
        backward(Grads(q, None), Saved(q, k, v, q, q), execution)


@pytest.mark.parametrize("name", ["early_plan", "plan"])
def test_what_fails_does_so_before_rows_are_on_their_way(name, monkeypatch):
    kernel = early_on_cpus.EarlyCpuKernel() if name == "early_plan" else CpuKernel()

    def refuse(*_):
        raise RuntimeError("no plan")

    monkeypatch.setattr(kernel, name, refuse, raising=False)
    collective = SimpleNamespace(casts=lambda *_: pytest.fail("rows are on their way"))
    plan = unpack(*plan_rank(documents([900, 1148], causal=True), 2, 0, OPTIONS).tensors("cpu"))
    q, k, v = (torch.zeros(plan.rows, heads, 16) for heads in (4, 2, 2))
    problem = problem_of(q, k, v, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="no plan"):
        forward(q, k, v, Execution(plan, kernel, problem, collective, None, None))


def test_ranks_without_far_keys_do_not_merge():
    slices = AttnSlices.from_cu_seqlens([0, 512, 1024], causal=True)
    options = replace(OPTIONS, strategy="sequential", chunk_size=512)
    for rank in range(2):
        plan = unpack(*plan_rank(slices, 2, rank, options).tensors("cpu"))
        assert plan.merged is None
        assert len(plan.forward) == 1


def loads_of(slices, cp_size):
    return StageLoads.of(RankRows.of(dispatch(slices, cp_size)))


@pytest.mark.parametrize(
    ("slices", "cp_size", "degree", "is_early"),
    [
        (documents([9000, 7000, 384], True), 2, 0, True),
        (AttnSlices.full(131072), 2, 0, False),
        (AttnSlices.full(131072), 8, 1, False),
    ],
    ids=["packed", "full", "full_8"],
)
def test_a_forward_begins_early_where_much_moves_for_what_is_computed(
    slices, cp_size, degree, is_early
):
    loads = loads_of(slices, cp_size)
    assert choose_degree(loads, DEFAULT_COST, early=True) == degree
    assert forward_begins_early(loads, DEFAULT_COST) == is_early
    assert plan_rank(slices, cp_size, 0).forward_is_early == is_early
    others = [forward_seconds(loads, degree, DEFAULT_COST) for degree in range(5)]
    if is_early:
        assert early_seconds(loads, DEFAULT_COST) < min(others)
    else:
        assert others[degree] <= min(others) * (1 + TIE)


def test_a_rank_without_local_keys_hides_nothing():
    each = (torch.full((2,), x) for x in (10**9, 0, 10**4, 10**4))
    loads = StageLoads(*each, 8192)
    assert not forward_begins_early(loads, DEFAULT_COST)


def test_a_backward_begins_early_where_much_moves_for_what_is_computed():
    slow = replace(DEFAULT_COST, seconds_per_row=1e-6)
    packed = loads_of(documents(document_packs(32768, 1)[0], causal=True), 4)
    full = loads_of(AttnSlices.full(32768), 4)
    for loads, cost, is_early in (
        (packed, DEFAULT_COST, True),
        (full, DEFAULT_COST, False),
        (full, slow, True),
    ):
        assert backward_begins_early(loads, cost) == is_early
        waiting, early = backward_seconds(loads, 0, cost), early_backward_seconds(loads, cost)
        assert (early < waiting) == is_early
    others = [backward_seconds(packed, degree, DEFAULT_COST) for degree in range(5)]
    assert early_backward_seconds(packed, DEFAULT_COST) < min(others)
    assert choose_degree(packed, DEFAULT_COST, backward=True, early=True) == 0


def test_what_an_early_backward_can_not_hide():
    loads = loads_of(AttnSlices.full(32768), 4)
    at_once = replace(DEFAULT_COST, seconds_per_row=0.0, latency_seconds=0.0)
    slow = replace(DEFAULT_COST, seconds_per_row=1e-3, backward_reduce_factor=2.0)
    area = (
        float(loads.area.max()) * DEFAULT_COST.seconds_per_area * DEFAULT_COST.backward_area_factor
    )
    stage = loads.query_rows * DEFAULT_COST.backward_stage_seconds_per_row
    computing = area * (1 + EARLY_BACKWARD_COST) + stage
    assert early_backward_seconds(loads, at_once) == pytest.approx(computing)
    moving = 3 * (int(loads.recv_rows.max()) * 1e-3 + slow.latency_seconds)
    assert moving < early_backward_seconds(loads, slow) < moving + computing


def test_nothing_is_made_while_a_graph_is_captured(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_to_be_recorded(on_gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_to_be_recorded(torch.zeros(1))
    with pytest.raises(RuntimeError, match="run the step once before it is captured"):
        refuse_to_be_recorded(on_gpu)
