"""Wrong use across ranks is an error that says what is wrong:
the same one on every rank where ranks do not fit each other."""

import datetime
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask

from magi_compile import _compat
from magi_compile.dtensor import (
    CostModel,
    calibrate,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    plan,
)
from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.dtensor.ranks import agreement
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.across_ranks import OPTIONS, run_on_ranks
from tests.support.cases import HeadShape, varlen

causal = AttnSlices.causal
CAUSAL = causal(96)


def attend(plan, group, **options):
    x = torch.ones(plan.dispatch.seqlen_local, 2, 16, requires_grad=True)
    out, *_ = context_parallel_attention(x, x, x, plan.tensors("cpu"), group, **options)
    (grad,) = torch.autograd.grad(out.sum(), x)
    return out, grad


# Plans that do not fit: in `plans`, mask, cp_size and rank by rank.


def run_plans(group, plans):
    """The error of an attention by these plans; one by the right plan works afterwards."""
    slices, size, rank = plans[group.rank()]
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
            "each rank's own, but rank 0 has the plan of rank 1, rank 1 has the plan of rank 0; call "
            "plan_rank with rank=group.rank()",
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


def run_and_drift(group):
    """The error of the last of many steps, each with a mask of its own."""
    for length in range(97, 117):
        attend(plan_rank(causal(length), 2, group.rank(), OPTIONS), group)
    with pytest.raises(ValueError) as raised:
        attend(plan_rank(causal(100 + group.rank()), 2, group.rank(), OPTIONS), group)
    return str(raised.value)


def test_masks_that_differ_late(ranks_of):
    first, second = ranks_of(2).run(run_and_drift)
    assert first == second
    assert "every rank must plan the same mask" in first


def tensors(rows, **given):
    given = {"dtype": torch.float32, "heads": 4, "groups": 2, "size": 16, "size_v": 16} | given
    q = torch.ones(rows, given["heads"], given["size"], dtype=given["dtype"], requires_grad=True)
    k = q.detach()[:, : given["groups"]]
    v = k.new_ones(rows, given["groups"], given["size_v"])
    return q, k, v


SHARED = ("softmax_scale", "softcap", "collective", "batch_entries")


def run_calls(group, calls):
    """The error of a call with tensors and options that the ranks do not have in common; the next call is right."""
    given = dict(calls[group.rank()])
    options = {x: given.pop(x) for x in SHARED if x in given}
    plan = plan_rank(CAUSAL, group.size(), group.rank(), OPTIONS)
    rows = given.pop("rows", plan.dispatch.seqlen_local)
    with pytest.raises(ValueError) as raised:
        context_parallel_attention(
            *(*tensors(rows, **given), plan.tensors("cpu"), group), **options
        )
    attend(plan, group)
    return str(raised.value)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            [{"dtype": torch.bfloat16}, {"dtype": torch.float16}],
            "the dtype of `q`, `k` and `v` must be the same on all ranks of `group`, but rank 1 has "
             "torch.float16 and rank 0 has "
            "torch.bfloat16",
        ),
        ([{}, {"dtype": torch.bfloat16}], "rank 1 has torch.bfloat16 and rank 0 has torch.float32"),
        ([{}, {"heads": 8}], "the heads of `q` must be the same on all ranks of `group`, but"),
        ([{}, {"groups": 4}, {}], "the heads of `k` and `v` must be .* rank 1 has 4 and rank 0 has 2"),
        ([{"size": 8}, {}], "the head_dim of `q` and `k` must be .* rank 1 has 16 and rank 0 has 8"),
        ([{"size_v": 8}, {}], "the head_dim of `v` must be"),
        ([{"rows": 96}, {}], "the rows of `q` must be .* rank 1 has 48 and rank 0 has 96"),
        ([{"softmax_scale": 0.5}, {}], "the scale of the scores must be .* 0.25 and rank 0 has 0.5"),
        ([{"softcap": 30.0}, {}], "`softcap` must be .* rank 1 has 0.0 and rank 0 has 30.0"),
        ([{"batch_entries": 2}, {}], "the batch entries of `q`, `k` and `v` must be .* 1 and rank 0 has 2"),
        ([{"collective": "all_to_all"}, {}], "`collective` must .* auto and rank 0 has all_to_all"),
    ],
)  # fmt: skip
def test_ranks_that_bring_other_tensors(ranks_of, calls, message):
    first, *others = ranks_of(len(calls)).run(run_calls, calls)
    assert re.search(message, first)
    assert others == [first] * len(others)


