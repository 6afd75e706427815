"""Group collectives against plain indexing of what all ranks hold."""

from types import SimpleNamespace

import pytest
import torch

from magi_compile.dtensor.transport import collectives
from magi_compile.dtensor.transport.all_to_all import Order
from magi_compile.dtensor.transport.collectives import (
    COLLECTIVES,
    Route,
    refuse_to_be_recorded,
    select,
)
from magi_compile.dtensor.transport.native.pulls import Pulls

ROWS = 12
CPU = torch.device("cpu")


def cast(x, route, group):
    """The buffer of one cast, by the collective that is chosen for a CPU."""
    casts = select("auto", group, CPU).casts([x], [route], group)
    (buffer,) = next(casts).wait()
    assert next(casts, None) is None
    return buffer


def reduce(x, route, group):
    """The sums of one reduce, by the collective that is chosen for a CPU."""
    total = x.new_empty(ROWS, *x.shape[1:])
    select("auto", group, CPU).start_reduce([x], route, group).write_sums([total])
    return total


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
        counts = [len(wanted[peer][rank]) for peer in range(size)], list(map(len, wanted[rank]))
        ranges = torch.tensor(sends[rank] + recvs[rank]).view(-1, 4).int()
        result.append(Route.of(ranges, ranges, len(sends[rank]), *counts, peak))
    return wanted, buffer_rows, result


def values_of(rank, dtype, *shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def run_cast(group, dtype, shape, is_empty):
    rank, size = group.rank(), group.size()
    wanted, buffer_rows, all_routes = routes(size, 0, is_empty)
    buffer = cast(values_of(rank, dtype, *shape), all_routes[rank], group)
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
    total = reduce(buffers[rank], all_routes[rank], group)
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


def run_route_in_ranges(group):
    """Ranges of more than one row, to the rank itself too, and a buffer in the order of arrival."""
    size, rank = group.size(), group.rank()
    sends = [[peer, 2, 3 * rank, 3] for peer in range(size)]
    recvs = [[peer, 3 * peer, 2, 3] for peer in range(size)]
    ranges = torch.tensor(sends + recvs).int()
    route = Route.of(ranges, ranges, size, [3] * size, [3] * size, 3 * size)
    buffer = cast(values_of(rank, torch.float32, 2), route, group)
    expected = [values_of(peer, torch.float32, 2)[2:5] for peer in range(size)]
    assert torch.equal(buffer, torch.cat(expected))


def test_cast_of_ranges(ranks_of):
    ranks_of(3).run(run_route_in_ranges)


class Refuses:
    """A collective that cannot serve."""

    def refusals(self, group, device):
        return [f"has no {device}"]


def run_select(group):
    assert select("all_to_all", group, CPU).name == "all_to_all"
    with pytest.raises(ValueError, match=r"`collective` must be one of auto, .*, got 'ring'"):
        select("ring", group, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COLLECTIVES, "refuses", f"{__name__}:Refuses")
        patch.setitem(COLLECTIVES, "missing", "magi_compile.dtensor.no_such_module:Nothing")
        with pytest.raises(NotImplementedError, match="refuses: has no cpu"):
            select("refuses", group, CPU)
        with pytest.raises(NotImplementedError, match="missing: cannot be imported"):
            select("missing", group, CPU)


def test_select(ranks_of):
    ranks_of(1).run(run_select)


def test_nothing_is_made_while_a_graph_is_captured(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_to_be_recorded(on_gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_to_be_recorded(torch.zeros(1))
    with pytest.raises(RuntimeError, match="run one warm-up step before the capture"):
        refuse_to_be_recorded(on_gpu)


def test_tables_are_not_made_while_a_graph_is_captured(monkeypatch):
    route = Route.of_peers(0, [[0, 1]] * 2, 3, CPU)
    order, pulls = Order(route, 0), Pulls(route.host_recvs.tolist(), 0, 2, CPU)
    made = Order(route, 0).sums(3)
    assert made is not None
    monkeypatch.setattr(collectives, "is_recorded", lambda device: True)
    for ask in (
        lambda: order.sends.travelling,
        lambda: order.recvs.staying,
        lambda: order.sums(3),
        lambda: pulls.places,
    ):
        with pytest.raises(RuntimeError, match="run one warm-up step before the capture"):
            ask()
