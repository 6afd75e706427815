"""How a failed data precondition reaches the user: as a Python exception, on every device.

On a CPU the exception is raised where the check is made. On a GPU nothing waits for the device: each check owns
a sticky flag, which the device writes and the host reads. Every later call into this package looks at the flags,
so the exception comes with the next attention or its backward, and the CUDA context stays healthy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
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
    """Sticky failure flags of the checks made on one device, in pinned host memory that the device writes to.

    Such memory belongs to no CUDA graph's pool, whoever makes the first check.
    """

    CAPACITY = 1024

    def __init__(self, device: torch.device):
        self.device = device
        is_cuda = device.type == "cuda"
        with torch.cuda.device(device) if is_cuda else nullcontext():
            self.on_host = torch.zeros(self.CAPACITY, dtype=torch.bool, pin_memory=is_cuda)
            address = self.on_host.data_ptr()
            self.on_device = torch.as_tensor(_Flags(address)) if is_cuda else self.on_host
        # Read on every call, maybe while a graph is traced: past torch.
        self.memory = (ctypes.c_char * self.CAPACITY).from_address(address)
        self.slots: dict[str, int] = {}

    def slot(self, message: str) -> int:
        # Messages beyond the capacity share the last slot, which names the newest of them.
        return self.slots.setdefault(message, min(len(self.slots), self.CAPACITY - 1))

    def submit(self, checks: Sequence[MaskCheck]) -> None:
        for check in checks:
            self.on_device[self.slot(check.message)].logical_or_(check.ok.logical_not())

    def synchronize(self) -> None:
        """Waits until the flags show every check submitted so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def take_failures(self) -> list[str]:
        if 1 not in self.memory.raw:
            return []
        self.synchronize()  # or a check under way would set its flag again
        failed = self.memory.raw
        ctypes.memset(self.memory, 0, self.CAPACITY)
        return [message for message, slot in self.slots.items() if failed[slot]]


class _Flags:
    """Bools in memory that CUDA can reach, as `torch.as_tensor` understands them."""

    def __init__(self, address: int):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (_DeviceFlags.CAPACITY,),
            "typestr": "|b1",
            "data": (address, False),
        }


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
