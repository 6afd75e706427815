"""All use of private PyTorch names: one function per need."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_async(condition: Tensor, message: str) -> None:
    """Fails with `message` where the one-element `condition` is false, on its device and without waiting for it."""
    torch._assert_async(condition, message)
