"""Attention across ranks against the oracle, run by the tests on CPUs and on GPUs."""

import torch
import torch.distributed as dist

from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.kernels.reference import exact_max_scores
from tests.support.numerics import AttentionResults, assert_attention_close

OPTIONS = ContextParallelOptions(chunk_size=16, degree=1, backward_degree=1)


def shard(x, positions):
    """The rows `positions` of `x`, with random rows where the sequence is padded."""
    padding = torch.randn(int(positions.max()) + 1, *x.shape[1:], device=x.device).to(x.dtype)
    padding[: x.shape[0]] = x[: padding.shape[0]]
    return padding[positions.to(x.device)]


def gather(group, local, placement):
    """The whole sequence from every rank's rows."""
    dtype = local.dtype
    local = local.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    parts = [torch.empty_like(local) for _ in range(placement.cp_size)]
    dist.all_gather(parts, local, group)
    order = placement.inverse_positions()[: placement.total]
    return torch.cat(parts).view(dtype)[order.to(local.device)]


def run_on_ranks(
    group, case, options, dtype, *, device="cpu", is_compiled=False, **attention_options
):
    """Forward and backward on this rank; rank 0 compares the whole with the oracle."""
    plan = plan_rank(case.slices(), group.size(), group.rank(), options)
    inputs, problem = case.inputs(dtype, device), case.problem(dtype, device)
    where, keys = (x.positions(plan.rank) for x in (plan.dispatch, plan.dispatch.keys))
    q, dout = (shard(x, where) for x in (inputs.q, inputs.dout))
    k, v = (shard(x, keys) for x in (inputs.k, inputs.v))
    dlse = shard(inputs.dlse.t(), where).t()
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def attend(q, k, v, tensors):
        return context_parallel_attention(
            q,
            k,
            v,
            tensors,
            group.group_name,
            softmax_scale=problem.softmax_scale,
            softcap=problem.softcap,
            **attention_options,
        )

    if is_compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)
    out, lse, *others = attend(q, k, v, plan.tensors(device))
    others = [x for x in others if x is not None]
    # Rows of padding have gradients of zero: what they see is nothing.
    is_real = (where < plan.dispatch.total).to(device)
    dout = dout * is_real[:, None, None]
    dlse = dlse.masked_fill(~is_real, 0.0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.contiguous()))
    locals_ = [out.detach(), lse.detach().t(), *grads, *(x.t() for x in others)]
    owners = [plan.dispatch] * 3 + [plan.dispatch.keys] * 2 + [plan.dispatch] * len(others)
    out, lse, dq, dk, dv, *others = (
        gather(group, x, of) for x, of in zip(locals_, owners, strict=True)
    )
    if group.rank() == 0:
        slices = case.slices(device)
        results = AttentionResults(out, lse.t(), dq, dk, dv)
        assert_attention_close(results, inputs, slices, problem)
        for max_scores in others:
            of_scores = (slices, problem.softmax_scale, problem.softcap)
            expected = exact_max_scores(inputs.q, inputs.k, *of_scores).float()
            torch.testing.assert_close(max_scores.t(), expected, atol=5e-3, rtol=5e-3)
