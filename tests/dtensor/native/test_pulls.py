"""What ranks read from each other: cutting runs for a kernel, choosing an engine; the kernel on CPUs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magi_compile.dtensor.native.pulls import COPY_ENGINE, MIN_BYTES_OF_A_COPY, SMS, Pulls
from tests.dtensor.native.wanted import random_runs, routes_of


def rows_of(table):
    """Every row that a table of runs or tiles moves."""
    return sorted(
        (peer, row + i, peer_row + i)
        for peer, row, peer_row, count in table.tolist()
        for i in range(count)
    )


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_tiles_are_the_runs(size, rows):
    for rank, route in enumerate(routes_of(random_runs(size, 90, 30, seed=size), seed=rows)):
        tiles = Pulls(route.recvs, route.host_recvs, rank, size).tiles(rows)
        assert tiles.dtype == torch.int32
        assert tiles.is_contiguous()
        assert rows_of(tiles) == rows_of(route.host_recvs)
        assert all(0 < count <= rows for count in tiles[:, 3].tolist())


def test_peers_take_turns():
    runs = torch.tensor([[0, 0, 0, 40], [1, 40, 0, 20], [2, 60, 0, 40]], dtype=torch.int32)
    tiles = Pulls(runs, runs, rank=1, size=3).tiles(10)
    # Rank 1 begins with rank 2; rank 1 itself has half as many rows as the others.
    assert tiles[:, 0].tolist() == [2, 0, 1, 2, 0, 2, 0, 1, 2, 0]


def test_long_runs_go_to_a_copy_engine():
    runs = torch.tensor([[0, 0, 5, 64], [1, 64, 9, 192]], dtype=torch.int32)
    pulls = Pulls(runs, runs, rank=0, size=2)
    assert pulls.engine(MIN_BYTES_OF_A_COPY // 128) == COPY_ENGINE
    assert pulls.engine(MIN_BYTES_OF_A_COPY // 128 - 1) == SMS


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_in_the_interpreter():
    """See `interpreted_pull.py`."""
    path = Path(__file__).with_name("interpreted_pull.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
