"""Failed data preconditions reach the user as Python exceptions, on every device.

On a CPU the exception is raised where the check is made. On a GPU nothing waits for the device: each check owns
a sticky flag, which the device writes and the host reads. Every later call into this package looks at the flags,
so the exception comes with the next attention or its backward, and the CUDA context stays healthy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat


class MaskDataError(ValueError):
    """The data of a mask (a captured tensor, its number of slices) breaks what its slices rely on."""


# Messages about what intervals alone take for granted, and what a user can do on a GPU, where the data of the first
# call decide.
_OF_INTERVALS: set[str] = set()
FOR_ANY_DATA = (
    ". To evaluate this mask for data in any order, compile with options={'magi.bits': True}, "
    "or call torch.compiler.reset() and repeat "
    "the step with these data"
)


def of_intervals(message: str) -> str:
    """`message`, of what intervals alone take for granted, which the mask_mod does not:
    a GPU's failure then says what to do."""
    _OF_INTERVALS.add(message)
    return message


_RAISED = {x.__name__: x for x in (MaskDataError, ValueError, TypeError, NotImplementedError)}


def as_raised(error: RuntimeError) -> Exception:
    """The exception that an op of ours has raised, where the launcher of `csrc/host` has made a `RuntimeError` of
    it."""
    name, _, text = str(error).partition(": ")
    return _RAISED[name](text) if name in _RAISED else error


class MaskCheck(NamedTuple):
    """Something a mask takes for granted about its data.

    Attributes:
        ok: bool, 0-d: whether it is so.
        message: what has to be so, with the name of the captured tensor.
        detail: what was found instead, with a `{}` for each of `values`.
        values: up to four integers, 0-d; they mean something only if `ok` is False.
        of_conversion: whether intervals alone take it for granted: the mask_mod means something without it, too.
    """

    ok: Tensor
    message: str
    detail: str = ""
    values: tuple[Tensor, ...] = ()
    of_conversion: bool = False

    def raise_if_broken(self) -> None:
        """Raises MaskDataError if it is not so. Waits for the device if `ok` is on a GPU."""
        if not bool(self.ok):
            raise MaskDataError(
                _describe(self.message, self.detail, [int(value) for value in self.values])
            )


def first_of(flags: Tensor) -> Tensor:
    """The number of the first flag that is set, 0-d; 0 where none is. Waits for nothing."""
    flat = flags.flatten()
    return flat.to(torch.uint8).argmax() if flat.numel() else flat.sum()


class _DeviceFlags:
    """The failures of the checks made on one device: a sticky flag and what was found, in pinned host memory that
    the device writes to.

    Such memory belongs to no CUDA graph's pool, whoever makes the first check.
    """

    CAPACITY = 256
    MAX_VALUES = 4

    def __init__(self, device: torch.device):
        self.device = device
        is_cuda = device.type == "cuda"
        shape = (self.CAPACITY, 1 + self.MAX_VALUES)
        place = torch.cuda.device(device) if is_cuda else nullcontext()
        with place, torch.inference_mode(False):  # calls in every mode write to them
            self.on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda, device="cpu")
            address = self.on_host.data_ptr()
            self.on_device = (
                torch.as_tensor(_Int64(address, shape), device=device) if is_cuda else self.on_host
            )
        # Read on every call, maybe while a graph is traced: past torch.
        self.memory = (ctypes.c_int64 * self.on_host.numel()).from_address(address)
        self.slots: dict[str, int] = {}
        self.details: dict[str, str] = {}

    @property
    def places(self) -> tuple[int, int, int]:
        """The address of the first flag, how many there are, and how many int64s lie from one to the next."""
        return ctypes.addressof(self.memory), self.CAPACITY, 1 + self.MAX_VALUES

    def slot(self, message: str, detail: str) -> int:
        """The row where the failure of a check is written: 1, then its values."""
        self.details[message] = detail
        # Messages beyond the capacity share the last slot, which names the newest of them.
        return self.slots.setdefault(message, min(len(self.slots), self.CAPACITY - 1))

    def address(self, message: str, detail: str) -> int:
        """The address of that row."""
        return self.on_host[self.slot(message, detail)].data_ptr()

    def submit(self, checks: Sequence[MaskCheck]) -> None:
        for check in checks:
            is_broken = check.ok.logical_not()
            found = torch.stack([is_broken, *check.values]).long()
            row = self.on_device[self.slot(check.message, check.detail), : len(found)]
            # Not copy_(): between tensors of one kind that is a memcpy, which must not name host memory.
            torch.where(is_broken, found, row, out=row)

    def synchronize(self) -> None:
        """Waits until the flags show every check submitted so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def take_failures(self) -> dict[str, str]:
        """Takes the failures since the last call: the message of each, and the value found, in words."""
        if 1 not in bytes(self.memory):
            return {}
        self.synchronize()  # or a check under way would set its flag again
        width = 1 + self.MAX_VALUES
        rows = [self.memory[i : i + width] for i in range(0, len(self.memory), width)]
        ctypes.memset(self.memory, 0, ctypes.sizeof(self.memory))
        return {
            message: _describe(message, self.details[message], rows[slot][1:])
            for message, slot in self.slots.items()
            if rows[slot][0]
        }


class _Int64:
    """Integers in memory that CUDA can reach, as `torch.as_tensor` understands them."""

    def __init__(self, address: int, shape: tuple[int, ...]):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "<i8",
            "data": (address, False),
        }


def _describe(message: str, detail: str, values: Sequence[int]) -> str:
    return f"{message}, but {detail.format(*values)}" if detail else message


_flags: dict[torch.device, _DeviceFlags] = {}
_watchers: list[Callable[[int, int, int], None]] = []


def on_flags(watch: Callable[[int, int, int], None]) -> None:
    """Calls `watch(address, count, stride)` for all flags there are and will be: `count` of them, each `stride` int64s
    behind the one before; 0 where nothing has failed."""
    _watchers.append(watch)
    for flags in _flags.values():
        watch(*flags.places)


_keepers: list[Callable[[], None]] = []


def on_failure(forget: Callable[[], None]) -> None:
    """Calls `forget()` before the failures of a GPU are raised: what was made of the data that failed is worth
    nothing, and a later call with the same data has to fail again."""
    _keepers.append(forget)


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
        _flags_of(on_gpu[0].ok.device).submit(on_gpu)


def flag_addresses(device: torch.device, checks: Sequence[tuple[str, str]]) -> list[int]:
    """Memory where a kernel reports the checks that fail, for each message and detail of `checks`.

    Five int64 each, which stay where they are: what was found goes into the last four, then 1 into the first.
    """
    return [_flags_of(device).address(*words) for words in checks]


def _flags_of(device: torch.device) -> _DeviceFlags:
    if device not in _flags:
        _flags[device] = _DeviceFlags(device)
        for watch in _watchers:
            watch(*_flags[device].places)
    return _flags[device]


def raise_pending() -> None:
    """Raises the failures that GPU checks have reported by now. Does not wait for the device."""
    for flags in _flags.values():
        failures = flags.take_failures()
        if failures:
            for forget in _keepers:
                forget()
            advice = FOR_ANY_DATA if _OF_INTERVALS & set(failures) else ""
            raise MaskDataError("; ".join(failures.values()) + advice)


def synchronize_checks() -> None:
    """Waits for all devices with pending checks.

    Raises:
        MaskDataError: a check has failed.
    """
    for flags in _flags.values():
        flags.synchronize()
    raise_pending()
