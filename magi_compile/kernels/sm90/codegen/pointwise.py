"""Numbers in CUDA, in the dtypes that PyTorch computes in: literals, casts and what operands are promoted to."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

# The elements of tensors, as CUDA calls them.
ELEMENTS = {
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "Int",
    torch.float32: "float",
    torch.float64: "double",
}


class UnknownOperation(Exception):
    """An operation without generated CUDA; PyTorch evaluates such a mask_mod."""


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def element(dtype: torch.dtype) -> str:
    """The name in CUDA of elements of `dtype`."""
    if dtype not in ELEMENTS:
        raise UnknownOperation(f"numbers in {dtype}")
    return ELEMENTS[dtype]


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A Python number as one of `dtype`."""
    name = element(dtype)
    if dtype == torch.bool:
        return "true" if value else "false"
    if is_float(dtype):
        return f"static_cast<{name}>({_float_literal(float(value), dtype)})"
    info = torch.iinfo(dtype)
    if isinstance(value, float) or not info.min <= value <= info.max:
        raise UnknownOperation(f"{value} in {dtype}")
    if value == -(2**63):  # C++ has no such literal
        return f"({value + 1}ll - 1)"
    return f"static_cast<{name}>({int(value)}ll)"


def _float_literal(value: float, dtype: torch.dtype) -> str:
    if math.isnan(value):
        return "nan_of_float()"
    if dtype == torch.float32:
        try:
            (value,) = struct.unpack("f", struct.pack("f", value))
        except OverflowError:
            value = math.copysign(math.inf, value)
    if math.isinf(value):
        return "inf_of_float()" if value > 0 else "-inf_of_float()"
    return value.hex()


def cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """A number of one dtype in another."""
    name = element(target)
    return text if source == target else f"to<{name}>({text})"


def promoted(
    one: tuple[torch.dtype | type, int], other: tuple[torch.dtype | type, int]
) -> torch.dtype:
    """The dtype in which PyTorch computes for two operands, given by their dtypes and numbers of dimensions; dtypes of
    Python are numbers."""

    def example(dtype: torch.dtype | type, dims: int) -> Any:
        if isinstance(dtype, torch.dtype):
            return torch.empty((1,) * dims, dtype=dtype, device="meta")
        return dtype(1)

    return torch.result_type(example(*one), example(*other))
