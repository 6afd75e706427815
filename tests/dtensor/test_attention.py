"""Attention across ranks equals attention on one: values and gradients, over gloo."""

import datetime
import os
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.call.execution import unpack
from magi_compile.dtensor.planning.dispatch import STRATEGIES
from magi_compile.dtensor.planning.rank_plan import (
    ContextParallelOptions,
    plan_rank,
)
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.across_ranks import OPTIONS, run_on_ranks, shard
from tests.dtensor.support.masks import SQUARE
from tests.dtensor.support.ranks import Ranks
from tests.support.cases import HEADS, HeadShape
from tests.support.pairwise import pairwise

SHORT = datetime.timedelta(seconds=3)

# Every mask on 3 ranks; some on 1, 2 and 4. Others on 2, where they are not long, and all on 8 are slow.
FEW = ["full_1x1", "varlen_causal", "nobody_sees_anything", "holes", "shared_prefix"]
RUNS = [
    *(pytest.param(3, name, id=f"3-{name}") for name in SQUARE),
    *(pytest.param(size, name, id=f"{size}-{name}") for size in (1, 2, 4) for name in FEW),
    *(
        pytest.param(size, name, id=f"{size}-{name}", marks=pytest.mark.slow)
        for size in (2, 8)
        for name in SQUARE
        if size == 8 or (name not in FEW and SQUARE[name].seqlen_q < 1000)
    ),
]


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_every_mask(ranks_of, size, name):
    case = SQUARE[name]
    ranks_of(size).run(
        run_on_ranks, replace(case, heads=HeadShape(4, 2, 16, 16)), OPTIONS, torch.float32
    )


@pytest.mark.parametrize(("strategy", "degree", "size"), pairwise(STRATEGIES, (0, 1, 2, 4), (2, 3)))
def test_every_strategy_and_degree(ranks_of, size, strategy, degree):
    options = ContextParallelOptions(
        strategy=strategy, chunk_size=32, degree=degree, backward_degree=4 - degree
    )
    case = replace(SQUARE["varlen_causal"], heads=HeadShape(4, 2, 16, 16))
    ranks_of(size).run(run_on_ranks, case, options, torch.float32)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.id)
def test_heads_and_bf16(ranks_of, heads):
    case = replace(SQUARE["varlen_causal"], heads=heads)
    ranks_of(2).run(run_on_ranks, case, replace(OPTIONS, degree=2), torch.bfloat16)


def test_softcap_and_chosen_options(ranks_of):
    case = replace(SQUARE["shared_prefix"], softcap=5.0)
    ranks_of(3).run(run_on_ranks, case, ContextParallelOptions(), torch.float32)


@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [("varlen_causal", False), ("holes", False), ("causal_129x129", False), ("holes", True)],
)
def test_max_scores(ranks_of, name, is_compiled):
    """Several stages, padding, rows that see nothing, ranks without remote keys."""
    case = replace(SQUARE[name], heads=HeadShape(4, 2, 16, 16))
    run = partial(run_on_ranks, is_compiled=is_compiled, return_max_scores=True)
    ranks_of(3).run(run, case, replace(OPTIONS, degree=2), torch.float32)


def run_scales_that_are_not_positive(group):
    case = replace(SQUARE["varlen_causal"], heads=HeadShape(4, 2, 16, 16))
    plan = plan_rank(case.slices(), group.size(), group.rank(), OPTIONS)
    where, tensors = plan.dispatch.positions(plan.rank), plan.tensors("cpu")
    inputs = [shard(x, where) for x in case.inputs(torch.float32)[:4]]
    for sign in (-1.0, 0.0):
        found = []
        for factor, scale in ((1.0, 0.3 * sign), (sign, 0.3)):
            q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
            out, lse, _ = context_parallel_attention(
                q * factor, k, v, tensors, group.group_name, softmax_scale=scale
            )
            found.append((out, lse, *torch.autograd.grad(out, (q, k, v), inputs[3])))
        for x, expected in zip(*found, strict=True):
            torch.testing.assert_close(x, expected, atol=1e-6, rtol=1e-6)


def test_scales_that_are_not_positive(ranks_of):
    ranks_of(2).run(run_scales_that_are_not_positive)


def run_new_masks_compiled(group, cases):
    for case in cases:
        run_on_ranks(group, case, OPTIONS, torch.float32, is_compiled=True)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled(ranks_of):
    cases = [
        replace(SQUARE[name], heads=HeadShape(4, 2, 16, 16))
        for name in ("varlen_causal", "causal_129x129")
    ]
    ranks_of(2).run(run_new_masks_compiled, cases)


