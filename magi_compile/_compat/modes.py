"""The modes of a caller, and tensors that outlive them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Leaves the caller's inference mode, autograd, autocast, hooks for saved tensors and dispatch modes: for values
    that later calls use, in whatever mode these are.

    A tensor of inference mode cannot be saved for a backward. A checkpoint counts what is saved, or what is dispatched,
    and does not find it when it runs the same again.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    device_types = _device_types()
    if _is_plain(device_types):
        with torch.no_grad():
            yield
        return
    with ExitStack() as modes:
        if not _traces():
            modes.enter_context(_disable_current_modes())
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for device_type in device_types:
            modes.enter_context(torch.autocast(device_type, enabled=False))
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            modes.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        yield


@cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _is_plain(device_types: tuple[str, ...]) -> bool:
    """True if there is nothing to leave but autograd, as in most calls: that takes less time."""
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    count_early = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", None)
    if top_hooks is None or count_early is None:  # of another PyTorch
        return False
    return not (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or _traces()
        or any(map(torch.is_autocast_enabled, device_types))
        or top_hooks(True)
        or count_early()
    )


@contextmanager
def without_autograd() -> Iterator[None]:
    """Operations skip all of autograd, which costs each of them a tenth of its time on small tensors. For tensors that
    need no gradients; writes inside are not counted."""
    with getattr(torch._C, "_AutoDispatchBelowAutograd", torch.no_grad)():
        yield


def is_in_backward() -> bool:
    """True on a thread that runs a backward of autograd, also for what is computed again there."""
    return torch._C._current_graph_task_id() >= 0  # type: ignore[attr-defined,no-any-return]


def _traces() -> bool:
    """True if a dispatch mode is there that makes a graph of what is done: that one stays."""
    keys = torch._C._TorchDispatchModeKey  # type: ignore[attr-defined]
    modes = (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    return any(torch._C._get_dispatch_mode(key) is not None for key in modes)


def _itself(x: Any) -> Any:
    return x
