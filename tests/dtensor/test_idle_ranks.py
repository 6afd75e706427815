"""Ranks whose rows see nothing: what they return and how they compile is as on the ranks that have work."""

import torch

from magi_compile import AttnSlice, AttnSlices, MaskType
from magi_compile.dtensor import ContextParallelOptions, context_parallel_attention, plan, plan_rank

S = 128
# Only five rows see anything, so all ranks but one have no work.
FEW_ROWS = AttnSlices.from_slices([AttnSlice((S - 5, S), (0, 64), MaskType.FULL)], S, S)
# The same, and no rank sends anything.
FEW_TOKENS = AttnSlices.from_slices([AttnSlice((S - 5, S), (S - 5, S), MaskType.FULL)], S, S)
CAUSAL = AttnSlices.from_cu_seqlens([0, S], causal=True)
OPTIONS = ContextParallelOptions(chunk_size=16)


def run_gradients(group):
    """Whether this rank has no slices, and the strides of its gradients."""
    planned = plan_rank(FEW_ROWS, group.size(), group.rank(), OPTIONS)
    rows = planned.dispatch.seqlen_local
    # As a model has them: heads before tokens.
    q, k, v = (torch.randn(n, rows, 8).transpose(0, 1).requires_grad_() for n in (4, 2, 2))
    out, *_ = context_parallel_attention(q, k, v, planned.tensors("cpu"), group)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    is_idle = all(not len(stage.slices) for stage in planned.backward)
    return is_idle, [x.is_contiguous() for x in gradients]


def test_gradients_have_the_strides_that_compiled_code_expects(ranks_of):
    found = ranks_of(2).run(run_gradients)
    assert sorted(is_idle for is_idle, _ in found) == [False, True]
    assert all(are_contiguous == [True] * 3 for _, are_contiguous in found)


def run_new_masks(group):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(x, p):
        return p.attention(x, x, x)

    for mask in (FEW_TOKENS, CAUSAL):
        p = plan(mask, group, options=OPTIONS)
        attend(torch.ones(1, 2, p.seqlen_local, 8, requires_grad=True), p).sum().backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_work_for_an_idle_rank_compiles_nothing_again(ranks_of):
    assert ranks_of(2).run(run_new_masks) == [1, 1]
