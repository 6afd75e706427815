"""The cost of a call for the host. By a known plan: the Python functions that it calls. By a new one: also PyTorch's
operators, most of which are launches on a GPU. `pytest -s` shows them."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.dtensor.transport import rows
from magi_compile.kernels.sm90.forward import overlap
from tests.dtensor.support import hopper_on_cpus
from tests.dtensor.support.masks import documents

EARLY = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=1)
ONE_CALL = replace(EARLY, backward_degree=0, early=False)
# Functions of a forward and of a backward at most. Of these, PyTorch's autograd and its ops have 30 and 40.
MOST = {
    ("emulated", EARLY): (130, 240),
    ("emulated", ONE_CALL): (126, 200),
    ("all_to_all", EARLY): (132, 250),
    ("all_to_all", ONE_CALL): (140, 220),
}


# Functions of the first forward and backward of a plan, and operators that a known plan does not take.
MOST_OF_NEW = {
    ("emulated", EARLY): ((1100, 90), (1100, 60)),
    ("emulated", ONE_CALL): ((770, 90), (790, 95)),
    ("all_to_all", EARLY): ((1100, 90), (1100, 60)),
}


def passes_of(group, collective, options, sizes):
    """The forward and the backward of the plan of documents of such sizes."""
    plan = plan_rank(documents(sizes, causal=True), group.size(), group.rank(), options)
    q, k, v = (
        torch.zeros(plan.dispatch.seqlen_local, n, 64, dtype=torch.bfloat16, requires_grad=True)
        for n in (4, 2, 2)
    )
    tensors, chosen = plan.tensors("cpu"), {"kernel": hopper_on_cpus.KERNEL}

    def forward():
        return context_parallel_attention(
            q, k, v, tensors, group, collective=collective, **chosen
        ).out

    def backward(out):
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))

    return forward, backward


def count(group, collective, options):
    with hopper_on_cpus.idle_hopper():
        forward, backward = passes_of(group, collective, options, [700, 1, 90, 1257])
        for _ in range(2):  # a slot, and the other one
            backward(forward())
        with hopper_on_cpus.Calls() as of_forward:
            out = forward()
        with hopper_on_cpus.Calls() as of_backward:
            backward(out)
        return [(len(calls), calls.lines()) for calls in (of_forward, of_backward)]


def num_operators(run):
    """PyTorch's operators that are called by no other one, and the result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        result = run()
    of_torch = [x for x in profiled.events() if x.name.startswith("aten::")]
    return sum(x.cpu_parent not in of_torch for x in of_torch), result


def count_new(group, collective, options):
    found = []
    with hopper_on_cpus.idle_hopper():
        # Documents of this test alone: what is derived from a plan serves the next equal one.
        first = 1 + 3 * [*MOST_OF_NEW].index((collective, options))
        backward_of = [
            passes_of(group, collective, options, [700, n, 90, 1258 - n])
            for n in range(first, first + 3)
        ]
        for forward, backward in backward_of[:1] * 2:
            backward(forward())
        forward, backward = backward_of[1]
        with hopper_on_cpus.Calls() as of_forward:
            out = forward()
        with hopper_on_cpus.Calls() as of_backward:
            backward(out)
        forward, backward = backward_of[2]
        for _ in range(2):
            in_forward, out = num_operators(forward)
            in_backward, _ = num_operators(partial(backward, out))
            found.append((in_forward, in_backward))
    new, known = found
    functions = len(of_forward), len(of_backward)
    return [*zip(functions, (x - y for x, y in zip(new, known, strict=True)), strict=True)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
@pytest.mark.parametrize(("collective", "options"), MOST, ids=lambda x: getattr(x, "early", x))
def test_a_known_call(ranks_of, collective, options):
    for rank, passes in enumerate(ranks_of(2).run(count, collective, options)):
        for (number, lines), most in zip(passes, MOST[collective, options], strict=True):
            if not rank:
                print(f"\n{collective}: {number} functions, {most} at most", *lines, sep="\n")
            assert number <= most


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
@pytest.mark.parametrize(
    ("collective", "options"), MOST_OF_NEW, ids=lambda x: getattr(x, "early", x)
)
def test_the_first_call_of_a_plan(ranks_of, collective, options):
    for passes in ranks_of(2).run(count_new, collective, options):
        print(f"\n{collective}: functions and operators {passes}")
        for found, most in zip(passes, MOST_OF_NEW[collective, options], strict=True):
            assert found[0] <= most[0]
            assert found[1] <= most[1]


def tables_of_an_early_forward(group):
    """Whether each table of rows is made where the stream behind the arrival is the current one."""
    found, is_beside = [], []

    @contextmanager
    def beside(self):
        is_beside.append(True)
        yield
        is_beside.pop()

    def rows_of(*arguments):
        found.append(bool(is_beside))
        return made(*arguments)

    made = rows.rows_of
    with hopper_on_cpus.idle_hopper(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "rows_of", rows_of)
        patch.setattr(overlap.EarlyForward, "beside", beside)
        forward, _ = passes_of(group, "all_to_all", EARLY, [2048])
        forward()
    return found


def test_tables_are_made_on_the_stream_of_the_call(ranks_of):
    for found in ranks_of(4).run(tables_of_an_early_forward):
        assert found
        assert not any(found)
