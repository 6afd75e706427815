"""Planning on one thread of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's CPU operations run on the calling thread alone.

    A plan takes hundreds of operations on small tensors. PyTorch wakes all its threads for some of them, however small
    (`repeat_interleave`); where every rank of a machine has as many threads as there are cores, each costs
    milliseconds. torchrun starts ranks with one thread; others may not.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
