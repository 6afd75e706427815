"""The native collective and attention over it, across processes, emulated on CPUs: see `on_cpus.py`."""

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions
from magi_compile.dtensor.transport.collectives import COLLECTIVES
from magi_compile.kernels.select import KERNELS
from tests.dtensor.support import phases_on_cpus
from tests.dtensor.support.across_ranks import OPTIONS, run_on_ranks
from tests.dtensor.support.masks import SQUARE
from tests.dtensor.support.ranks import Ranks
from tests.dtensor.support.wanted import (
    expected_buffer,
    expected_total,
    home_rows,
    random_ranges,
    routes_of,
)
from tests.support.cases import HeadShape

on_cpus = pytest.importorskip("tests.dtensor.support.on_cpus")

SHAPES = [(2, 3), (5,)]


def run_casts_and_reduces(group, dtype):
    """Two casts and a reduce in turn, of sizes that make symmetric memory grow at times, and of several orders in
    memory."""
    rank, size = group.rank(), group.size()
    ranks = range(size)
    with on_cpus.emulation():
        collective = on_cpus.Emulated()
        for step, num_rows in enumerate([20, 90, 40, 3000, 50]):
            seeds = (2 * step, 2 * step + 1)
            routes = [routes_of(random_ranges(size, num_rows, 30, seed), seed) for seed in seeds]
            homes = [[home_rows(i, num_rows, x, dtype, step) for i in ranks] for x in SHAPES]
            mine = [x[rank] for x in homes]
            if step % 3 == 0:  # a row's values lie apart
                mine = [x.movedim(0, -1).contiguous().movedim(-1, 0) for x in mine]
            casts = collective.casts(mine, [x[rank] for x in routes], group)
            for everybodys, cast in zip(routes, casts, strict=True):
                buffers = cast.wait()
                expected = [
                    [expected_buffer(route, home) for route in everybodys] for home in homes
                ]
                for buffer, right in zip(buffers, expected, strict=True):
                    assert torch.equal(buffer, right[rank])
                totals = [home_rows(rank, num_rows, x, torch.float32, 99) for x in SHAPES]
                shares = buffers
                if step % 2:  # where peers read it; asked for twice, as after an error
                    for _ in range(2):
                        shares = collective.outbox(mine, everybodys[rank], group)
                    for share, buffer in zip(shares, buffers, strict=True):
                        share.copy_(buffer)
                summed = [torch.full_like(x, torch.nan) for x in totals]
                reducing = collective.start_reduce(shares, everybodys[rank], group)
                reducing.write_sums(summed, totals)
                for x, total, right in zip(summed, totals, expected, strict=True):
                    assert torch.equal(x, expected_total(everybodys[rank], rank, right, total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_casts_and_reduces(ranks_of, size, dtype):
    ranks_of(size).run(run_casts_and_reduces, dtype)


def run_a_release(group):
    """Rank 0 waits for rank 1, which does not come, until a thread lets it go. It reads nothing from slots any more."""
    routes = [routes_of(random_ranges(2, 20, 30, seed), seed)[group.rank()] for seed in (0, 1)]
    mine = [home_rows(group.rank(), 20, (2, 3), torch.float32, 0)]
    with on_cpus.emulation():
        collective = on_cpus.Emulated()
        for cast in collective.casts(mine, routes, group):
            cast.wait()
        dist.barrier(group)
        if group.rank():
            return None
        is_over = threading.Event()

        def release():
            while not is_over.wait(0.02):
                collective.release(group)

        thread = threading.Timer(0.5, release)
        thread.start()
        begin = time.monotonic()
        for cast in collective.casts(mine, routes, group):
            cast.wait()
        is_over.set()
        thread.join()
        with pytest.raises(RuntimeError, match=r"were late, .* make a new process group"):
            next(collective.casts(mine, routes, group))
        return time.monotonic() - begin


def test_release():
    ranks = Ranks(2)  # symmetric memory is not what it was
    try:
        waited, _ = ranks.run(run_a_release)
        assert 0.5 <= waited < 10
    finally:
        ranks.close()


def test_a_release_is_of_one_group():
    released = []

    class Window:
        def __init__(self, name):
            self.release = lambda: released.append(name)

    class Group:
        pass

    collective, groups = on_cpus.Emulated(), [Group(), Group()]
    for number, group in enumerate(groups):
        collective._windows[group] = {"casts": Window(number)}
    collective.release(groups[1])
    collective.release(Group())
    assert released == [1]


def run_attention(group, case, options):
    with on_cpus.emulation(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(COLLECTIVES, "emulated", f"{on_cpus.__name__}:Emulated")
        patch.setitem(KERNELS, "phased_cpu", f"{phases_on_cpus.__name__}:PhasedCpuKernel")
        for kernel in ("cpu", "phased_cpu"):
            run_on_ranks(group, case, options, torch.float32, collective="emulated", kernel=kernel)


@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("name", ["varlen_causal", "holes", "full_1x1"])
@pytest.mark.parametrize("size", [1, 3])
def test_attention(ranks_of, size, name, degree):
    case = replace(SQUARE[name], heads=HeadShape(4, 2, 16, 16))
    options = replace(OPTIONS, degree=degree, backward_degree=2 - degree)
    ranks_of(size).run(run_attention, case, options)


def test_attention_as_planned(ranks_of):
    case = replace(SQUARE["shared_prefix"], heads=HeadShape(4, 2, 16, 16))
    ranks_of(4).run(run_attention, case, ContextParallelOptions())
