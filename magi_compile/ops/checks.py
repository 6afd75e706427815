"""How a failed data precondition reaches the user: as a Python exception, on every device.

On a CPU the exception is raised where the check is made. On a GPU nothing waits for the device: each check owns
a sticky flag on the device and a copy of it in pinned host memory. Every later call into this package looks at
the copies, so the exception comes with the next attention or its backward, and the CUDA context stays healthy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MaskDataError(ValueError):
    """A mask's data (a captured table, a capacity) breaks what its conversion relies on."""


class _DeviceFlags:
    """Sticky failure flags of the checks made on one device, mirrored in pinned memory."""

    CAPACITY = 1024

    def __init__(self, device: torch.device):
        self.failed = torch.zeros(self.CAPACITY, dtype=torch.bool, device=device)
        self.mirror = torch.zeros(self.CAPACITY, dtype=torch.bool, pin_memory=True)
        self.slots: dict[str, int] = {}

    def slot(self, message: str) -> int:
        # Messages beyond the capacity share the last slot, which names the newest of them.
        return self.slots.setdefault(message, min(len(self.slots), self.CAPACITY - 1))

    def submit(self, oks: Sequence[Tensor], messages: Sequence[str]) -> None:
        slots = [self.slot(message) for message in messages]
        for ok, slot in zip(oks, slots, strict=True):
            self.failed[slot].logical_or_(ok.logical_not())
        self.mirror.copy_(self.failed, non_blocking=True)

    def take_failures(self) -> list[str]:
        failed = set(self.mirror.nonzero().flatten().tolist())
        if failed:
            self.failed.zero_()
            self.mirror.zero_()
        return [message for message, slot in self.slots.items() if slot in failed]


_flags: dict[torch.device, _DeviceFlags] = {}


def require(oks: Sequence[Tensor], messages: Sequence[str]) -> None:
    """Raises `MaskDataError` when one of the 0-d bool tensors `oks` is false: now on a CPU, later on a GPU."""
    raise_pending()
    if not oks:
        return
    device = oks[0].device
    if device.type != "cuda":
        failures = [message for ok, message in zip(oks, messages, strict=True) if not bool(ok)]
        if failures:
            raise MaskDataError("; ".join(failures))
        return
    if device not in _flags:
        _flags[device] = _DeviceFlags(device)
    _flags[device].submit(oks, messages)


def raise_pending() -> None:
    """Raises the failures that GPU checks have reported by now. Does not wait for the device."""
    for flags in _flags.values():
        failures = flags.take_failures()
        if failures:
            raise MaskDataError("; ".join(failures))


def synchronize_checks() -> None:
    """Waits for all devices that have checks under way and raises their failures, if any."""
    for device in _flags:
        torch.cuda.synchronize(device)
    raise_pending()
