import pytest

from tests.dtensor.ranks import Ranks


@pytest.fixture(scope="session")
def ranks_of():
    """`ranks_of(size)`: that many workers, started at the first call and kept."""
    pools: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in pools or not pools[size].is_alive:
            pools[size] = Ranks(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
