"""Kernels of `csrc/sm90`, as they are, on a CPU: g++ compiles them with `ptx_on_a_cpu.cuh` in place of
`common/ptx.cuh`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property

import pytest

from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import TENSOR_MAP_BYTES, TensorMap
from tests.kernels.support import idle_driver
from tests.kernels.support.cpp import ON_A_CPU, Compiled
from tests.support.deterministic import deterministic_algorithms

_MAIN = """
#include "common/ptx.cuh"
#include "{source}"
template <class Params>
const Params& params_of(void (*)(Params), const void* params) {{
    return *static_cast<const Params*>(params);
}}
extern "C" __attribute__((visibility("default")))
bool run(const void* params, unsigned x, unsigned y, int num_threads, int num_at_once, unsigned timing, int cluster) {{
    return turns::launch({{x, y}}, num_threads, ffa::memory, num_at_once, timing, cluster,
                         [](const void* given) {{ {entry}(params_of({entry}, given)); }}, params);
}}
"""
# Each kernel has its own `turns_on_a_cpu.cuh`, which is compiled once, and well: most of the time is spent there.
_APART = "-fvisibility=hidden -fno-strict-aliasing -DTURNS_ARE_APART"
_OPTIONS = f"-O1 -fno-unroll-loops -fno-tree-vectorize {_APART}"
_TURNS_OPTIONS = f"-c -O3 -ffp-contract=off {_APART} -DTURNS_ARE_HERE"


class CompiledKernel:
    """A kernel as a function of a grid, the number of threads of a block, and its parameters.

    The compiler runs until the first call waits for it.
    """

    def __init__(self, variant: Variant, directories: pytest.TempPathFactory):
        main = _MAIN.format(source=variant.source, entry=variant.entry)
        options = " ".join([_OPTIONS, *(f"-D{name}={value}" for name, value in variant.defines)])
        turns = Compiled(directories, '#include "common/ptx.cuh"\n', _TURNS_OPTIONS, ON_A_CPU)
        self._library = Compiled(
            *(directories, main, options, ON_A_CPU, dict(variant.headers)),
            header_options=_OPTIONS,
            linked=turns,
        )

    @cached_property
    def _run(self) -> Callable[..., bool]:
        run = ctypes.CDLL(str(self._library.path)).run
        run.restype = ctypes.c_bool
        return run

    def __call__(
        self,
        grid: int | tuple[int, int],
        num_threads: int,
        params: bytes,
        num_at_once: int = 1,
        timing: int = 0,
        cluster: int = 1,
    ) -> None:
        memory = bytearray(len(params) + 64)
        at = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        at += -at % 64
        ctypes.memmove(at, bytes(params), len(params))
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        ended = self._run(ctypes.c_void_p(at), x, y, num_threads, num_at_once, timing, cluster)
        assert ended, "some threads wait for what never comes"


def compile_once(directories: pytest.TempPathFactory) -> Callable[[Variant], CompiledKernel]:
    """`compiled(variant)`, the same kernel for the same variant."""
    return cache(lambda variant: CompiledKernel(variant, directories))


@contextmanager
def launching(
    monkeypatch: pytest.MonkeyPatch,
    compiled: Callable[[Variant], CompiledKernel],
    num_sms: int,
    launch: Callable[..., object],
) -> Iterator[None]:
    """The host's code finds a GPU of `num_sms` SMs, which is this CPU, where `launch` launches."""
    idle_driver.fake_hopper(
        monkeypatch,
        num_sms=num_sms,
        load_function=lambda variant, device: compiled(variant),
        launch=launch,
        encode=encode,
    )
    # What is not written is NaN.
    with deterministic_algorithms():
        yield
    idle_driver.clear_caches()


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """A descriptor of `[heads, rows, columns]`."""
    columns, rows, heads = tensor_map.sizes
    element_bytes = 2 if tensor_map.is_swizzled else 8
    box = tensor_map.box[:2]
    return _packed(
        address,
        (columns, rows, heads),
        tensor_map.strides,
        box,
        element_bytes,
        tensor_map.is_swizzled,
    )


def _packed(
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_bytes: int,
    is_swizzled: bool,
) -> bytes:
    assert address % 16 == 0
    assert all(stride % 16 == 0 for stride in strides)
    fields = (address, *sizes, *strides, *box, element_bytes, is_swizzled)
    return struct.pack("<10q", *fields).ljust(TENSOR_MAP_BYTES, b"\0")
