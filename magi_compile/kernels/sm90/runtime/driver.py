"""Loading cubins, describing tensors to TMA, and launching on torch's current stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from cuda.bindings import driver
except ImportError as error:
    raise ImportError(
        f"{error}; it needs cuda-bindings, which CUDA builds of PyTorch bring along: pip install cuda-bindings"
    ) from error

from magi_compile import _compat
from magi_compile.kernels.sm90.runtime.ahead import cubin_of
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import TENSOR_MAP_BYTES, Pointer, TensorMap

# Each thread block asks for all the shared memory that an sm_90 chip gives to one.
SHARED_BYTES = 227 * 1024

_DTYPES = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
}

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # the sizes and the strides of a tensor

INT64_ELEMENTS = int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_INT64)

_thread = threading.local()


def bind_context() -> None:
    """Gives this thread the context of torch's current device, if it has none yet: in a thread of autograd we may be
    the first to need one."""
    if getattr(_thread, "has_context", False):
        return
    device_index = torch.cuda.current_device()  # torch initialises the driver
    if not int(check(driver.cuCtxGetCurrent())):
        context = check(driver.cuDevicePrimaryCtxRetain(device_index))
        check(driver.cuCtxSetCurrent(context))
    _thread.has_context = True


def current_context() -> int:
    """The context of this thread, on torch's current device."""
    bind_context()
    return int(check(driver.cuCtxGetCurrent()))


@cache
def load_function(variant: Variant, device_index: int) -> driver.CUfunction:
    """Compile `variant` if need be and load it on a device, which is to be the current one."""
    bind_context()
    library = check(driver.cuLibraryLoadData(cubin_of(variant), [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, variant.entry.encode()))
    function = check(driver.cuKernelGetFunction(kernel))
    attributes = driver.CUfunction_attribute
    fixed = check(
        driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
    )
    dynamic = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, dynamic, SHARED_BYTES - fixed))
    return function


@cache
def num_sms(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@cache
def l2_bytes(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).L2_cache_size


def max_resident_blocks(function: driver.CUfunction, num_threads: int, device_index: int) -> int:
    """The number of thread blocks that a cooperative launch may have: all of them are on the GPU at once."""
    of_sm = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, num_threads, 0)
    return check(of_sm) * num_sms(device_index)


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one, if it is not."""
    is_current = device.index == torch.cuda.current_device()
    return _HERE if is_current else torch.cuda.device(device)


def tma_compatible(x: Tensor) -> Tensor:
    """`x [rows, heads, head_dim]` itself if TMA can read it, else a copy."""
    if _is_tma_compatible(x):
        return x
    return x.contiguous(memory_format=torch.contiguous_format).clone()


def check_remote_keys(k: Tensor, v: Tensor) -> None:
    """Refuses keys and values that TMA cannot read, where they may not be there yet: a copy would be of something else.

    Args:
        k: remote keys `[total_k, nheads_kv, head_dim]`.
        v: remote values `[total_k, nheads_kv, head_dim_v]`.

    Raises:
        ValueError: naming the tensor and its strides.
    """
    for name, x in (("k", k), ("v", v)):
        if not _is_tma_compatible(x):
            raise ValueError(
                f"remote `{name}` must be 16-byte aligned, with row and head strides that are "
                "multiples of 16 bytes and a "
                f"stride of 1 in head_dim, got an address of 16 n + {x.data_ptr() % 16} and strides "
                f"{x.stride()} in elements"
            )


def _is_tma_compatible(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and is_tma_layout(x.shape, x.stride(), x.dtype)


@lru_cache(maxsize=4096)
def is_tma_layout(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> bool:
    """True if TMA can read such a tensor, `[rows, heads, head_dim]`, if its address is a multiple of 16 bytes."""
    steps = [stride[dim] * dtype.itemsize for dim in (0, 1) if shape[dim] != 1]
    return stride[2] == 1 and all(step > 0 and step % 16 == 0 for step in steps)


def are_tma_layouts(layouts: Sequence[Layout], dtype: torch.dtype) -> bool:
    """True if TMA can read tensors of such layouts."""
    return all(is_tma_layout(shape, stride, dtype) for shape, stride in layouts)


def routed(prepare: Any, tensors: tuple[Tensor, ...], *rest: Any) -> tuple[tuple[Tensor, ...], Any]:
    """`tensors` as TMA can read them, and what `prepare` has for their layouts:
    `prepare(layouts, *rest, device_index)`."""
    layouts = tuple([(x.shape, x.stride()) for x in tensors])
    call = prepare(layouts, *rest, tensors[0].device.index)
    if call is None or any([x.data_ptr() % 16 for x in tensors]):
        return routed(prepare, tuple([tma_compatible(x) for x in tensors]), *rest)
    return tensors, call


def current_stream(device: torch.device) -> int:
    """torch's current stream on a GPU, for the driver, which this thread may call from now on."""
    bind_context()
    return _compat.raw_stream(device.index)


