"""Group collectives against plain indexing of what all ranks hold."""

import pytest
import torch
import torch.distributed as dist

from magi_compile.dtensor.collectives import COLLECTIVES, select
from magi_compile.dtensor.group_ops import RouteTensors, group_cast, group_merge, group_reduce

ROWS = 12


def routes(size, seed, is_empty=False):
    """Random routes of all ranks: `wanted[r][s]` are the rows that r gets from s; buffers are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    wanted = []
    for _ in range(size):
        counts = torch.randint(0, 1 if is_empty else ROWS, (size,), generator=generator)
        wanted.append(
            [torch.randperm(ROWS, generator=generator)[: int(n)].sort().values for n in counts]
        )
    buffer_rows = [
        torch.randperm(sum(map(len, mine)), generator=generator).tolist() for mine in wanted
    ]
    sends, recvs = [[] for _ in range(size)], [[] for _ in range(size)]
    for receiver in range(size):
        arriving = iter(buffer_rows[receiver])
        for sender in range(size):
            for row in wanted[receiver][sender].tolist():
                buffer_row = next(arriving)
                sends[sender].append([receiver, row, buffer_row, 1])
                recvs[receiver].append([sender, buffer_row, row, 1])
    peak = max(map(len, recvs))
    result = []
    for rank in range(size):
        counts = [len(wanted[peer][rank]) for peer in range(size)] + list(map(len, wanted[rank]))
        runs = torch.tensor(sends[rank] + recvs[rank]).view(-1, 4)
        head = [len(sends[rank]), len(recvs[rank]), peak, *counts]
        host = torch.tensor(head + runs.flatten().tolist())
        result.append(RouteTensors(host, runs.int(), ROWS, len(recvs[rank])))
    return wanted, buffer_rows, result


def values_of(rank, dtype, *shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def run_cast(group, dtype, shape, is_empty):
    rank, size = group.rank(), group.size()
    wanted, buffer_rows, all_routes = routes(size, 0, is_empty)
    buffer = group_cast(values_of(rank, dtype, *shape), all_routes[rank], group.group_name)
    arrived = torch.cat(
        [values_of(peer, dtype, *shape)[wanted[rank][peer]] for peer in range(size)]
    )
    expected = torch.empty_like(arrived)
    expected[buffer_rows[rank]] = arrived
    assert buffer.dtype == dtype
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("is_empty", [False, True], ids=["rows", "nothing"])
@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("size", [1, 3])
def test_cast_moves_exactly_the_wanted_rows(ranks_of, size, dtype, shape, is_empty):
    ranks_of(size).run(run_cast, dtype, shape, is_empty)


def run_reduce(group, dtype):
    rank, size = group.rank(), group.size()
    wanted, buffer_rows, all_routes = routes(size, 1)
    buffers = []
    for peer in range(size):
        rows = all_routes[peer].num_received
        generator = torch.Generator().manual_seed(peer)
        buffers.append(torch.randn(rows, 2, 3, generator=generator).to(dtype))
    total = group_reduce(buffers[rank], all_routes[rank], group.group_name)
    expected = torch.zeros(ROWS, 2, 3)
    for peer in [rank, *(peer for peer in range(size) if peer != rank)]:
        before = sum(len(x) for x in wanted[peer][:rank])
        rows = wanted[peer][rank]
        expected[rows] += buffers[peer][buffer_rows[peer]][before : before + len(rows)].float()
    assert total.dtype == dtype
    assert torch.equal(total, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_sums_in_fp32_in_a_fixed_order(ranks_of, size, dtype):
    ranks_of(size).run(run_reduce, dtype)


def run_adjoint(group):
    """<cast(x), y> over all ranks equals <x, reduce(y)>: each is the other's gradient."""
    _, _, all_routes = routes(group.size(), 2)
    route = all_routes[group.rank()]
    x = values_of(group.rank(), torch.float32, 4).requires_grad_()
    buffer = group_cast(x, route, group.group_name)
    y = torch.randn_like(buffer).requires_grad_()
    (dx,) = torch.autograd.grad(buffer, x, y, retain_graph=True)
    total = group_reduce(y, route, group.group_name)
    assert torch.equal(dx, total)
    (dy,) = torch.autograd.grad(total, y, x)
    assert torch.equal(dy, buffer)


def test_cast_and_reduce_are_adjoint(ranks_of):
    ranks_of(3).run(run_adjoint)


def gathered(group, tensors, all_routes):
    """Every rank's tensor on every rank."""
    shapes = [(route.num_received, *tensors.shape[1:]) for route in all_routes]
    everybody = [torch.empty(shape) for shape in shapes]
    for rank, x in enumerate(everybody):
        if rank == group.rank():
            x.copy_(tensors.detach())
        dist.broadcast(x, rank, group)
    return everybody


