"""The native collective across GPUs: bit by bit what indexing gives, again and again, without waiting in between."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from magi_compile.dtensor.transport.collectives import select
from magi_compile.dtensor.transport.native import NativeCollective
from magi_compile.dtensor.transport.native.pulls import COPY_ENGINE, SMS
from tests.dtensor.support.wanted import (
    expected_buffer,
    expected_total,
    home_rows,
    random_ranges,
    routes_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"{size}gpus"),
]
ENGINES = pytest.mark.parametrize("engine", [COPY_ENGINE, SMS, None])

ROWS = 300
SHAPES = [(2, 64), (24,)]


def device_of(group):
    return torch.device("cuda", group.rank())


def everybodys(size, num_rows, dtype, step):
    """The home rows of all ranks, two tensors of each, on the CPU."""
    ranks = range(size)
    return [[home_rows(rank, num_rows, x, dtype, step) for rank in ranks] for x in SHAPES]


def run_casts(group, engine, dtype, num_rows, steps):
    device, rank = device_of(group), group.rank()
    collective = NativeCollective(engine)
    found = []
    for step in range(steps):
        homes = everybodys(group.size(), num_rows, dtype, step)
        routes = [
            routes_of(random_ranges(group.size(), num_rows, longest, seed), seed, device)[rank]
            for longest, seed in ((5, step), (200, step + 1))
        ]
        mine = [x[rank].to(device) for x in homes]
        for route, cast in zip(routes, collective.casts(mine, routes, group), strict=True):
            found += zip(cast.wait(), homes, [route] * 2, strict=True)
        for x in mine:
            x.fill_(torch.nan if dtype.is_floating_point else -1)  # may change from here on
    for buffer, home, route in found:
        assert torch.equal(buffer.cpu(), expected_buffer(route, home))


@ENGINES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
def test_casts(gpu_ranks_of, size, engine, dtype):
    gpu_ranks_of(size).run(run_casts, engine, dtype, ROWS, 4)


def run_casts_of_growing_tensors(group):
    for num_rows in (1, 5000, 10, 40000):
        run_casts(group, None, torch.bfloat16, num_rows, 3)


def test_memory_grows(gpu_ranks_of, size):
    gpu_ranks_of(size).run(run_casts_of_growing_tensors)


def run_reduces(group, engine, dtype, steps):
    device, rank, size = device_of(group), group.rank(), group.size()
    collective = NativeCollective(engine)
    found, pending = [], None
    for step in range(steps):
        wanted = random_ranges(size, ROWS, 5 if step % 2 else 200, step)
        routes = routes_of(wanted, step, device)
        buffers = [
            [home_rows(peer, routes[peer].num_received, x, dtype, step) for peer in range(size)]
            for x in SHAPES
        ]
        totals = [home_rows(rank, ROWS, x, torch.float32, step + 99) for x in SHAPES]
        on_device = [x.to(device) for x in totals]
        mine = [x[rank].to(device) for x in buffers]
        started = collective.start_reduce(mine, routes[rank], group)
        if pending is not None:  # one is under way while the next starts
            pending[0].write_sums(pending[1], pending[1])
        pending = started, on_device
        expected = [
            expected_total(routes[rank], rank, *both) for both in zip(buffers, totals, strict=True)
        ]
        found += zip(on_device, expected, strict=True)
    pending[0].write_sums(pending[1], pending[1])
    for total, expected in found:
        assert torch.equal(total.cpu(), expected)


@ENGINES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_reduces(gpu_ranks_of, size, engine, dtype):
    gpu_ranks_of(size).run(run_reduces, engine, dtype, 6)


def run_late_ranks(group, engine):
    """Every rank is late in its turn, by more than the others need for two casts."""
    device, rank, size = device_of(group), group.rank(), group.size()
    collective = NativeCollective(engine)
    route = routes_of(random_ranges(size, ROWS, 50, 3), 3, device)[rank]
    homes = [
        [home_rows(peer, ROWS, (256,), torch.float32, step) for peer in range(size)]
        for step in range(4)
    ]
    mine = [home[rank].to(device) for home in homes]
    buffers = []
    for step in range(40):
        if step % size == rank:
            torch.cuda._sleep(3_000_000)
        (cast,) = collective.casts([mine[step % 4]], [route], group)
        buffers += cast.wait()
    for step, buffer in enumerate(buffers):
        assert torch.equal(buffer.cpu(), expected_buffer(route, homes[step % 4]))


@ENGINES
def test_late_ranks(gpu_ranks_of, size, engine):
    gpu_ranks_of(size).run(run_late_ranks, engine)


def run_in_new_threads(group):
    """As in the backward of autograd, whose thread may come here before it has used the device at all."""
    device, rank, size = device_of(group), group.rank(), group.size()
    collective = NativeCollective()
    routes = routes_of(random_ranges(size, ROWS, 50, 6), 6, device)
    homes = [home_rows(peer, ROWS, (64,), torch.float32) for peer in range(size)]
    mine = homes[rank].to(device)

    def cast():
        torch.cuda.set_device(device)
        (pending,) = collective.casts([mine], [routes[rank]], group)
        return pending.wait()

    for _ in range(2):
        with ThreadPoolExecutor(1) as executor:
            (buffer,) = executor.submit(cast).result()
        assert torch.equal(buffer.cpu(), expected_buffer(routes[rank], homes))


def test_new_threads(gpu_ranks_of, size):
    gpu_ranks_of(size).run(run_in_new_threads)


def run_in_a_graph(group, engine):
    """A graph that is replayed with new values and by ranks that are late in turn, between casts outside of it."""
    device, rank, size = device_of(group), group.rank(), group.size()
    collective = NativeCollective(engine)
    routes = routes_of(random_ranges(size, ROWS, 50, 4), 4)
    route = routes_of(random_ranges(size, ROWS, 50, 4), 4, device)[rank]
    x = torch.zeros(ROWS, 64, device=device)
    total = torch.zeros(ROWS, 64, device=device)

    def step():
        (cast,) = collective.casts([x], [route], group)
        (buffer,) = cast.wait()
        collective.start_reduce([buffer], route, group).write_sums([total], [total])
        return buffer

    too_early = pytest.raises(RuntimeError, match="run one warm-up step before the")
    too_large = partial(pytest.raises, RuntimeError, match="bytes and .* are needed: run one warm")
    with too_early, torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()
    step()
    wide = torch.zeros(ROWS, 1 << 14, device=device)
    with too_large(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        next(collective.casts([wide], [route], group))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer = step()
    homes = [
        [home_rows(peer, ROWS, (64,), torch.float32, index) for peer in range(size)]
        for index in range(4)
    ]
    mine = [home[rank].to(device) for home in homes]
    found = []
    for index in range(20):
        if index % size == rank:
            torch.cuda._sleep(1_000_000)
        x.copy_(mine[index % 4])
        total.zero_()
        graph.replay()
        found.append((buffer.clone(), total.clone()))
        if index % 3 == 2:
            step()
    zero = torch.zeros(ROWS, 64)
    for index, (buffer, total) in enumerate(found):
        expected = [expected_buffer(r, homes[index % 4]) for r in routes]
        assert torch.equal(buffer.cpu(), expected[rank])
        assert torch.equal(total.cpu(), expected_total(route, rank, expected, zero))


@ENGINES
def test_graph(gpu_ranks_of, size, engine):
    gpu_ranks_of(size).run(run_in_a_graph, engine)


def run_auto(group):
    device = device_of(group)
    assert NativeCollective().refusals(group, device) == []
    assert select("native", group, device).refusals(group, device) == []  # behind all that it did
    assert select("auto", group, device).name == "native"


def test_auto(gpu_ranks_of, size):
    gpu_ranks_of(size).run(run_auto)
