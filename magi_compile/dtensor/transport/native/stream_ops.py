"""Operations of a CUDA stream that need no SM: copies between addresses, flags set and awaited in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from cuda.bindings import driver

from magi_compile.kernels.sm90.runtime.driver import bind_context, check

Op: TypeAlias = driver.CUstreamBatchMemOpParams


def set_flag(address: int, value: int) -> Op:
    """The 32-bit word at `address`, which may lie on a peer, becomes `value` after all that was written before."""
    op = Op()
    op.writeValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    op.writeValue.address = driver.CUdeviceptr(address)
    op.writeValue.value = driver.cuuint32_t(value)
    op.writeValue.flags = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT.value
    return op


def await_flag(address: int) -> Op:
    """Makes later work on the stream wait until the 32-bit word at `address`, on this device, is 1."""
    op = Op()
    op.waitValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    op.waitValue.address = driver.CUdeviceptr(address)
    op.waitValue.value = driver.cuuint32_t(1)
    op.waitValue.flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
    return op


def enqueue(ops: Sequence[Op], stream: torch.cuda.Stream) -> None:
    """Flag operations, in this order."""
    if ops:
        bind_context()
        check(driver.cuStreamBatchMemOp(stream.cuda_stream, len(ops), ops, 0))


def copy(
    targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: torch.cuda.Stream
) -> None:
    """Copies `sizes[i]` bytes from address `sources[i]` to `targets[i]`, in any order."""
    bind_context()
    targets, sources = ([driver.CUdeviceptr(x) for x in xs] for xs in (targets, sources))
    if _can_batch and not torch.cuda.is_current_stream_capturing():
        check(
            driver.cuMemcpyBatchAsync(
                targets, sources, sizes, len(sizes), [_in_stream_order], [0], 1, stream.cuda_stream
            )
        )
        return
    for target, source, size in zip(targets, sources, sizes, strict=True):
        check(driver.cuMemcpyAsync(target, source, size, stream.cuda_stream))


def _batch_attributes() -> driver.CUmemcpyAttributes:
    attributes = driver.CUmemcpyAttributes()
    order = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    attributes.srcAccessOrder = order
    attributes.flags = driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE.value
    return attributes


# Since CUDA 13 in this form; a graph records single copies only.
_can_batch = driver.CUDA_VERSION >= 13000
_in_stream_order = _batch_attributes() if _can_batch else None
