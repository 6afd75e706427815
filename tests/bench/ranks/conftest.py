import datetime

import pytest

from tests.dtensor.support.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks():
    """Two workers over gloo, which meet often: on a busy machine that takes long."""
    ranks = Ranks(2, timeout=datetime.timedelta(minutes=4))
    yield ranks
    ranks.close()
