"""How a failed data precondition reaches the user: as a Python exception, on every device.

On a CPU the exception is raised where the check is made. On a GPU nothing waits for the device: each check owns
a sticky flag on the device and a copy of it in pinned host memory. Every later call into this package looks at
the copies, so the exception comes with the next attention or its backward, and the CUDA context stays healthy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat


class MaskDataError(ValueError):
    """A mask's data (a captured table, a capacity) breaks what its conversion relies on."""


class MaskCheck(NamedTuple):
    """Something a mask takes for granted about its data.

    Attributes:
        ok: bool, 0-d: whether it is so.
        message: what has to be so, with the name of the captured tensor.
        detail: what was found instead, with a `{}` for each of `values`.
        values: integers, 0-d; they mean something only if `ok` is False.
    """

    ok: Tensor
    message: str
    detail: str = ""
    values: tuple[Tensor, ...] = ()

    def raise_if_broken(self) -> None:
        """Raises MaskDataError if it is not so. Waits for the device if `ok` is on a GPU."""
        if not bool(self.ok):
            detail = self.detail.format(*(int(value) for value in self.values))
            raise MaskDataError(f"{self.message}{', but ' if detail else ''}{detail}")


class _DeviceFlags:
    """Sticky failure flags of the checks made on one device, mirrored in pinned memory."""

    CAPACITY = 1024

    def __init__(self, device: torch.device):
        self.failed = torch.zeros(self.CAPACITY, dtype=torch.bool, device=device)
        self.mirror = torch.zeros(self.CAPACITY, dtype=torch.bool, pin_memory=device.type == "cuda")
        # The mirror is read on every call, maybe while a graph is traced: not through torch.
        self.seen = (ctypes.c_char * self.CAPACITY).from_address(self.mirror.data_ptr())
        self.slots: dict[str, int] = {}

    def slot(self, message: str) -> int:
        # Messages beyond the capacity share the last slot, which names the newest of them.
        return self.slots.setdefault(message, min(len(self.slots), self.CAPACITY - 1))

    def submit(self, checks: Sequence[MaskCheck]) -> None:
        for check in checks:
            self.failed[self.slot(check.message)].logical_or_(check.ok.logical_not())
        self.mirror.copy_(self.failed, non_blocking=True)

    def synchronize(self) -> None:
        """Waits until the mirror shows every check submitted so far."""
        if self.failed.device.type == "cuda":
            torch.cuda.synchronize(self.failed.device)

    def take_failures(self) -> list[str]:
        seen = self.seen.raw
        if 1 not in seen:
            return []
        self.failed.zero_()
        self.synchronize()  # or a copy under way would report them again
        self.mirror.zero_()
        return [message for message, slot in self.slots.items() if seen[slot]]


_flags: dict[torch.device, _DeviceFlags] = {}


def require(checks: Sequence[MaskCheck]) -> None:
    """Raises `MaskDataError` for the first check that fails: now on a CPU, later on a GPU.

    Checks of fake tensors, which have no values, are skipped.
    """
    checks = [check for check in checks if not _compat.is_fake(check.ok)]
    if not checks:
        return
    raise_pending()
    on_cpu = [check for check in checks if check.ok.device.type != "cuda"]
    on_gpu = [check for check in checks if check.ok.device.type == "cuda"]
    for check in on_cpu:
        check.raise_if_broken()
    if on_gpu:
        device = on_gpu[0].ok.device
        if device not in _flags:
            _flags[device] = _DeviceFlags(device)
        _flags[device].submit(on_gpu)


def raise_pending() -> None:
    """Raises the failures that GPU checks have reported by now. Does not wait for the device."""
    for flags in _flags.values():
        failures = flags.take_failures()
        if failures:
            raise MaskDataError("; ".join(failures))


def synchronize_checks() -> None:
    """Waits for all devices that have checks under way and raises their failures, if any."""
    for flags in _flags.values():
        flags.synchronize()
    raise_pending()
