"""Deterministic algorithms for as long as a test needs them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_algorithms(enabled: bool = True) -> Iterator[None]:
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
