"""A driver that does nothing, for tests of what the host hands to it: no GPU needed."""

import ctypes
import struct

import torch

from magi_compile.kernels.sm90.backward import launch as backward
from magi_compile.kernels.sm90.backward import table_gradients
from magi_compile.kernels.sm90.forward import launch as forward
from magi_compile.kernels.sm90.forward import overlap as early
from magi_compile.kernels.sm90.forward import split_kv
from magi_compile.kernels.sm90.masks import mask_bits, mask_slices
from magi_compile.kernels.sm90.planner import block_map
from magi_compile.kernels.sm90.planner import tile_plan as planner
from magi_compile.kernels.sm90.runtime import calls
from magi_compile.kernels.sm90.runtime.structs import TENSOR_MAP_BYTES, Struct


def address_map(address: int) -> bytes:
    """In place of a tensor map: the address of its tensor, and nothing else."""
    return struct.pack("<Q", address).ljust(TENSOR_MAP_BYTES, b"\0")


def install(monkeypatch) -> list[bytes]:
    """Gives all launches such a driver; returns the parameters of every launch."""
    found: list[bytes] = []
    fake_hopper(
        monkeypatch,
        num_sms=132,
        load_function=lambda variant, device: None,
        launch=lambda function, grid, block, params, stream, options: found.append(bytes(params)),
        encode=lambda tensor_map, address: address_map(address),
    )
    return found


def fake_hopper(monkeypatch, *, num_sms: int, load_function, launch, encode) -> None:
    """The host's code finds a GPU of `num_sms` SMs, which is this CPU, and these functions in place of the driver's."""
    clear_caches()
    attention = (forward, split_kv, early, backward, table_gradients)
    for module in (*attention, planner, block_map, mask_slices, mask_bits):
        monkeypatch.setattr(module, "load_function", load_function)
    for module in attention:
        monkeypatch.setattr(module, "num_sms", lambda device: num_sms)
    monkeypatch.setattr(backward, "l2_bytes", lambda device: 50 * 2**20)
    monkeypatch.setattr(mask_slices, "max_resident_blocks", lambda *_: num_sms)
    for module in (calls, early, backward):
        monkeypatch.setattr(module, "current_stream", lambda device: 0)
    monkeypatch.setattr(calls, "launch", launch)
    monkeypatch.setattr(calls, "encode", encode)
    monkeypatch.setattr(calls, "fill_zeros", fill_zeros)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU


def clear_caches() -> None:
    """What was prepared for another GPU is forgotten."""
    for module in (forward, split_kv, planner, block_map, early):
        module._call.cache_clear()
    block_map._call_of_table.cache_clear()
    early._lists_call.cache_clear()
    backward._prepared.cache_clear()
    mask_slices._prepared.clear()
    mask_bits._prepared.clear()


def fill_zeros(address: int, num_words: int, stream: int) -> None:
    ctypes.memset(address, 0, 4 * num_words)


def fields(layout: Struct, params: bytes) -> dict[str, int | float | bytes]:
    """Every field of a struct by its name in C++, read from its bytes; a tensor map as its first 8 bytes."""
    assert len(params) == layout.size
    found = {}
    for name, offset, scalar in layout.places():
        format = "<Q" if scalar.size == TENSOR_MAP_BYTES else scalar.format
        (found[name],) = struct.unpack_from(format, params, offset)
    return found
