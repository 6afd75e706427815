"""The modes of a caller, and tensors that outlive them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Leaves the caller's inference mode, autocast and autograd: for tensors that later calls use, in whatever mode these are.

    A tensor of inference mode cannot be saved for a backward. Hooks for saved tensors, as those of a checkpoint, see nothing that is made
    here.
    """
    device_types = {"cpu"}
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        device_types.add(accelerator.type)
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for device_type in sorted(device_types):
            modes.enter_context(torch.autocast(device_type, enabled=False))
        yield
