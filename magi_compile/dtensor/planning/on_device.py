"""Tables of a plan, from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`, in the order of the current stream.

    The host does not wait: a copy from memory that is not pinned ends only when the GPU has done all that it was given
    before, so a host that plans each step would fall back to the pace of the GPU and launch the next step too late.
    """
    if device.type != "cuda" or x.device.type != "cpu" or torch.cuda.is_current_stream_capturing():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
