"""Calls that are prepared once for shapes and repeated with other addresses.

What a call launches follows from its shapes, dtypes and scales: which kernels, with which parameters, and what memory.
All that changes from call to call is where its tensors lie. A `Call` holds the former, and `run` puts in the latter:
memory is allocated, its addresses are written into copies of the parameters, and the kernels are launched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.sm90.runtime.driver import (
    LaunchOptions,
    current_stream,
    encode,
    fill_zeros,
    launch,
)
from magi_compile.kernels.sm90.runtime.structs import TENSOR_MAP_BYTES, Packed

_MAX_KNOWN_MAPS = 256


class Buffer(NamedTuple):
    """A tensor that a call allocates.

    Attributes:
        shape: its sizes.
        stride: its strides, in elements.
        dtype: of its elements.
        zeros: how many of its first int32s are zero when the first kernel starts.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeros: int = 0

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, zeros: int = 0) -> Buffer:
        """A contiguous one."""
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return Buffer(tuple(shape), tuple(reversed(stride)), dtype, zeros)


class Launch:
    """A kernel with its parameters, but for addresses.

    Args:
        function: what `load_function` gave.
        grid: how many thread blocks, in x or in x and y.
        num_threads: of a thread block.
        params: its parameters.
        **options: those of `magi_compile.kernels.sm90.runtime.driver.LaunchOptions`.
    """

    def __init__(
        self,
        function: Any,
        grid: int | tuple[int, int],
        num_threads: int,
        params: Packed,
        **options: Any,
    ):
        self.function, self.grid, self.num_threads = function, grid, num_threads
        self.data, self.maps = params.data, params.maps
        self.options = LaunchOptions(**options)
        self.pointers = [
            (at // 8, buffer, offset) for at, (buffer, offset) in params.pointers if at % 8 == 0
        ]
        assert len(self.pointers) == len(params.pointers)
        self._known_maps: dict[tuple[int, ...], bytes] = {}

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launches it with buffers at `addresses`, 0 for those that are not there."""
        params = self.params_at(addresses)
        launch(self.function, self.grid, self.num_threads, params, stream, self.options)

    def params_at(self, addresses: Sequence[int]) -> bytearray:
        """Its parameters for such buffers."""
        params = bytearray(self.data)
        words = memoryview(params).cast("Q")
        for word, buffer, offset in self.pointers:
            address = addresses[buffer]
            words[word] = address + offset if address else 0
        if self.maps:
            self._put_maps(params, addresses)
        return params

    def _put_maps(self, params: bytearray, addresses: Sequence[int]) -> None:
        of_maps = tuple([addresses[x.pointer.buffer] for _, x in self.maps])
        known = self._known_maps.get(of_maps)
        if known is None:
            if len(self._known_maps) >= _MAX_KNOWN_MAPS:
                self._known_maps.clear()
            known = self._known_maps[of_maps] = b"".join(
                encode(x, address + x.pointer.offset)
                for (_, x), address in zip(self.maps, of_maps, strict=True)
            )
        begin = 0
        for at, _ in self.maps:
            params[at : at + TENSOR_MAP_BYTES] = known[begin : begin + TENSOR_MAP_BYTES]
            begin += TENSOR_MAP_BYTES


class Call(NamedTuple):
    """The prepared call for tensors of one layout.

    Buffers are numbered: first the tensors that `run` is given, then those that it allocates. Negative numbers count
    from the end of what is behind these.

    Attributes:
        made: what is allocated.
        launches: in order.
    """

    made: tuple[Buffer, ...]
    launches: tuple[Launch, ...]

    def run(
        self, given: Sequence[Tensor | None], device: torch.device, behind: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Launches everything on torch's current stream and device; the tensors made."""
        stream = current_stream(device)
        made = allocate(self.made, device, stream)
        addresses = addresses_of(given)
        addresses += addresses_of(made)
        addresses += addresses_of(behind)
        for one in self.launches:
            one(addresses, stream)
        if (done := getattr(_recording, "done", None)) is not None:
            done.append(LaunchedCall(self, tuple(given), tuple(made), bool(behind)))
        return made


class LaunchedCall(NamedTuple):
    """A call, what it was given, what it made, and whether it had tensors behind these."""

    call: Call
    given: tuple[Tensor | None, ...]
    made: tuple[Tensor, ...]
    has_others: bool


_recording = threading.local()


@contextmanager
def recorded() -> Iterator[list[LaunchedCall]]:
    """A list of the calls that this thread runs meanwhile."""
    outer = getattr(_recording, "done", None)
    done: list[LaunchedCall] = []
    _recording.done = done
    try:
        yield done
    finally:
        _recording.done = outer


def allocate(buffers: Sequence[Buffer], device: torch.device, stream: int) -> list[Tensor]:
    """Memory for `buffers`, with their zeros."""
    made = []
    for shape, stride, dtype, zeros in buffers:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if zeros:
            fill_zeros(tensor.data_ptr(), zeros, stream)
        made.append(tensor)
    return made


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """The addresses of tensors; 0 for those that are not there, or empty."""
    return [0 if x is None else x.data_ptr() for x in tensors]
