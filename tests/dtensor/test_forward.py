"""A forward that begins with local keys while the others travel, over gloo: that it is right, and in which order."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from magi_compile.dtensor.call.execution import Execution, Prepared, unpack
from magi_compile.dtensor.call.forward import forward
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.dtensor.transport.all_to_all import SMS
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.kernels.select import KERNELS, problem_of
from tests.dtensor.support import early_on_cpus
from tests.dtensor.support.across_ranks import run_on_ranks
from tests.dtensor.support.masks import SQUARE, documents
from tests.support.cases import HeadShape

OPTIONS = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=1)


HEADS = HeadShape(4, 2, 16, 16)


MASKS = ["varlen_causal", "varlen_full", "holes", "shared_prefix", "causal_129x129"]


def run_early(group, case, options, dtype, **attention_options):
    early_on_cpus.free.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "early_cpu", f"{early_on_cpus.__name__}:EarlyCpuKernel")
        run_on_ranks(group, case, options, dtype, kernel="early_cpu", **attention_options)
    return early_on_cpus.free[:]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_kernel_that_begins_early(ranks_of, size, name):
    case = replace(SQUARE[name], heads=HEADS)
    calls = ranks_of(size).run(run_early, case, OPTIONS, torch.float32)
    assert any(calls)
    assert all(free == SMS for of_rank in calls for free in of_rank)


@pytest.mark.parametrize("early", [True, False])
def test_max_scores_of_one_call(ranks_of, early):
    case = replace(SQUARE["holes"], heads=HEADS, softcap=3.0)
    of_case = (case, replace(OPTIONS, early=early), torch.float32)
    run = partial(run_early, return_max_scores=True)
    assert any(ranks_of(2).run(run, *of_case)) == early
    ranks_of(2).run(partial(run_on_ranks, return_max_scores=True), *of_case)


def test_bf16_and_chosen_degrees(ranks_of):
    case = replace(SQUARE["shared_prefix"], heads=HEADS)
    options = ContextParallelOptions(chunk_size=16)
    assert any(ranks_of(2).run(run_early, case, options, torch.bfloat16))


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
    execution = Execution(Prepared(plan, kernel, problem, collective), None, None)
    with pytest.raises(RuntimeError, match="no plan"):
        forward(q, k, v, execution)
