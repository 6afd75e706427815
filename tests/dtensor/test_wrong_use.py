"""Wrong use across ranks is an error that says what is wrong: the same one on every rank where ranks do not fit each other."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask

from magi_compile.dtensor import agreement
from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.masks.slices import AttnSlices
from magi_compile.testing.cases import Heads, varlen
from tests.dtensor.support.across_ranks import OPTIONS, run_on_ranks

causal = AttnSlices.causal
CAUSAL = causal(96)


def attend(plan, group, **options):
    x = torch.ones(plan.dispatch.seqlen_local, 2, 16, requires_grad=True)
    out, _ = context_parallel_attention(x, x, x, plan.tensors("cpu"), group, **options)
    (grad,) = torch.autograd.grad(out.sum(), x)
    return out, grad


# Plans that do not fit: in `plans`, mask, cp_size and rank by rank. Each test has masks of its own, which no earlier call in
# these processes has agreed upon.


def run_plans(group, plans):
    """The error of an attention by these plans; one by the right plan works afterwards."""
    slices, size, rank = plans[group.rank()]
    agreement._asked.clear()  # processes serve many tests, and only the first plans are compared
    with pytest.raises(ValueError) as raised:
        attend(plan_rank(slices, size, rank, OPTIONS), group)
    attend(plan_rank(CAUSAL, group.size(), group.rank(), OPTIONS), group)
    return str(raised.value)


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        (
            [(causal(128), 4, 0), (causal(128), 4, 1)],
            "for the 2 ranks of `group`, but ranks [0, 1] have a plan for 4; "
            "call plan_rank with cp_size=group.size()",
        ),
        (
            [(causal(127), 1, 0), (causal(127), 2, 1)],
            "for the 2 ranks of `group`, but ranks [0] have a plan for 1",
        ),
        (
            [(causal(95), 3, 0), (causal(94), 3, 1), (causal(95), 3, 2)],
            "plan the same mask with the same options, but the plans of ranks [1] differ from that of rank 0",
        ),
        (
            [(causal(126), 2, 1), (causal(126), 2, 0)],
            "each rank's own, but rank 0 has the plan of rank 1, rank 1 has the plan of rank 0; call plan_rank with rank=group.rank()",
        ),
    ],
    ids=["size", "one_size", "mask", "rank"],
)
def test_plans_that_do_not_fit(ranks_of, plans, message):
    first, *others = ranks_of(len(plans)).run(run_plans, plans)
    assert message in first
    assert others == [first] * len(others)


def run_options(group):
    options = replace(OPTIONS, degree=group.rank())
    with pytest.raises(ValueError, match=r"the plans of ranks \[1\] differ from that of rank 0"):
        attend(plan_rank(causal(125), 2, group.rank(), options), group)


def test_other_options(ranks_of):
    ranks_of(2).run(run_options)


def run_and_count(group):
    gathers, all_gather = [], dist.all_gather

    def counted(*arguments):
        gathers.append(arguments)
        return all_gather(*arguments)

    dist.all_gather = counted
    counts = []
    try:
        for length in (200, 200, 201, 200, 201):
            attend(plan_rank(AttnSlices.causal(length), 2, group.rank(), OPTIONS), group)
            counts.append(len(gathers))
    finally:
        dist.all_gather = all_gather
    return counts


def test_plans_are_compared_once(ranks_of):
    assert ranks_of(2).run(run_and_count) == [[1, 1, 2, 2, 2]] * 2


# Groups


def run_groups(group):
    plan = plan_rank(CAUSAL, 2, group.rank(), OPTIONS)
    assert torch.equal(attend(plan, None)[0], attend(plan, group)[0])
    attend(plan, None, reduce_group=group.group_name)
    compiled = torch.compile(attend, backend="aot_eager")
    assert torch.equal(compiled(plan, None)[1], attend(plan, group)[1])
    alone, _ = dist.new_subgroups(group_size=1)
    with pytest.raises(ValueError, match=r"`reduce_group` must hold .* \[0, 1\], got \[[01]\]"):
        attend(plan, group, reduce_group=alone)
    with pytest.raises(ValueError, match=r"`group` must be .* or the name of one, got 'nobody'"):
        attend(plan, "nobody")
    only_0 = dist.new_group([0])
    if group.rank() == 1:
        with pytest.raises(
            TypeError, match=r"`group` must be .* of which this process is a member"
        ):
            attend(plan, only_0)


def test_groups(ranks_of):
    ranks_of(2).run(run_groups)


def test_no_default_group():
    with pytest.raises(ValueError, match=r"`group` must be .* call .*init_process_group first"):
        attend(plan_rank(CAUSAL, 1, 0, OPTIONS), None)


# Arguments of one rank


def run_bad_calls(group):
    rank_plan = plan_rank(AttnSlices.causal(64), 1, 0, OPTIONS)
    plan = rank_plan.tensors("cpu")
    x = torch.zeros(64, 4, 8)
    bad = {
        r"`q` must be \[seqlen_local, nheads, head_dim\], got shape \[64, 4\]": (x[..., 0], x, x),
        "`k` must have the 64 keys of the plan, got 63; take those of": (x, x[:63], x[:63]),
        r"`v` must have the tokens and heads of `k`, \[64, 4\], got \[63, 4\]": (x, x, x[:63]),
        "`k` must have the head_dim of `q`, 8, got 7": (x, x[..., :7], x),
        r"`v` must have the tokens and heads of `k`, \[64, 4\], got \[64, 2\]": (x, x, x[:, :2]),
        "`q` must have a multiple of the heads of `k`, 3, got 4": (x, x[:, :3], x[:, :3]),
        "`k` must have at least 1 head, got 0": (x, x[:, :0], x[:, :0]),
        "`q` must have the 64 rows of the plan, got 32; take those of": (x[:32], x[:32], x[:32]),
        "`q` must have the 64 rows of the plan, got 0": (x[:0], x[:0], x[:0]),
        "`k` must have the dtype of `q`": (x, x.bfloat16(), x),
        "`q` must be float32, bfloat16 or float16": (x.long(), x.long(), x.long()),
        "`v` must be on the device of `q`, cpu, got meta": (x, x, x.to("meta")),
        "`plan` must be on the device of `q`, meta, got cpu": (x.to("meta"),) * 3,
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=message):
            context_parallel_attention(*tensors, plan, group)
    kinds = {
        "`plan` must be PlanTensors, got RankPlan; take": (x, x, x, rank_plan, group),
        "`plan` must be PlanTensors, got Tensor": (x, x, x, plan.data, group),
        "`q` must be a tensor, got RankPlan": (rank_plan, x, x, plan, group),
        "`k` must be a tensor, got PlanTensors": (x, plan, x, plan, group),
        "`group` must be a process group .*, got int": (x, x, x, plan, 0),
    }
    for message, arguments in kinds.items():
        with pytest.raises(TypeError, match=message):
            context_parallel_attention(*arguments)
    with pytest.raises(ValueError, match=r"`plan.meta` must stay on the CPU, got meta"):
        context_parallel_attention(x, x, x, plan._replace(meta=plan.meta.to("meta")), group)
    with pytest.raises(ValueError, match=r"`kernel` must be one of .* got 'fast'"):
        context_parallel_attention(x, x, x, plan, group, kernel="fast")
    with pytest.raises(ValueError, match=r"`collective` must be one of .* got 'fast'"):
        context_parallel_attention(x, x, x, plan, group, collective="fast")


def test_bad_calls(ranks_of):
    ranks_of(1).run(run_bad_calls)


# Planning


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((CAUSAL, 2, 2), ValueError, r"`rank` must be in \[0, cp_size = 2\), got 2"),
        ((CAUSAL, 2, -1), ValueError, "`rank` must be at least 0, got -1"),
        ((CAUSAL, 2, 1.0), TypeError, "`rank` must be an int, got 1.0"),
        ((CAUSAL, 0, 0), ValueError, "`cp_size` must be at least 1, got 0"),
        ((CAUSAL, 2.0, 0), TypeError, "`cp_size` must be an int, got 2.0"),
        ((CAUSAL.to_dense(), 2, 0), TypeError, "`slices` must be AttnSlices, got Tensor; make"),
        ((CAUSAL, 2, 0, {"degree": 1}), TypeError, "must be ContextParallelOptions, got dict"),
    ],
)
def test_bad_plans(arguments, error, message):
    with pytest.raises(error, match=message):
        plan_rank(*arguments)


def test_a_block_mask_is_no_slices():
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 128, 128, device="cpu")
    with pytest.raises(TypeError, match=r"got BlockMask; .*slices_from_block_mask"):
        plan_rank(mask, 2, 0)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("chunk_size", 0, ValueError, "`chunk_size` must be at least 1, got 0"),
        ("chunk_size", 16.0, TypeError, "`chunk_size` must be an int, got 16.0"),
        ("degree", -1, ValueError, "`degree` must be at least 0, got -1"),
        ("backward_degree", 1.5, TypeError, "`backward_degree` must be an int, got 1.5"),
    ],
)
def test_bad_options(name, value, error, message):
    with pytest.raises(error, match=message):
        ContextParallelOptions(**{name: value})


# Sizes that are no mistake


def run_nothing(group):
    for slices in (AttnSlices.full(0), AttnSlices.from_cu_seqlens([0], causal=True)):
        out, grad = attend(plan_rank(slices, group.size(), group.rank()), group)
        assert len(out) > 0  # rows of padding
        assert not out.any()
        assert not grad.any()


def test_no_tokens(ranks_of):
    ranks_of(2).run(run_nothing)


@pytest.mark.parametrize(
    ("size", "tokens", "chunk_size"),
    [(4, 3, 1), (4, 3, None), (3, 100, 7), (2, 65, 64), (3, 1, 5)],
)
def test_sizes_that_do_not_divide(ranks_of, size, tokens, chunk_size):
    case = replace(varlen("causal", [tokens], 1), heads=Heads(4, 2, 16, 16))
    options = ContextParallelOptions(chunk_size=chunk_size)
    ranks_of(size).run(run_on_ranks, case, options, torch.float32)