def run_without_recompiling(group, masks):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x, tensors):
        q, k = (x * s for s in (1.0, 0.5))
        out, lse, _ = context_parallel_attention(q, k, x, tensors, group.group_name)
        return out.sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()

    for slices in masks:
        plan = plan_rank(slices, group.size(), group.rank(), OPTIONS)
        x = torch.ones(plan.dispatch.seqlen_local, 2, 16, requires_grad=True)
        tensors = plan.tensors("cpu")
        loss(x, tensors).backward()
        assert x.grad.isfinite().all()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_new_masks_do_not_recompile(ranks_of):
    cuts = [[0, 256], [0, 100, 256], [0, 13, 77, 200, 256], [0, 1, 2, 3, 255, 256]]
    masks = [AttnSlices.from_cu_seqlens(torch.tensor(c), window=(None, 0)) for c in cuts]
    # The first mask, and a second whose plan has other lengths; from then on lengths are symbols.
    assert max(ranks_of(2).run(run_without_recompiling, masks)) <= 2


def run_with_a_group_for_reduces(group, case):
    run_on_ranks(group, case, OPTIONS, torch.float32, reduce_group=dist.new_group())


def test_a_group_for_reduces(ranks_of):
    ranks_of(3).run(run_with_a_group_for_reduces, SQUARE["varlen_causal"])


def run_opcheck(group):
    plan = plan_rank(AttnSlices.causal(64), 1, 0, OPTIONS).tensors("cpu")
    q = torch.randn(64, 4, 8, requires_grad=True)
    k, v = (torch.randn(64, 2, 8, requires_grad=True) for _ in range(2))
    arguments = (*plan, 0.3, 0.0, "cpu", "auto", *[group.group_name] * 2)
    torch.library.opcheck(torch.ops.magi.cp_attention, (q, k, v, *arguments))
    with_max_scores = (*arguments, 2, None, None, "", None, None, True)
    torch.library.opcheck(torch.ops.magi.cp_attention, (q, k, v, *with_max_scores))
    q, k, v = (x.detach() for x in (q, k, v))
    torch.library.opcheck(torch.ops.magi.cp_ffa_fwd, (q, k, v, *arguments))
    torch.library.opcheck(torch.ops.magi.cp_ffa_fwd, (q, k, v, *with_max_scores))
    lse = torch.randn(4, 64)
    torch.library.opcheck(torch.ops.magi.cp_ffa_bwd, (q, lse, q, k, v, q, lse, *arguments))


def run_second_derivative(group):
    plan = plan_rank(AttnSlices.causal(64), 1, 0, OPTIONS).tensors("cpu")
    q = torch.randn(64, 2, 8, requires_grad=True)
    out, *_ = context_parallel_attention(q, q, q, plan, group)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        dq.sum().backward()


def test_second_derivative(ranks_of):
    ranks_of(1).run(run_second_derivative)


def test_opcheck(ranks_of):
    ranks_of(1).run(run_opcheck)


def run_twice(group, case):
    plan = plan_rank(case.slices(), group.size(), group.rank(), OPTIONS)
    q, k, v, *_ = case.inputs(torch.bfloat16)
    where = plan.dispatch.positions(plan.rank)
    results = []
    for _ in range(2):
        local = [shard(x, where.clamp(max=case.seqlen_q - 1)).requires_grad_() for x in (q, k, v)]
        out, *_ = context_parallel_attention(*local, plan.tensors("cpu"), group)
        results.append((out, *torch.autograd.grad(out, local, torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_equal_inputs_give_equal_bits(ranks_of):
    ranks_of(3).run(run_twice, SQUARE["varlen_full"])


def run_until_a_rank_dies(group):
    plan = plan_rank(AttnSlices.full(64), group.size(), group.rank(), OPTIONS).tensors("cpu")
    x = torch.randn(unpack(*plan).rows, 2, 8)
    context_parallel_attention(x, x, x, plan, group)
    if group.rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError, match="rank 0 has not heard of rank 1 in a forward"):
        context_parallel_attention(x, x, x, plan, group)


def test_a_dead_rank_is_an_error_on_the_others():
    ranks = Ranks(2)
    try:
        assert ranks.run(run_until_a_rank_dies, expect_dead={1}) == [None, None]
    finally:
        ranks.close()


def run_until_a_rank_hangs(group):
    plan = plan_rank(AttnSlices.full(64), group.size(), group.rank(), OPTIONS).tensors("cpu")
    x = torch.randn(unpack(*plan).rows, 2, 8)
    begin = time.monotonic()
    if group.rank() == 1:
        time.sleep(2 * SHORT.total_seconds())
        return 0.0
    with pytest.raises(RuntimeError, match=r"(?i)not heard of rank 1 .* time"):
        context_parallel_attention(x, x, x, plan, group)
    return time.monotonic() - begin


def test_a_rank_that_hangs_is_an_error_within_the_timeout():
    ranks = Ranks(2, timeout=SHORT)
    try:
        waited, _ = ranks.run(run_until_a_rank_hangs)
        assert waited < 1.5 * SHORT.total_seconds()
    finally:
        ranks.close()
