"""The operations of mask_mods, under all of their names, as expressions.

An operation that is not in the table becomes an `unsupported` node, so that the user hears of all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magi_compile.masks.arithmetic import NARROW
from magi_compile.masks.expr import (
    ONE,
    ZERO,
    Expr,
    ExprError,
    build,
    const,
    int_value,
    is_le,
    table,
    unsupported,
)


def name_of(target: Any) -> str:
    """One spelling for `operator.eq`, `Tensor.__eq__`, `torch.eq`, "eq" and `aten.eq.Scalar`."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.split(".")[0].strip("_")


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Expr:
    operation = _OPERATIONS.get(name)
    if operation is None:
        return unsupported(f"`{name}` is not an operation on masks")
    try:
        args = [as_expr(arg) if _is_number(arg) else arg for arg in args]
        return operation(*args, **kwargs)
    except ExprError as error:
        refused = (arg for arg in args if isinstance(arg, Expr) and arg.op == "unsupported")
        return next(refused, unsupported(str(error)))
    except TypeError:
        return unsupported(f"`{name}` is called in a way that masks do not have")


def as_expr(value: Any) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int)):
        return const(value)
    if isinstance(value, float) and value.is_integer():
        return const(int(value))
    if _is_numpy_scalar(value):
        return as_expr(value.item())
    raise ExprError(f"`{value!r}` is not an integer, a truth value or a captured tensor")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or _is_numpy_scalar(value)


def _is_numpy_scalar(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0


def _integers(x: Expr) -> Expr:
    if x.op == "where" and x.kind == "any":
        return build("where", x.args[0], *map(_integers, x.args[1:]))
    return build("where", x, ONE, ZERO) if x.kind == "bool" else x


def _bools(x: Expr) -> Expr:
    if x.op == "where":
        return build("where", x.args[0], *map(_bools, x.args[1:]))
    return x if x.kind == "bool" else build("ne", x, ZERO)


def _convert(x: Expr, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if dtype is None:
        return x
    if dtype == torch.bool:
        return _bools(x)
    if dtype.is_floating_point or dtype.is_complex:
        raise ExprError(f"`{x}` is converted to {dtype}; masks are computed with integers")
    if dtype in NARROW and x.kind != "bool":
        raise ExprError(f"`{x}` is converted to {dtype}, which cuts large values")
    return _integers(x)


def _full(_: Any, size: Any = (), fill_value: Any = 0, *, dtype: Any = None, **__: Any) -> Expr:
    if not isinstance(size, (tuple, list)) or len(size):
        raise ExprError(f"a tensor of shape {size} is made inside the mask_mod")
    return _convert(as_expr(fill_value), dtype)


def _like(value: int) -> Callable[..., Expr]:
    def full_like(x: Expr, fill_value: Any = value, *, dtype: Any = None, **_: Any) -> Expr:
        is_bool = dtype is None and x.kind == "bool"
        return _convert(as_expr(fill_value), torch.bool if is_bool else dtype)

    return full_like


def _new(value: int) -> Callable[..., Expr]:
    return lambda x, size=(), **kwargs: _full(x, size, value, **kwargs)


def _clamp(x: Expr, min: Any = None, max: Any = None) -> Expr:
    if min is not None:
        x = build("max", x, as_expr(min))
    return x if max is None else build("min", x, as_expr(max))


def _divide(x: Expr, y: Expr, *, rounding_mode: str | None = None) -> Expr:
    down = build("floordiv", x, y)
    if rounding_mode == "trunc" and is_le(ONE, y):
        up = build("neg", build("floordiv", build("neg", x), y))
        return down if is_le(ZERO, x) else build("where", build("lt", x, ZERO), up, down)
    if rounding_mode != "floor":
        raise ExprError(f"a division that does not round down; write `{down}`")
    return down


def _and(x: Expr, y: Expr) -> Expr:
    """`x & y`, also of an integer and a constant that keeps or clears its low bits."""
    if x.op == "int":
        x, y = y, x
    bits = int_value(y)
    if bits is not None and x.kind != "bool":
        if bits >= 0 and not bits & (bits + 1):
            return build("mod", x, const(bits + 1))
        if bits < 0 and not -bits & (-bits - 1):
            return build("mul", build("floordiv", x, const(-bits)), const(-bits))
    return build("and", x, y)


def _power_of_two(y: Expr) -> Expr:
    bits = int_value(y)
    if bits is None or not 0 <= bits < 63:
        raise ExprError(f"a shift by `{y}`")
    return const(2**bits)


def _get_item(x: Any, index: Any) -> Expr:
    indices = index if isinstance(index, (tuple, list)) else [index]
    if x.op != "table":
        raise ExprError(f"`{x}` is indexed; only captured tensors can be")
    for item in indices:
        if not isinstance(item, (Expr, int)) or isinstance(item, bool):
            kind = "`...`" if item is Ellipsis else f"`{item}`"
            raise ExprError(
                f"a captured tensor is indexed with {kind}; use one index for each dimension"
            )
    return table(*x.args, *map(as_expr, indices))


def _same(x: Expr, **_: Any) -> Expr:
    return x


def _plain(op: str) -> Callable[..., Expr]:
    def apply(*args: Any, **kwargs: Any) -> Expr:
        if kwargs.pop("alpha", 1) != 1 or kwargs:
            raise ExprError(f"`{op}` with keyword arguments")
        return build(op, *args)

    return apply


def _logical(op: str) -> Callable[..., Expr]:
    return lambda *args: build(op, *map(_bools, args))


_OPERATIONS: dict[str, Callable[..., Expr]] = {
    **{
        name: _plain(op)
        for op, names in {
            "add": "add iadd",
            "sub": "sub subtract isub",
            "mul": "mul multiply imul",
            "floordiv": "floordiv floor_divide ifloordiv",
            "mod": "mod remainder imod",
            "neg": "neg negative",
            "abs": "abs absolute",
            "min": "minimum min",
            "max": "maximum max",
            "lt": "lt less",
            "le": "le less_equal",
            "gt": "gt greater",
            "ge": "ge greater_equal",
            "eq": "eq",
            "ne": "ne not_equal",
            "or": "or bitwise_or ior",
            "xor": "xor bitwise_xor ixor",
            "not": "invert bitwise_not inv",
            "where": "where",
        }.items()
        for name in names.split()
    },
    **{f"logical_{op}": _logical(op) for op in ("and", "or", "xor", "not")},
    **dict.fromkeys(("and", "bitwise_and", "iand"), _and),
    "rsub": lambda x, y: build("sub", y, x),
    "pos": _same,
    "positive": _same,
    "clone": _same,
    "contiguous": _same,
    "detach": _same,
    "to": _convert,
    "type": _convert,
    "bool": _bools,
    "int": _integers,
    "long": _integers,
    "float": lambda x: _convert(x, torch.float32),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "div": _divide,
    "divide": _divide,
    "truediv": _divide,
    "rshift": lambda x, y: build("floordiv", x, _power_of_two(y)),
    "lshift": lambda x, y: build("mul", x, _power_of_two(y)),
    "getitem": _get_item,
    "index": _get_item,
    "new_ones": _new(1),
    "new_zeros": _new(0),
    "new_full": _full,
    "ones_like": _like(1),
    "zeros_like": _like(0),
    "full_like": _like(0),
}
