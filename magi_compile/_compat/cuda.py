"""CUDA streams."""

from __future__ import annotations

import torch


def is_in_use(device: torch.device) -> bool:
    """True if a device is a GPU, and this process uses GPUs: graphs can also be made for those of another machine."""
    return device.type == "cuda" and torch.cuda.is_initialized()


def raw_stream(device_index: int) -> int:
    """The current CUDA stream of a device as a number, without the object that torch.cuda.current_stream makes."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def is_capturing() -> bool:
    """True if the current CUDA stream is captured into a graph; of a process that uses CUDA."""
    return torch._C._cuda_isCurrentStreamCapturing()  # type: ignore[attr-defined]


def spin_gpu(cycles: int) -> None:
    """Keeps the current CUDA stream busy for so many clock cycles, while the host enqueues what comes next."""
    torch.cuda._sleep(cycles)
