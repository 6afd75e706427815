"""Tables of a plan, from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile import _compat


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`, in the order of the current stream.

    The host does not wait: a copy from memory that is not pinned ends only when the GPU has done all that it was given
    before, so a host that plans each step would fall back to the pace of the GPU and launch the next step too late.
    """
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    # No compiler knows pinned memory, nor do the tensors that it traces with.
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return x.to(device)
    if torch.cuda.is_current_stream_capturing():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class Streams:
    """The order of the streams that use what lies on a GPU and is kept for all of them, such as the tables of a plan.

    The copies and kernels that make it are in the order of one stream only.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.cuda.Stream] = {}

    def enter(self, device: torch.device, *tensors: Tensor) -> None:
        """Makes the current stream wait for the last one that used it on `device`, and tells the allocator that it
        reads `tensors`. A capture need not: it begins when all streams of the device have ended."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        current, last = _compat.current_stream(device), self._last.get(device)
        if last is not None and last != current:
            current.wait_stream(last)
            for x in tensors:
                x.record_stream(current)
        self._last[device] = current
