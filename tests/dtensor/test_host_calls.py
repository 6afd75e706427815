"""What a call of a known kind by a known plan costs the host: the Python functions that it calls. `pytest -s` shows
them."""

import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from tests.dtensor.support import hopper_on_cpus
from tests.dtensor.support.masks import documents

EARLY = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=1)
ONE_CALL = replace(EARLY, backward_degree=0, early=False)
# Functions of a forward and of a backward at most. Of these, PyTorch's autograd and its ops have 30 and 40.
MOST = {
    ("emulated", EARLY): (130, 240),
    ("emulated", ONE_CALL): (120, 200),
    ("all_to_all", EARLY): (130, 250),
    ("all_to_all", ONE_CALL): (140, 220),
}


def count(group, collective, options):
    with hopper_on_cpus.idle_hopper():
        slices = documents([700, 1, 90, 1257], causal=True)
        plan = plan_rank(slices, group.size(), group.rank(), options)
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

        for _ in range(2):  # a slot, and the other one
            backward(forward())
        with hopper_on_cpus.Calls() as of_forward:
            out = forward()
        with hopper_on_cpus.Calls() as of_backward:
            backward(out)
        return [(len(calls), calls.lines()) for calls in (of_forward, of_backward)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
@pytest.mark.parametrize(("collective", "options"), MOST, ids=lambda x: getattr(x, "early", x))
def test_a_known_call(ranks_of, collective, options):
    for rank, passes in enumerate(ranks_of(2).run(count, collective, options)):
        for (number, lines), most in zip(passes, MOST[collective, options], strict=True):
            if not rank:
                print(f"\n{collective}: {number} functions, {most} at most", *lines, sep="\n")
            assert number <= most
