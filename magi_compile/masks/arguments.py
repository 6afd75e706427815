"""Arguments from which users make slices, read and checked: lists of ranges, document borders, windows, positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

# Kernels add row numbers to diagonal offsets in int32 and use +-2**30 for "no diagonal".
MAX_SEQLEN = 2**30


def is_int(value: object) -> bool:
    """True if `value` is an integer of Python or NumPy; a bool is none."""
    return hasattr(type(value), "__index__") and not isinstance(value, (bool, Tensor))


def check_flag(name: str, given: Any) -> None:
    if not isinstance(given, bool):
        raise TypeError(f"`{name}` must be True or False, got {given!r}")


def check_count(name: str, given: Any, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"`{name}` must be an int, got {given!r}")
    if given < least:
        raise ValueError(f"`{name}` must be at least {least}, got {given}")
    if given >= 1 << 63:
        raise ValueError(f"`{name}` must fit in 64 bits, got an int of {given.bit_length()} bits")


def check_device(given: Any) -> torch.device:
    """The device that `given` says, which must be there."""
    try:
        device = torch.device(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`device` must be a device or the name of one, got {given!r}") from error
    try:
        _touch(device)
    except (AssertionError, ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        message = f"`device` must be one that PyTorch can use here, got {given!r}: {reason}"
        raise ValueError(message) from error
    return device


@cache
def _touch(device: torch.device) -> None:
    """Raises where there is no such device."""
    torch.empty(0, dtype=torch.int32, device=device)


def _host_ints(name: str, value: Sequence | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        tensor = value.cpu()
    else:
        try:
            dtype = None if len(value) else torch.int64
            tensor = torch.tensor(value, dtype=dtype, device="cpu")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            for item in _flat(value):
                if is_int(item) and abs(int(item)) >= MAX_SEQLEN:
                    _refuse_size(name, int(item))
            raise ValueError(f"`{name}` must be a list of ints: {error}") from None
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` must hold int32 or int64 values, got {tensor.dtype}")
    return tensor


def _flat(value: Any) -> Iterator[Any]:
    """The items of lists in lists."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Tensor)):
        yield value
        return
    for item in value:
        yield from _flat(item)


def _refuse_size(name: str, size: int) -> NoReturn:
    raise ValueError(f"`{name}` must stay below 2**30, got {size}")


def int32_on_host(name: str, value: Sequence | Tensor, *dims: int) -> Tensor:
    """`value` as int32 on the host; an empty list gets the shape `[0, *dims]`; errors call it `name`."""
    tensor = _host_ints(name, value)
    if not tensor.numel() and tensor.dim() == 1:
        tensor = tensor.reshape(0, *dims)
    elif tensor.numel():
        for extreme in map(int, tensor.aminmax()):
            if not -MAX_SEQLEN < extreme < MAX_SEQLEN:
                _refuse_size(name, extreme)
    return tensor.to(torch.int32)


def read_cu_seqlens(name: str, value: Tensor | Sequence[int]) -> Tensor:
    """Document borders as int64 `[num_docs + 1]` on the host; errors call them `name`."""
    tensor = _host_ints(name, value)
    if tensor.dim() != 1 or len(tensor) < 1:
        raise ValueError(f"`{name}` must have shape [num_docs + 1], got {list(tensor.shape)}")
    if int(tensor[0]) != 0:
        raise ValueError(f"`{name}` must start at 0, got {int(tensor[0])}")
    drops = (tensor[1:] < tensor[:-1]).nonzero()
    if len(drops):
        index = int(drops[0])
        raise ValueError(
            f"`{name}` must never decrease, got {tensor[index : index + 2].tolist()} at {index}"
        )
    if int(tensor[-1]) >= MAX_SEQLEN:
        _refuse_size(name, int(tensor[-1]))
    return tensor.long()


def read_window(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """`(left, right)`, None for no limit on that side."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"`window` must be (left, right), got {window!r}")
    for side in window:
        if side is not None and (not is_int(side) or side < -1):
            raise ValueError(f"`window` must hold None, -1 or lengths >= 0, got {window!r}")
    left, right = (
        None if side is None or not 0 <= side < MAX_SEQLEN else int(side) for side in window
    )
    return left, right


def check_range(begin: int, end: int, name: str, seqlen: int) -> None:
    """Raises for what is no range of a sequence of `seqlen` positions, which errors call `name`."""
    if not (is_int(begin) and is_int(end)):
        raise TypeError(f"`begin` and `end` must be ints, got {begin!r}, {end!r}")
    if not 0 <= begin <= end <= seqlen:
        raise ValueError(
            f"`begin` and `end` must satisfy 0 <= begin <= end <= {name} = {seqlen}, got {begin}, {end}"
        )