def run_passes(group):
    """Rank 1 calls a forward where rank 0 is in the backward."""
    plan = plan_rank(CAUSAL, 2, group.rank(), OPTIONS)
    q, k, v = tensors(plan.dispatch.seqlen_local)
    out, *_ = context_parallel_attention(q, k, v, plan.tensors("cpu"), group)

    def forward():
        context_parallel_attention(q, k, v, plan.tensors("cpu"), group)

    with pytest.raises(
        ValueError, match="same pass, but rank 1 has forward and rank 0 has backward"
    ):
        (forward if group.rank() else out.sum().backward)()


def test_ranks_in_other_passes(ranks_of):
    ranks_of(2).run(run_passes)


def run_alone(group):
    few = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if group.rank():
        return
    with pytest.raises(RuntimeError, match="rank 0 has not heard of rank 1 in a forward"):
        attend(plan_rank(CAUSAL, 2, 0, OPTIONS), few)


def test_rank_that_calls_alone(ranks_of):
    ranks_of(2).run(run_alone)


# Tensors on GPUs: hosts are asked, by the store where the group has no CPU backend, and calls of a known kind are not
# compared.


def run_on_gpus(group, has_cpu_backend):
    """How often this rank asks; the errors of a new kind of call, of calls in another order,
    and of other numbers of calls."""
    few = dist.new_group(timeout=datetime.timedelta(seconds=2))
    patch, store = pytest.MonkeyPatch(), _compat.store_of(few)
    timeout = store.timeout
    if not has_cpu_backend:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    patch.setattr(agreement, "is_recorded", lambda device: False)
    exchanges, exchange = [], agreement._exchange
    patch.setattr(agreement, "_exchange", lambda *x: exchanges.append(1) or exchange(*x))
    kinds = [
        agreement.Agreement(plan, 2, 0, 1, 4, 2, 16, 16, 48, 48, 0, 0, 0.25, 0.0)
        for plan in range(100)
    ]

    def call(number, **options):
        kind = kinds[number]._replace(**options)
        agreement.require_agreement(kind, group.rank(), few, few.group_name, torch.device("cuda"))

    def error(number, **options):
        with pytest.raises(ValueError) as raised:
            call(number, **options)
        return str(raised.value)

    try:
        counts = []
        for number in (0, 0, 1, 0, 1, *[1] * 123):
            call(number)
            counts.append(len(exchanges))
        assert counts == [1, 1, *[2] * 61, *[3] * 64, 4]
        errors = [error(2, dtype=group.rank()), error(2 + group.rank())]
        call(group.rank())  # both are known
        errors.append(error(9))
        if group.rank():
            call(0)
        errors.append(error(10))
        patch.setattr(agreement, "is_recorded", lambda device: True)
        call(0)
        with pytest.raises(RuntimeError, match="compares the ranks, which a CUDA graph cannot"):
            call(11)
        patch.setattr(agreement, "is_recorded", lambda device: False)
        store.set_timeout(datetime.timedelta(seconds=1))
        if not group.rank():
            with pytest.raises(RuntimeError, match="rank 0 has not heard of rank 1 in a forward"):
                call(12)
    finally:
        store.set_timeout(timeout)
        patch.undo()
    return errors


@pytest.mark.parametrize("has_cpu_backend", [True, False])
def test_calls_with_tensors_on_gpus(ranks_of, has_cpu_backend):
    first, second = ranks_of(2).run(run_on_gpus, has_cpu_backend)
    assert first == second
    for message, found in zip(
        [
            "rank 1 has torch.bfloat16 and rank 0 has torch.float32",
            "every rank must plan the same mask",
            r"the same attentions in the same order, but ranks \[1\] have called others",
            "equally often, but rank 1 has call 134 and rank 0 has call 133",
        ],
        first,
        strict=True,
    ):
        assert re.search(message, found), found


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
    with pytest.raises(TypeError, match="`share` must be a list, got int"):
        context_parallel_attention(x, x, x, plan, group, share=3)
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


