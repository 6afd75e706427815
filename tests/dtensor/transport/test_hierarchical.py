"""Casts and reduces by way of relays equal those without, bit for bit, and cross hosts once for each of them."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.call.execution import routes_of, unpack
from magi_compile.dtensor.planning.cost import DEFAULT_COST
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.dtensor.sequence.explain import explain_plan
from magi_compile.dtensor.transport.all_to_all import AllToAll
from magi_compile.dtensor.transport.collectives import select
from magi_compile.dtensor.transport.hierarchical import Hierarchical
from tests.dtensor.support.across_ranks import run_on_ranks, shard
from tests.dtensor.support.masks import LAST_SEES_ALL, SQUARE
from tests.dtensor.support.wanted import expected_buffer, home_rows
from tests.support.cases import HeadShape

CPU = torch.device("cpu")
HEADS = HeadShape(4, 2, 16, 16)
#: Ranks and their hosts; two levels of 4 and of 8 processes, and hosts that are no neighbours or have unequal numbers.
TOPOLOGIES = [
    pytest.param((0, 0, 1, 1), id="2x2"),
    pytest.param((0, 1, 0, 1), id="apart"),
    pytest.param((0, 0, 0, 1), id="3+1"),
    pytest.param((0, 0, 0, 0, 1, 1, 1, 1), id="2x4", marks=pytest.mark.slow),
]


def options_of(hosts, degree=0, **others):
    degrees = {"degree": degree, "backward_degree": degree}
    return ContextParallelOptions(chunk_size=8, hosts=hosts, hierarchical=True, **degrees, **others)


class Counted:
    """Counts the bytes that a rank sends to other hosts in `all_to_all_single`."""

    def __init__(self, group, hosts):
        self.bytes, self._rank, self._hosts = 0, group.rank(), hosts
        self._exchange = dist.all_to_all_single

    def __call__(self, incoming, outgoing, recv, send, group, **options):
        width = outgoing.shape[1] * outgoing.element_size()
        mine = self._hosts[self._rank]
        self.bytes += width * sum(n for peer, n in enumerate(send) if self._hosts[peer] != mine)
        return self._exchange(incoming, outgoing, recv, send, group, **options)


def run_cast_and_reduce(group, case, hosts, options, dtype):
    rank, size = group.rank(), group.size()
    plans = [plan_rank(case.slices(), size, r, options) for r in range(size)]
    device_plans = [unpack(*plan.tensors("cpu")) for plan in plans]
    routes = [routes_of(plan.forward) for plan in device_plans]
    num_rows = device_plans[0].key_rows
    shapes = [(2, 3), (5,)]
    home = [
        [home_rows(r, num_rows, x, dtype, i) for i, x in enumerate(shapes)] for r in range(size)
    ]
    found = []
    for collective in (AllToAll(), Hierarchical()):
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(group, hosts)
            patch.setattr(dist, "all_to_all_single", counted)
            buffers = [cast.wait() for cast in collective.casts(home[rank], routes[rank], group)]
            of_casts, counted.bytes = counted.bytes, 0
            prior, of_reduces = None, []
            for stage, buffer in enumerate(buffers):
                outs = [x.new_zeros(num_rows, *x.shape[1:], dtype=torch.float32) for x in buffer]
                # What ranks add to a row is not what they have got.
                grads = [x * (1 + rank) + stage for x in buffer]
                reducing = collective.start_reduce(grads, routes[rank][stage], group)
                reducing.write_sums(outs, prior)
                prior = outs
                of_reduces.append(outs)
            found.append((buffers, of_reduces, of_casts, counted.bytes))
    for stage, route in enumerate(routes[rank]):
        for i, buffer in enumerate(found[0][0][stage]):
            assert torch.equal(buffer, expected_buffer(route, [x[i] for x in home]))
    for flat, relayed in zip(*(itertools.chain(*x[0], *x[1]) for x in found), strict=True):
        assert torch.equal(flat, relayed)
    return [x[2:] for x in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("name", ["varlen_causal", "shared_prefix", "full_63x63"])
@pytest.mark.parametrize("hosts", TOPOLOGIES)
def test_bits_are_those_of_all_to_all(ranks_of, hosts, name, degree, dtype):
    case = SQUARE[name]
    options = options_of(hosts, degree)
    sent = ranks_of(len(hosts)).run(run_cast_and_reduce, case, hosts, options, dtype)
    flat, relayed = ([sum(rank[way][i] for rank in sent) for i in range(2)] for way in range(2))
    # A row of gradients goes back where a row of keys came from.
    assert flat[0] == flat[1] >= relayed[0] == relayed[1]
    assert flat[0] > relayed[0] or name != "full_63x63"
    plan = plan_rank(case.slices(), len(hosts), 0, options)
    told = explain_plan(plan, DEFAULT_COST)
    row = 11 * dtype.itemsize
    assert told.crossing_rows_apart * row == flat[0]
    assert "which hands it on" in str(told)
    # Those who need a row in different stages get it apart.
    assert (
        told.crossing_rows[0] * row == relayed[0] and told.relayed == (True, True)
    ) or degree == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("degree", [0, 2])
@pytest.mark.parametrize("hosts", TOPOLOGIES)
def test_bits_of_rows_that_are_staged(ranks_of, hosts, degree, dtype):
    """One rank needs what others of its host receive for it."""
    options = options_of(hosts, degree, strategy="sequential")
    case = replace(LAST_SEES_ALL, heads=HEADS)
    ranks_of(len(hosts)).run(run_cast_and_reduce, case, hosts, options, dtype)
    ranks_of(len(hosts)).run(run_attention, case, options, dtype)
    if dtype == torch.float32:
        ranks_of(len(hosts)).run(run_with, case, options, dtype, {"collective": "hierarchical"})


def run_attention(group, case, options, dtype, device="cpu"):
    """Both collectives on the same plan, with a kernel whose bits are always the same."""
    torch.use_deterministic_algorithms(device != "cpu")
    try:
        check_attention(group, case, options, dtype, device)
    finally:
        torch.use_deterministic_algorithms(False)


def check_attention(group, case, options, dtype, device):
    plan = plan_rank(case.slices(), group.size(), group.rank(), options)
    inputs, where = case.inputs(dtype, device), plan.dispatch.positions(group.rank())
    results = []
    for name in ("all_to_all", "hierarchical"):
        torch.manual_seed(0)  # of padding
        q, k, v = (shard(x, where).requires_grad_() for x in inputs[:3])
        attended = context_parallel_attention(
            *(q, k, v, plan.tensors(device), group), collective=name
        )
        dout = torch.randn(attended.out.shape, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad(attended.out, (q, k, v), dout.to(device, dtype))
        results.append([attended.out, attended.lse, *grads])
    for flat, relayed in zip(*results, strict=True):
        assert torch.equal(flat, relayed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hosts", TOPOLOGIES)
def test_attention_has_the_bits_of_all_to_all(ranks_of, hosts, dtype):
    for name, degree in (("varlen_causal", 0), ("shared_prefix", 1), ("holes", 2)):
        case = replace(SQUARE[name], heads=HEADS)
        ranks_of(len(hosts)).run(run_attention, case, options_of(hosts, degree), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 0, 1)], ids=str)
def test_on_gpus(gpu_ranks_of, hosts):
    """GPUs of one host that are said to be on several."""
    ranks = gpu_ranks_of(len(hosts))
    heads = HeadShape(4, 2, 64, 64)
    for name, degree in (("varlen_causal", 0), ("shared_prefix", 1), ("causal_129x129", 0)):
        case = replace(SQUARE[name], heads=heads)
        ranks.run(run_attention, case, options_of(hosts, degree), torch.bfloat16, "cuda")
        chosen = {"collective": "hierarchical", "device": "cuda"}
        ranks.run(run_with, case, options_of(hosts, degree), torch.bfloat16, chosen)
    staged, options = replace(LAST_SEES_ALL, heads=heads), options_of(hosts, strategy="sequential")
    ranks.run(run_attention, staged, options, torch.bfloat16, "cuda")


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "name", ["varlen_causal", "holes", "nobody_sees_anything", "causal_129x129"]
)
def test_attention_across_hosts(ranks_of, name, is_compiled):
    case, hosts = replace(SQUARE[name], heads=HEADS), (0, 0, 1, 1)
    for dtype in (torch.bfloat16, torch.float32):
        chosen = {"collective": "hierarchical", "is_compiled": is_compiled}
        ranks_of(4).run(run_with, case, options_of(hosts), dtype, chosen)


def run_with(group, case, options, dtype, chosen):
    run_on_ranks(group, case, options, dtype, **chosen)


def run_forward_alone(group, case, hosts):
    """Only the forward has legs, as where stages hide what a backward moves."""
    size, rank = group.size(), group.rank()
    both = plan_rank(case.slices(), size, rank, options_of(hosts))
    backward = [stage.without_legs() for stage in both.backward]
    found = {"digest": both.digest + 1, "backward": backward, "relayed": (True, False)}
    plan = replace(both, **found, _packed={})
    results, inputs = [], case.inputs(torch.bfloat16, "cpu")
    where = plan.dispatch.positions(rank)
    for of_plan in (both, plan):
        torch.manual_seed(0)
        q, k, v = (shard(x, where).requires_grad_() for x in inputs[:3])
        out = context_parallel_attention(q, k, v, of_plan.tensors("cpu"), group).out
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    device_plan = unpack(*plan.tensors("cpu"))
    assert device_plan.relayed == (True, False)
    assert all(route.legs for route in routes_of(device_plan.forward))
    assert not any(route.legs for route in routes_of(device_plan.backward))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_forward_alone(ranks_of):
    case = replace(SQUARE["shared_prefix"], heads=HEADS)
    ranks_of(4).run(run_forward_alone, case, (0, 0, 1, 1))


def run_select(group):
    assert select("auto", group, CPU).name == "all_to_all"
    assert select("auto", group, CPU, has_legs=True).name == "hierarchical"
    assert select("all_to_all", group, CPU, has_legs=True).name == "all_to_all"
    with pytest.raises(NotImplementedError, match="'hierarchical' needs a plan of several hosts"):
        select("hierarchical", group, CPU)


def test_select(ranks_of):
    ranks_of(1).run(run_select)
