from collections.abc import Iterator

import pytest

from magi_compile.testing.poison import poisoned_empty


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory() -> Iterator[None]:
    with poisoned_empty():
        yield
