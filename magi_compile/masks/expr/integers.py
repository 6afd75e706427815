"""Pointwise integer arithmetic that does not wrap around: int32 exactly where it is enough, int64 elsewhere,
which ends at its ends."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.expr.expr import FITS, Expr

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
# How large a captured int may be: int64 has room for sums with it.
MAX_SYMBOL = 2**40


class Value(NamedTuple):
    """An expression's value: a number, or a tensor that broadcasts to `[batch, rows or keys]`; and bounds that
    hold whatever the data, so that int32 is used exactly where it cannot overflow."""

    data: Tensor | int
    low: int
    high: int


_RELATIONS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor")
_TRUTH = (*_RELATIONS, "not")
_POINTWISE: dict[str, Callable] = {
    op: getattr(operator, f"__{op}__")
    for op in ("add", "sub", "mul", "neg", "abs", "floordiv", "mod", *_RELATIONS)
}


def apply(op: str, values: Sequence[Value]) -> Value:
    """`op` of the values, as mask expressions mean it."""
    values = list(values)
    low, high = _bounds(op, values)
    if op == "where":
        values[1:] = _alike(*values[1:])
    elif op not in _TRUTH:
        values = [counted(value) for value in values]
    if any(x.low < INT32[0] or x.high > INT32[1] for x in (*values, Value(0, low, high))):
        values = [
            value._replace(data=value.data.long())
            if isinstance(value.data, Tensor) and value.data.dtype == torch.int32
            else value
            for value in values
        ]
    data = [value.data for value in values]
    if any(isinstance(x, Tensor) for x in data):
        data = [x if isinstance(x, Tensor) else _within(x) for x in data]
        if op in _SATURATED and not INT64[0] <= low <= high <= INT64[1]:
            return Value(_SATURATED[op](*data), _within(low), _within(high))
        low, high = _within(low), _within(high)
    if op == "not":
        return Value(~data[0] if isinstance(data[0], Tensor) else not data[0], 0, 1)
    if op == "where":
        return Value(_where(*data), low, high)
    if op in ("min", "max"):
        return Value(_extreme(op, *data), low, high)
    return Value(_POINTWISE[op](*data), low, high)


def _within(number: int) -> int:
    """The nearest number of 64 bits."""
    return number if isinstance(number, bool) else min(max(number, INT64[0]), INT64[1])


# Sums and products of 64 bits that end at the least and the highest number: what is beyond is further than any key.


def _saturated(result: Tensor, is_beyond: Tensor, is_negative: Tensor) -> Tensor:
    ends = torch.where(is_negative, INT64[0], INT64[1])
    return torch.where(is_beyond, ends, result)


def _long(*data: Tensor | int) -> list[Tensor]:
    device = next(x.device for x in data if isinstance(x, Tensor))
    return [torch.as_tensor(x, dtype=torch.int64, device=device) for x in data]


def _add(x: Tensor | int, y: Tensor | int) -> Tensor:
    x, y = _long(x, y)
    result = x + y
    return _saturated(result, ((x ^ result) & (y ^ result)) < 0, x < 0)


def _sub(x: Tensor | int, y: Tensor | int) -> Tensor:
    x, y = _long(x, y)
    result = x - y
    return _saturated(result, ((x ^ y) & (x ^ result)) < 0, x < 0)


def _mul(x: Tensor | int, y: Tensor | int) -> Tensor:
    x, y = _long(x, y)
    size = x.double() * y.double()
    return _saturated(x * y, (size >= 2.0**63) | (size < -(2.0**63)), size < 0)


def _neg(x: Tensor | int) -> Tensor:
    return _sub(0, x)


def _abs(x: Tensor) -> Tensor:
    return torch.where(x < 0, _neg(x), x)


_SATURATED: dict[str, Callable[..., Tensor]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
}


def counted(value: Value) -> Value:
    """Bools as the integers 0 and 1."""
    if isinstance(value.data, Tensor):
        is_bool = value.data.dtype == torch.bool
        return value._replace(data=value.data.to(torch.int32)) if is_bool else value
    return value._replace(data=int(value.data))


def _alike(x: Value, y: Value) -> tuple[Value, Value]:
    """Both as they are if both are bools, as integers otherwise."""
    types = {v.data.dtype if isinstance(v.data, Tensor) else type(v.data) for v in (x, y)}
    return (x, y) if types <= {bool, torch.bool} else (counted(x), counted(y))


def _bounds(op: str, values: list[Value]) -> tuple[int, int]:
    if op in _TRUTH:
        return 0, 1
    inner = [value[1:] for value in values]
    found = bounds_by(op, inner, min, max)
    if found is not None:
        return found
    (a, b), (x, y) = inner[0], inner[-1]
    if op == "mod":
        return min(x + 1, 0), max(y - 1, 0)
    if op == "floordiv" and x > 0:
        return min(a // x, a // y), max(b // x, b // y)
    size = max(abs(a), abs(b))  # of abs and of a quotient by what may be negative
    return (0 if op == "abs" else -size), size


def bounds_by(
    op: str,
    inner: Sequence[tuple[Any, Any]],
    least: Callable[..., Any],
    most: Callable[..., Any],
) -> tuple[Any, Any] | None:
    """The bounds of a sum, a product or a choice by those of its operands, of which `least` and `most` take some;
    None of other operations."""
    (a, b), (x, y) = inner[0], inner[-1]
    if op == "add":
        return a + x, b + y
    if op == "sub":
        return a - y, b - x
    if op == "neg":
        return -b, -a
    if op == "mul":
        corners = (a * x, a * y, b * x, b * y)
        return least(*corners), most(*corners)
    if op == "where":
        a, b = inner[-2]
        return least(a, x), most(b, y)
    if op == "min":
        return least(a, x), least(b, y)
    return (most(a, x), most(b, y)) if op == "max" else None


def bounds_of(
    expr: Expr, seqlen: int, range_of: Callable[[int], tuple[int, int]]
) -> tuple[int, int]:
    """The least and the highest value that `expr` keeps to as unbounded integers, whatever the data; a truth value
    counts as 0 or 1. `seqlen` is more than any of b, q and kv, and `range_of` says the same of a captured tensor's
    values, by its number."""
    if expr.op in ("int", "bool"):
        return int(expr.args[0]), int(expr.args[0])
    if expr.op == "var":
        return 0, seqlen - 1
    if expr.op == "unsupported":
        return INT64
    if expr.op == "symbol":
        return -MAX_SYMBOL, MAX_SYMBOL
    if expr.op == "table":
        return range_of(expr.args[0])
    inner = [bounds_of(child, seqlen, range_of) for child in expr.children]
    if expr.op in FITS:
        (low, high), limits = inner[0], INT32 if expr.op == "int32" else INT64
        return max(low, limits[0]), min(high, limits[1])
    return _bounds(expr.op, [Value(0, *bounds) for bounds in inner])


def _where(condition: Tensor | int, x: Tensor | int, y: Tensor | int) -> Tensor | int:
    if not isinstance(condition, Tensor):
        return x if condition else y
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        dtype = torch.bool if isinstance(x, bool) else torch.int32
        if dtype == torch.int32 and not all(INT32[0] <= z <= INT32[1] for z in (x, y)):
            dtype = torch.int64
        x = torch.full((1, 1), x, dtype=dtype, device=condition.device)
    return torch.where(condition, x, y)


def _extreme(op: str, x: Tensor | int, y: Tensor | int) -> Tensor | int:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.minimum(x, y) if op == "min" else torch.maximum(x, y)
    if isinstance(y, Tensor):
        x, y = y, x
    if isinstance(x, Tensor):
        return x.clamp(max=y) if op == "min" else x.clamp(min=y)
    return min(x, y) if op == "min" else max(x, y)
