"""What ranks read and what they have themselves, put together on the CPU as the collective does on GPUs."""

import pytest
import torch

from magi_compile.dtensor.transport import rows
from magi_compile.dtensor.transport.native.collective import _CastOrder, _ReduceOrder
from tests.dtensor.support.wanted import (
    expected_buffer,
    expected_total,
    home_rows,
    random_ranges,
    routes_of,
)

ROWS, WIDTH = 80, 5
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def pull(pulls, slots, target):
    """What the engines do."""
    peers, source_rows, target_rows = pulls.places.tolist()
    for peer, source_row, target_row in zip(peers, source_rows, target_rows, strict=True):
        target[target_row] = slots[peer][source_row]


@SIZES
def test_casts(size):
    homes = [home_rows(rank, ROWS, (WIDTH,), torch.float32) for rank in range(size)]
    for rank, route in enumerate(routes_of(random_ranges(size, ROWS, 9, seed=size), seed=7)):
        order = _CastOrder(route, rank, size)
        buffer = torch.full((route.num_received, WIDTH), torch.nan)
        pull(order.pulls, homes, buffer)
        assert rank not in order.pulls.places[0]
        rows.move([homes[rank]], order.sends.staying, [buffer], order.recvs.staying)
        assert torch.equal(buffer, expected_buffer(route, homes))


@SIZES
def test_reduces(size):
    routes = routes_of(random_ranges(size, ROWS, 9, seed=size), seed=8)
    buffers = [
        home_rows(rank, route.num_received, (WIDTH,), torch.bfloat16)
        for rank, route in enumerate(routes)
    ]
    for rank, route in enumerate(routes):
        order = _ReduceOrder(route, rank, size)
        arrived = torch.full((order.pulls.num_rows, WIDTH), torch.nan, dtype=torch.bfloat16)
        pull(order.pulls, buffers, arrived)
        before = home_rows(rank, ROWS, (WIDTH,), torch.float32, step=1)
        total = torch.full_like(before, torch.nan)
        order.sums(ROWS).write([total], [before], [buffers[rank]], [arrived])
        assert torch.equal(total, expected_total(route, rank, buffers, before))
