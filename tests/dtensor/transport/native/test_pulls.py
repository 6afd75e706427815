"""What ranks read from each other: cutting ranges for a kernel, choosing an engine; the kernel on CPUs."""

from pathlib import Path

import pytest
import torch

from magi_compile.dtensor.transport.native.pulls import COPY_ENGINE, MIN_BYTES_OF_A_COPY, SMS, Pulls
from tests.dtensor.support.wanted import random_ranges, routes_of
from tests.support.triton_interpreter import needs_triton, run_interpreted


def rows_of(ranges):
    """Every row that ranges move."""
    return sorted(
        (peer, source_row + i, target_row + i)
        for peer, target_row, source_row, count in ranges.tolist()
        for i in range(count)
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_places_are_the_rows_of_the_ranges(size):
    for rank, route in enumerate(routes_of(random_ranges(size, 90, 30, seed=size), seed=size)):
        places = Pulls(route.host_recvs.tolist(), rank, size, route.recvs.device).places
        assert places.dtype == torch.int32
        assert places.is_contiguous()
        assert sorted(zip(*places.tolist(), strict=True)) == rows_of(route.host_recvs)


def test_peers_take_turns():
    ranges = [[0, 0, 7, 4], [1, 4, 0, 2], [2, 6, 0, 4]]
    peer, source_row, _ = Pulls(ranges, 1, 3, torch.device("cpu")).places.tolist()
    # Rank 1 begins with rank 2; it has half as many rows of its own.
    assert peer == [2, 0, 1, 2, 0, 2, 0, 1, 2, 0]
    assert source_row == [0, 7, 0, 1, 8, 2, 9, 1, 3, 10]


def test_long_ranges_go_to_a_copy_engine():
    ranges = [[0, 0, 5, 64], [1, 64, 9, 192]]
    pulls = Pulls(ranges, 0, 2, torch.device("cpu"))
    assert pulls.engine(MIN_BYTES_OF_A_COPY // 128) == COPY_ENGINE
    assert pulls.engine(MIN_BYTES_OF_A_COPY // 128 - 1) == SMS


@needs_triton
def test_in_the_interpreter():
    """See `interpreted_pull.py`."""
    run_interpreted(Path(__file__).parents[2] / "support" / "interpreted_pull.py")
