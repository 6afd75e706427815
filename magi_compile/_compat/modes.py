"""The modes of a caller, and tensors that outlive them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Leaves the caller's inference mode, autocast, autograd and dispatch modes: for tensors that later calls use, in whatever mode
    these are.

    A tensor of inference mode cannot be saved for a backward. Hooks for saved tensors, as those of a checkpoint, see nothing that is made
    here. Neither do dispatch modes, as those of a selective checkpoint, which runs the same operations again in the backward, where what is
    kept is not made again. Modes that trace stay.
    """
    device_types = {"cpu"}
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        device_types.add(accelerator.type)
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for device_type in sorted(device_types):
            modes.enter_context(torch.autocast(device_type, enabled=False))
        modes.enter_context(_without_saved_tensor_hooks())
        if _only_users_dispatch_modes():
            modes.enter_context(torch.utils._python_dispatch._disable_current_modes())
        yield


@contextmanager
def _without_saved_tensor_hooks() -> Iterator[None]:
    """Autograd, where something in here turns it on, packs and unpacks nothing."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def _only_users_dispatch_modes() -> bool:
    """Whether there are dispatch modes, none of which traces."""
    keys = torch._C._TorchDispatchModeKey  # type: ignore[attr-defined]
    if any(
        torch._C._get_dispatch_mode(key) is not None
        for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    ):
        return False
    return torch._C._len_torch_dispatch_stack() > 0
