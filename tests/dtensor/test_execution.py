"""Plans as the op finds them: their stages, and which keys are local."""

from dataclasses import replace

import torch

from magi_compile.dtensor.execution import unpack
from magi_compile.dtensor.planning.cost import DEFAULT_COST
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.kernels.base import AttnProblem
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support import early_on_cpus
from tests.dtensor.support.masks import documents

OPTIONS = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=1)


PROBLEM = AttnProblem("cpu", None, torch.float32, 4, 2, 16, 16, 1.0)


# What moves takes so long that to hide any of it pays.
EARLY_BACKWARD = replace(
    OPTIONS, backward_degree=0, cost=replace(DEFAULT_COST, latency_seconds=1.0)
)


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


def test_local_keys_of_a_backward():
    slices = documents([700, 1, 90, 1257], causal=True)
    for rank in range(2):
        plan = plan_rank(slices, 2, rank, EARLY_BACKWARD)
        ready = unpack(*plan.tensors("cpu"))
        assert ready.backward_is_early
        (stage,) = ready.backward
        plans = stage.early_backward_plan(early_on_cpus.EarlyCpuKernel(), PROBLEM, rank)
        _, is_local = plans
        # Rows of the buffer by the rank that has them.
        owner = torch.full((stage.route.num_received,), -1)
        for peer, row, _, count in stage.route.host_recvs.tolist():
            owner[row : row + count] = peer
        assert torch.equal(is_local, owner == rank)
        assert is_local.any()
        assert not is_local.all()
    blind = replace(EARLY_BACKWARD.cost, backward_starts_early=False)
    for options in (
        OPTIONS,
        replace(EARLY_BACKWARD, early=False),
        replace(EARLY_BACKWARD, cost=blind),
    ):
        assert not unpack(*plan_rank(slices, 2, 0, options).tensors("cpu")).backward_is_early


def test_ranks_without_remote_keys_do_not_merge():
    slices = AttnSlices.from_cu_seqlens([0, 512, 1024], causal=True)
    options = replace(OPTIONS, strategy="sequential", chunk_size=512)
    for rank in range(2):
        plan = unpack(*plan_rank(slices, 2, rank, options).tensors("cpu"))
        assert plan.merged is None
        assert len(plan.forward) == 1