def run_other_kinds(group):
    p, padded = (plan(causal(n), group, options=OPTIONS) for n in (96, 90))
    x, q = torch.zeros(1, 96), torch.zeros(1, 2, 96, 8)
    tokens, short = x.long(), x[:, :90].long()
    with torch.inference_mode():
        inferred = torch.zeros(1, 96)
    block = {"mesh": group, "mask": causal(96), "buffers": [x], "buffer_seq_dims": [1]}
    size = {"group": group, "device": "cpu", "dtype": torch.float32, "repeats": 1, "seqlen": 8}

    def enter(**others):
        with context_parallel(**block | others):
            pass

    def calibrated(**others):
        calibrate(**size | {"nheads_q": 2, "nheads_kv": 1, "head_dim": 8} | others)

    spread, gather = context_parallel_shard, context_parallel_unshard
    for message, call in {
        "`buffers` must be a list, got int": lambda: enter(buffers=3),
        "`buffers` must be a list, got BlockMask": lambda: enter(buffers=p.block_mask),
        "`buffer_seq_dims` must be a list, got int": lambda: enter(buffer_seq_dims=1),
        "`buffer_seq_dims[0]` must be an int, got None": lambda: enter(buffer_seq_dims=[None]),
        "`buffer_seq_dims[0]` must be in [-2, 2), the dimensions of its buffer, got 2": lambda: (
            enter(buffer_seq_dims=[2])
        ),
        "`buffers` must hold a tensor over the sequence where `mask` is None": lambda: enter(
            mask=None, buffers=[], buffer_seq_dims=[]
        ),
        "`mask` must be a BlockMask, AttnSlices, a mask_mod or None, got int": lambda: enter(
            mask=3, buffers=[], buffer_seq_dims=[]
        ),
        "`buffer_padding` must be a list, got int": lambda: enter(buffer_padding=0),
        "`buffer_padding[0]` must be a number, got 'x'": lambda: enter(buffer_padding=["x"]),
        "`no_restore_buffers` must be a list or a set, got int": lambda: enter(
            no_restore_buffers=3
        ),
        "`no_restore_buffers` must be a list or a set, got Tensor": lambda: enter(
            no_restore_buffers=x
        ),
        "`masks[1]` must be a BlockMask, AttnSlices, a mask_mod or None, got int": lambda: plan(
            masks=[causal(96), 3], mesh=group
        ),
        "`masks['x']` must be a BlockMask, AttnSlices, a mask_mod or None, got int": lambda: plan(
            masks={"x": 3}, mesh=group
        ),
        "`score_mod` must be a function of score, b, h, q and kv": lambda: p.attention(
            q, q, q, score_mod=lambda score: score + 1
        ),
        "`buffers` must be a list, got NoneType": lambda: spread(group, None, [0], p),
        "`buffers['x']` must be a tensor or a BlockMask, got int": lambda: spread(
            group, {"x": 1}, {"x": 0}, p
        ),
        "`seq_dims` must be a list, got int": lambda: spread(group, [x], 1, p),
        "`seq_dims[0]` must be an int, got '1'": lambda: spread(group, [x], ["1"], p),
        "`plan` must be a SequencePlan, or a list or dict of them, got AttnSlices": lambda: spread(
            group, [x], [1], causal(96)
        ),
        "`buffers[0]` must be a tensor, got BlockMask": lambda: gather(
            group, [p.block_mask], [None], p
        ),
        "`buffers[0]` must not be a tensor of torch.inference_mode outside of that mode": lambda: (
            enter(buffers=[inferred])
        ),
        "`dim` must be an int for `x`, got True": lambda: p.shard(x, True),
        "`padding` must be a number, got None": lambda: p.shard(x, 1, padding=None),
        "`padding` must fit in torch.int64, got nan": lambda: padded.shard(
            short, 1, padding=math.nan
        ),
        "`padding` must fit in torch.float32, got 1000": lambda: p.shard(x, 1, padding=10**400),
        **{
            f"`padding` must fit in {dtype}, got {value}": lambda value=value, dtype=dtype: p.shard(
                x.to(dtype), 1, padding=value
            )
            for dtype, value in [
                *((torch.int64, value) for value in (-100.7, 0.5, True, math.inf, 1 << 63)),
                *((torch.uint8, 300), (torch.bool, 2), (torch.bool, 0.5), (torch.float16, 1e5)),
            ]
        },
        "`buffer_padding[0]` must fit in torch.int64, got -100.7": lambda: enter(
            buffers=[tokens], buffer_padding=[-100.7]
        ),
        "`tokens` must be integers, got dtype torch.bool": lambda: p.labels(x.bool()),
        "`is_shifted` must be True or False, got 1": lambda: p.labels(tokens, is_shifted=1),
        "`ignore_index` must be an int, got nan": lambda: p.labels(tokens, ignore_index=math.nan),
        "`ignore_index` must fit in the dtype of `tokens`, torch.uint8, got -100": lambda: p.labels(
            tokens.byte()
        ),
        "`restore` must be True or False, got 'x'": lambda: p.permutation("x"),
        "`x` must be a tensor, got float": lambda: p.sum(1.0),
        "`cost` must be a CostModel or None, got int": lambda: p.explain(3),
        "`other` must be a SequencePlan or its keys, got None": lambda: p.has_the_tokens_of(None),
        "`scale` must be a number, got 'x'": lambda: p.attention(q, q, q, scale="x"),
        "`scale` must be finite, got nan": lambda: p.attention(q, q, q, scale=math.nan),
        "`weights` must be a list, got int": lambda: plan(
            masks=[causal(96)], mesh=group, weights=3
        ),
        "`collective` must be a name, got []": lambda: calibrated(collective=[]),
        "`nheads_q` must be at least 1, got 0": lambda: calibrated(nheads_q=0),
        "`nheads_kv` must be at least 1, got 0": lambda: calibrated(nheads_kv=0),
        "`nheads_q` must be a multiple of `nheads_kv`, 2, got 3": lambda: calibrated(
            nheads_q=3, nheads_kv=2
        ),
        "`repeats` must be at least 1, got 0": lambda: calibrated(repeats=0),
        "`dtype` must be float32, bfloat16 or float16, got 3": lambda: calibrated(dtype=3),
        "`device` must be a device or the name of one, got 'x'": lambda: calibrated(device="x"),
        "`group` must be a process group": lambda: calibrated(group=0),
    }.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()


