import pytest
import torch

from tests.dtensor.support.ranks import Ranks


@pytest.fixture(scope="session")
def pools():
    """Workers by their number and backend, started when they are first asked for and kept."""
    started: dict[tuple[int, str], Ranks] = {}
    yield started
    for pool in started.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks_of(pools):
    """`ranks_of(size)`: that many workers over gloo."""
    return lambda size: _get(pools, size, "gloo")


@pytest.fixture(scope="session")
def gpu_ranks_of(pools):
    """`gpu_ranks_of(size)`: that many workers over NCCL, each with a GPU."""

    def get(size: int) -> Ranks:
        if torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} GPUs, found {torch.cuda.device_count()}")
        return _get(pools, size, "nccl")

    return get


def _get(pools: dict[tuple[int, str], Ranks], size: int, backend: str) -> Ranks:
    pool = pools.get((size, backend))
    if pool is not None and pool.is_alive and pool.is_worn:
        pool.close()
    if pool is None or not pool.is_alive:
        pools[size, backend] = pool = Ranks(size, backend)
    return pool
