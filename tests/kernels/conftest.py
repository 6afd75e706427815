from collections.abc import Iterator

import pytest

from tests.support.poison import poisoned_empty


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory() -> Iterator[None]:
    with poisoned_empty():
        yield
