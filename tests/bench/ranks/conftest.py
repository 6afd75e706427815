import datetime

import pytest

from tests.dtensor.support.ranks import Ranks


def start(size):
    """Workers over gloo, which meet often: on a busy machine that takes long."""
    ranks = Ranks(size, timeout=datetime.timedelta(minutes=4))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks():
    yield from start(2)


@pytest.fixture(scope="session")
def four_ranks():
    yield from start(4)


@pytest.fixture(scope="session")
def eight_ranks():
    yield from start(8)
