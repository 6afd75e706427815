"""PyTorch's operators on numbers, as CUDA: in the dtypes that PyTorch computes in, with the values that it gives.

`csrc/sm90/masks/pointwise.cuh` has the functions that are named here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
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


Make = Callable[[Sequence[str]], str]


def _call(name: str) -> Make:
    return lambda texts: f"{name}({', '.join(texts)})"


def _sign(sign: str) -> Make:
    return lambda texts: f"({texts[0]} {sign} {texts[1]})"


# Computed in the dtype of the result.
IN_RESULT: dict[str, Make] = {
    **{
        name: _call(f"ops::{name}")
        for name in ("add", "sub", "mul", "maximum", "minimum", "neg", "abs", "sign", "sqrt")
    },
    "rsub": lambda texts: f"ops::sub({texts[1]}, {texts[0]})",
    "reciprocal": lambda texts: f"(1 / {texts[0]})",
    **{f"bitwise_{name}": _sign(sign) for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))},
    **{name: _sign(sign) for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))},
    "bitwise_not": _call("ops::invert"),
    **dict.fromkeys(("bitwise_left_shift", "lshift"), _call("ops::left_shift")),
    **dict.fromkeys(("bitwise_right_shift", "rshift"), _call("ops::right_shift")),
    "clamp_min": _call("ops::maximum"),
    "clamp_max": _call("ops::minimum"),
    **{name: _call(f"ops::{name}") for name in ("floor", "ceil", "trunc", "round")},
}
# The same, with a divisor: those of integers must not be zero.
DIVISIONS: dict[str, Make] = {
    "floor_divide": _call("ops::floor_divide"),
    "div_floor": _call("ops::floor_divide"),
    "div_trunc": _call("ops::divide_to_zero"),
    "remainder": _call("ops::remainder"),
    "fmod": _call("ops::fmod"),
}
# Computed in what their operands are promoted to; the result is a truth value.
COMPARISONS: dict[str, Make] = {
    name: _sign(sign)
    for name, sign in (
        ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!="),
    )
}  # fmt: skip
# Of truth values: of numbers, whether they are not 0.
TRUTHS: dict[str, Make] = {
    "logical_and": _sign("&"),
    "logical_or": _sign("|"),
    "logical_xor": _sign("^"),
    "logical_not": lambda texts: f"!{texts[0]}",
}
# Questions about a number of its own dtype.
QUESTIONS: dict[str, Make] = {
    "isnan": lambda texts: f"({texts[0]} != {texts[0]})",
    "isinf": _call("ops::is_inf"),
}
# A number as it is, or in another dtype.
CONVERSIONS = (
    *("to_copy", "clone", "alias", "detach", "lift_fresh_copy", "lift_fresh"),
    *("convert_element_type", "contiguous"),
)
# A number that is written in the call: where it is among the arguments, or the number itself.
FILLS: dict[str, tuple[int, None] | tuple[None, int]] = {
    "new_ones": (None, 1),
    "new_zeros": (None, 0),
    "ones_like": (None, 1),
    "zeros_like": (None, 0),
    "ones": (None, 1),
    "zeros": (None, 0),
    "full": (1, None),
    "full_like": (1, None),
    "new_full": (2, None),
    "scalar_tensor": (0, None),
}