def run_merge(group):
    rank, size = group.rank(), group.size()
    wanted, buffer_rows, all_routes = routes(size, 3)
    route = all_routes[rank]
    torch.manual_seed(rank)
    out = torch.randn(route.num_received, 2, 3).requires_grad_()
    lse = torch.randn(route.num_received, 2)
    lse[::4] = -torch.inf
    out.data[::4] = 0.0
    lse.requires_grad_()
    merged, merged_lse = group_merge(out, lse, route, group.group_name)

    # The same on one rank: a row's results side by side, merged with plain autograd.
    outs = [x.requires_grad_() for x in gathered(group, out, all_routes)]
    lses = [x.requires_grad_() for x in gathered(group, lse, all_routes)]
    parts = torch.zeros(size, size, ROWS, 2, 3)  # peer, home, row
    weights = torch.full((size, size, ROWS, 2), -torch.inf)
    for peer in range(size):
        home = torch.cat([torch.full((len(x),), i) for i, x in enumerate(wanted[peer])])
        rows = torch.cat(wanted[peer])
        index = torch.tensor(peer), home, rows
        parts = parts.index_put(index, outs[peer][buffer_rows[peer]])
        weights = weights.index_put(index, lses[peer][buffer_rows[peer]])
    is_seen = (weights > -torch.inf).any(0)
    total_lse = torch.logsumexp(weights.masked_fill(~is_seen, 0.0), 0)
    p = torch.exp(weights - total_lse).masked_fill(~is_seen, 0.0)
    total = (p[..., None] * parts).sum(0)
    total_lse = total_lse.masked_fill(~is_seen, -torch.inf)
    torch.testing.assert_close(merged, total[rank])
    torch.testing.assert_close(merged_lse, total_lse[rank])

    dout, dlse = torch.randn(size, ROWS, 2, 3), torch.randn(size, ROWS, 2)
    dist.broadcast(dout, 0, group)
    dist.broadcast(dlse, 0, group)
    expected = torch.autograd.grad((total, total_lse), (outs[rank], lses[rank]), (dout, dlse))
    actual = torch.autograd.grad((merged, merged_lse), (out, lse), (dout[rank], dlse[rank]))
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1].nan_to_num(0.0))


@pytest.mark.parametrize("size", [1, 3])
def test_merge_weighs_by_lse(ranks_of, size):
    ranks_of(size).run(run_merge)


def run_opcheck(group):
    _, _, all_routes = routes(group.size(), 4)
    route = all_routes[group.rank()]
    x = torch.randn(ROWS, 2, requires_grad=True)
    y = torch.randn(route.num_received, 2, requires_grad=True)
    out = torch.randn(route.num_received, 2, 3, requires_grad=True)
    ops, name = torch.ops.magi, group.group_name
    # One rank: opcheck runs an op an unequal number of times on ranks that fail.
    torch.library.opcheck(ops.group_cast, (x, *route, "auto", name))
    torch.library.opcheck(ops.group_reduce, (y, *route, "all_to_all", name))
    torch.library.opcheck(ops.group_merge, (out, y, *route, name))


def test_opcheck(ranks_of):
    ranks_of(1).run(run_opcheck)


def run_route_in_runs(group):
    """Runs longer than one row, to the rank itself too, and a buffer in the order of arrival."""
    size, rank = group.size(), group.rank()
    sends = [[peer, 2, 3 * rank, 3] for peer in range(size)]
    recvs = [[peer, 3 * peer, 2, 3] for peer in range(size)]
    counts = [3] * (2 * size)
    flat = [x for run in sends + recvs for x in run]
    host = torch.tensor([size, size, 3 * size, *counts, *flat])
    route = RouteTensors(host, torch.tensor(sends + recvs).int(), ROWS, 3 * size)
    buffer = group_cast(values_of(rank, torch.float32, 2), route, group.group_name, "all_to_all")
    expected = [values_of(peer, torch.float32, 2)[2:5] for peer in range(size)]
    assert torch.equal(buffer, torch.cat(expected))


def test_cast_of_runs(ranks_of):
    ranks_of(3).run(run_route_in_runs)


class Refuses:
    """A collective that can not serve."""

    def refusals(self, group, device):
        return [f"has no {device}"]


def run_select(group):
    cpu = torch.device("cpu")
    assert select("all_to_all", group, cpu).name == "all_to_all"
    with pytest.raises(ValueError, match=r"`collective` must be one of auto, .*, got 'ring'"):
        select("ring", group, cpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COLLECTIVES, "refuses", f"{__name__}:Refuses")
        patch.setitem(COLLECTIVES, "missing", "magi_compile.dtensor.no_such_module:Nothing")
        with pytest.raises(NotImplementedError, match="refuses: has no cpu"):
            select("refuses", group, cpu)
        with pytest.raises(NotImplementedError, match="missing: can not be imported"):
            select("missing", group, cpu)


def test_select(ranks_of):
    ranks_of(1).run(run_select)
