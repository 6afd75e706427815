"""Calls that must not make the host wait for the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """What PyTorch knows to wait for the GPU raises here; afterwards waits are allowed again."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
