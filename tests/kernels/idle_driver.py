"""A driver that does nothing, for tests of what the host hands to it: no GPU needed."""

import struct

import torch

from magi_compile.kernels.cuda.launch import TENSOR_MAP_BYTES


def address_map(address: int) -> bytes:
    """In place of a tensor map: the address of its tensor, and nothing else."""
    return struct.pack("<Q", address).ljust(TENSOR_MAP_BYTES, b"\0")


def install(monkeypatch, module, **more) -> list[bytes]:
    """Gives `module` such a driver, and what else it is to find by name; returns the parameters of every launch."""
    found: list[bytes] = []
    fakes = {
        "launch": lambda function, grid, block, params, stream, **_: found.append(params),
        "load_function": lambda variant, device: None,
        "num_sms": lambda device: 132,
        "current_stream": lambda device: 0,
        "tensor_map": lambda x, box_rows: address_map(x.data_ptr()),
    }
    for name, fake in (fakes | more).items():
        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
    return found