def test_arguments_of_other_kinds(ranks_of):
    ranks_of(1).run(run_other_kinds)


# Planning


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CostModel(math.nan, 1e-9), ValueError, "`seconds_per_area` must be finite"),
        (lambda: CostModel(1e-12, -1.0), ValueError, "`seconds_per_row` must not be negative"),
        (lambda: CostModel(1e-12, 1e10), ValueError, "`seconds_per_row` must be at most 1e.09"),
        (lambda: CostModel(1e-12, "x"), TypeError, "`seconds_per_row` must be a number, got 'x'"),
        (lambda: CostModel(0, 0, starts_early=1), TypeError, "`starts_early` must be True or"),
        (lambda: CostModel.of_heads(0), ValueError, "`nheads_q` must be at least 1, got 0"),
        (
            lambda: CostModel.of_heads(nheads_q=3, nheads_kv=2),
            ValueError,
            "`nheads_q` must be a multiple of `nheads_kv`, 2, got 3",
        ),
        (lambda: CostModel.of_heads(1 << 64), ValueError, "`nheads_q` must fit in 64 bits"),
        (
            lambda: CostModel.of_heads(flops_per_second=0.0),
            ValueError,
            "`flops_per_second` must be more than 0, got 0",
        ),
        (lambda: ContextParallelOptions(slack=math.nan), ValueError, "`slack` must be finite"),
        (lambda: ContextParallelOptions(slack=-0.1), ValueError, "`slack` must not be negative"),
        (lambda: ContextParallelOptions(strategy="x"), ValueError, "`strategy` must be one of"),
        (lambda: ContextParallelOptions(strategy=3), TypeError, "`strategy` must be a name, got 3"),
        (lambda: ContextParallelOptions(early=1), TypeError, "`early` must be True or False"),
        (lambda: ContextParallelOptions(cost=3), TypeError, "`cost` must be a CostModel, got int"),
        (
            lambda: plan_rank(CAUSAL, 2, 0).tensors(None),
            TypeError,
            "`device` must be a device or the name of one, got None",
        ),
        (
            lambda: plan_rank(CAUSAL, 2, 0).dispatch.positions(2),
            ValueError,
            r"`rank` must be in \[0, cp_size = 2\), got 2",
        ),
    ],
)
def test_bad_numbers(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("rate", [0, 5e-324, 1e9])
def test_any_rates_plan(rate):
    """The choice of a degree falls back on something, whatever is predicted."""
    cost = CostModel(rate, rate, rate, rate, rate, rate, rate, rate, starts_early=True)
    options = ContextParallelOptions(cost=cost)
    assert len(plan_rank(causal(3000), 4, 1, options).dispatch.positions(1)) >= 750


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
    case = replace(varlen("causal", [tokens], 1), heads=HeadShape(4, 2, 16, 16))
    options = ContextParallelOptions(chunk_size=chunk_size)
    ranks_of(size).run(run_on_ranks, case, options, torch.float32)