def rows_map(
    pointer: Pointer,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    box_rows: int,
) -> TensorMap:
    """The TMA descriptor of `[rows, heads, head_dim]`, in boxes of `box_rows` rows and 128 bytes of one head."""
    rows, heads, head_dim = shape
    size = dtype.itemsize
    # The stride of a dimension of size 1 is never used, and may be anything.
    steps = [stride[i] * size if shape[i] > 1 else head_dim * size for i in (0, 1)]
    sizes, box = (head_dim, rows, heads), (128 // size, box_rows, 1)
    return TensorMap(pointer, int(_DTYPES[dtype]), sizes, (steps[0], steps[1]), box)


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """The descriptor of `tensor_map` for the hardware, for a tensor that begins at `address`."""
    bind_context()
    swizzles = driver.CUtensorMapSwizzle
    encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType(tensor_map.element),
        3,
        address,
        [driver.cuuint64_t(n) for n in tensor_map.sizes],
        [driver.cuuint64_t(n) for n in tensor_map.strides],
        [driver.cuuint32_t(n) for n in tensor_map.box],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B
        if tensor_map.is_swizzled
        else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(check(encoded).getPtr(), TENSOR_MAP_BYTES)


class LaunchOptions(NamedTuple):
    """The options of a launch, besides the number of threads."""

    shared_bytes: int = SHARED_BYTES
    # When the kernel in front lets it; it waits for its results itself (`griddepcontrol`).
    may_start_early: bool = False
    cluster: int = 1  # thread blocks in a row that are a cluster
    is_cooperative: bool = False  # whether all thread blocks are on the GPU at once


_Pointers = ctypes.c_char_p * 1


def launch(
    function: driver.CUfunction,
    grid: int | tuple[int, int],
    block: int,
    params: bytes | bytearray,
    stream: int,
    options: LaunchOptions,
) -> None:
    """Launch a kernel whose only parameter is the struct packed in `params`, which the driver copies."""
    bind_context()
    grid_x, grid_y = grid if isinstance(grid, tuple) else (grid, 1)
    pointers = _Pointers(bytes(params))
    arguments = ctypes.addressof(pointers)
    shared_bytes, may_start_early, cluster, is_cooperative = options
    if may_start_early or cluster > 1 or is_cooperative:
        config = _config(grid_x, grid_y, block, stream, options)
        check(driver.cuLaunchKernelEx(config, function, arguments, 0))
    else:
        dims = (grid_x, grid_y, 1, block, 1, 1)
        check(driver.cuLaunchKernel(function, *dims, shared_bytes, stream, arguments, 0))


@lru_cache(maxsize=1024)
def _config(
    grid_x: int, grid_y: int, block: int, stream: int, options: LaunchOptions
) -> driver.CUlaunchConfig:
    shared_bytes, may_start_early, cluster, is_cooperative = options
    ids = driver.CUlaunchAttributeID
    attributes = []
    if may_start_early:
        early = driver.CUlaunchAttribute()
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    if cluster > 1:
        dimension = driver.CUlaunchAttribute()
        dimension.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = dimension.value.clusterDim
        dims.x, dims.y, dims.z = cluster, 1, 1
        attributes.append(dimension)
    if is_cooperative:
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, grid_y, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def fill_zeros(address: int, num_words: int, stream: int) -> None:
    """Zeros for `num_words` int32s, in the order of `stream`."""
    check(driver.cuMemsetD32Async(address, 0, num_words, stream))


def check(result: Sequence[Any]) -> Any:
    """The values of a driver call.

    Args:
        result: its status, and the values behind it.

    Returns:
        The value behind the status; a list where there are none or several.

    Raises:
        RuntimeError: with the driver's name of the error and its description.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"{status.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if len(values) == 1 else values
