"""A backward in steps, whose keys arrive and whose gradients leave between them: in which order,
and that it is right."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from magi_compile.dtensor.call.backward import backward
from magi_compile.dtensor.call.execution import Execution, Prepared, unpack
from magi_compile.dtensor.call.forward import forward
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.dtensor.transport.all_to_all import AllToAll
from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.kernels.select import KERNELS, problem_of
from tests.dtensor.support import phases_on_cpus
from tests.dtensor.support.across_ranks import run_on_ranks
from tests.dtensor.support.masks import SQUARE, documents
from tests.support.cases import HeadShape

HEADS = HeadShape(4, 2, 16, 16)


PROBLEM = AttnProblem("cpu", None, torch.float32, 4, 2, 16, 16, 1.0)


PHASES = ["begin", "main", "finish"]


def phased(backward_degree):
    return ContextParallelOptions(chunk_size=16, backward_degree=backward_degree, early=False)


def run_in_phases(group, case, options, dtype):
    phases_on_cpus.steps.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "phased_cpu", f"{phases_on_cpus.__name__}:PhasedCpuKernel")
        run_on_ranks(group, case, options, dtype, kernel="phased_cpu")
    return phases_on_cpus.steps[:]


@pytest.mark.parametrize("degree", [0, 1, 3])
@pytest.mark.parametrize(
    "name", ["varlen_causal", "holes", "causal_129x129", "nobody_sees_anything"]
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_kernel_with_phases(ranks_of, size, name, degree):
    case = replace(SQUARE[name], heads=HEADS)
    for steps in ranks_of(size).run(run_in_phases, case, phased(degree), torch.float32):
        # Keys in place are there anyway, and their gradients stay.
        local = ["one call"] if steps[:1] == ["one call"] else []
        assert not local or degree
        remote = steps[len(local) :]
        assert remote == PHASES * (len(remote) // 3)
        assert len(remote) // 3 <= max(degree, 1)


def test_bf16(ranks_of):
    case = replace(SQUARE["shared_prefix"], heads=HEADS)
    assert PHASES in ranks_of(2).run(run_in_phases, case, phased(0), torch.bfloat16)


class Ticket:
    """A cast or a reduce of `AllToAll` that says when it is waited for."""

    sms = 0

    def __init__(self, pending, say):
        self.pending, self.say = pending, say

    def wait(self):
        self.say("wait for the cast")
        return self.pending.wait()

    def write_sums(self, outs, prior=None):
        self.say("wait for the reduce")
        self.pending.write_sums(outs, prior)


class Telling(AllToAll):
    """Says what it is asked for, and where gradients were to be written."""

    def __init__(self, say):
        self.say, self.boxes = say, []

    def casts(self, tensors, routes, group):
        for pending in super().casts(tensors, routes, group):
            self.say("cast")
            yield Ticket(pending, self.say)

    def outbox(self, like, route, group):
        self.boxes.append(super().outbox(like, route, group))
        return self.boxes[-1]

    def start_reduce(self, tensors, route, group):
        self.say("reduce")
        in_place = all(x is y for x, y in zip(tensors, self.boxes[-1], strict=True))
        self.say("in place" if in_place else "elsewhere")
        return Ticket(super().start_reduce(tensors, route, group), self.say)


def run_and_tell(group, degree):
    """What a rank does with one kernel and with the other, and the gradients of both."""
    plan = plan_rank(documents([1500, 1, 547], causal=True), 2, group.rank(), phased(degree))
    plan = unpack(*plan.tensors("cpu"))
    generator = torch.Generator().manual_seed(group.rank())
    q, k, v, dout = (
        torch.randn(plan.rows, heads, 16, generator=generator) for heads in (4, 2, 2, 4)
    )
    problem = problem_of(q, k, v, 0.25, 0.0)
    prepared = Prepared(plan, CpuKernel(), problem, AllToAll())
    execution = Execution(prepared, group, group)
    saved = Saved(q, k, v, *forward(q, k, v, execution))
    found = []
    for kernel in (phases_on_cpus.PhasedCpuKernel(), CpuKernel()):
        steps = phases_on_cpus.steps
        steps.clear()
        telling = Telling(steps.append)
        telling.boxes.append([None, None])
        told = execution._replace(prepared=Prepared(plan, kernel, problem, telling))
        grads = backward(Grads(dout, None), saved, told)
        found.append((steps[:], grads))
    (steps, grads), (in_one_call, expected) = found
    for grad, right in zip(grads, expected, strict=True):
        assert torch.equal(grad, right)
    return steps, in_one_call


def test_what_is_hidden(ranks_of):
    for steps, in_one_call in ranks_of(2).run(run_and_tell, 0):
        assert steps == [
            "cast",
            "begin",
            "wait for the cast",
            "main",
            "reduce",
            "in place",
            "finish",
            "wait for the reduce",
        ]
        others = ["cast", "wait for the cast", "reduce", "elsewhere", "wait for the reduce"]
        assert in_one_call == others


def test_what_stages_hide(ranks_of):
    remote = ["begin", "wait for the cast", "cast", "main"]
    for steps, _ in ranks_of(2).run(run_and_tell, 2):
        assert steps == [
            "cast",
            "one call",
            *remote,
            "reduce",
            "in place",
            "finish",
            *(x for x in remote if x != "cast"),
            # While one is under way, no slot is asked for: that could wait for its end.
            "wait for the reduce",
            "reduce",
            "elsewhere",
            "finish",
            "wait for the reduce",
        ]


@pytest.mark.parametrize("degree", [0, 2])
def test_what_fails_in_a_backward_does_so_before_rows_are_on_their_way(degree, monkeypatch):
    kernel = phases_on_cpus.PhasedCpuKernel()

    def refuse(*_):
        raise RuntimeError("no plan")

    monkeypatch.setattr(kernel, "plan", refuse)
    collective = SimpleNamespace(casts=lambda *_: pytest.fail("rows are on their way"))
    # Plans are kept, and this one is new.
    slices = documents([904, 1144], causal=True)
    plan = unpack(*plan_rank(slices, 2, 0, phased(degree)).tensors("cpu"))
    q, k, v = (torch.zeros(plan.rows, heads, 16) for heads in (4, 2, 2))
    execution = Execution(Prepared(plan, kernel, PROBLEM, collective), None, None)
    with pytest.raises(RuntimeError, match="no plan"):
        backward(Grads(q, None), Saved(q, k, v, q, q), execution)
