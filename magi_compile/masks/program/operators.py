"""The operations of mask_mods, under all of their names, as expressions that mean what PyTorch computes in its dtypes.

An operation that expressions cannot say is an `ExprError`; the tracer then looks for another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from magi_compile.functions.names import SIGNS, is_numpy_scalar
from magi_compile.functions.operators import OPERATORS
from magi_compile.masks.arguments import MAX_SEQLEN
from magi_compile.masks.expr.expr import (
    FITS,
    ONE,
    ZERO,
    Expr,
    ExprError,
    build,
    const,
    int_value,
    is_le,
    table,
)
from magi_compile.masks.expr.integers import INT64, bounds_of

# A tensor of these is compared with a number of PyTorch's default dtype exactly below this.
EXACT_FLOAT = 2**24

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class MaskOperand(NamedTuple):
    """An operand of an operation: a tensor of no dimensions, or a captured tensor with some of its indices.

    Attributes:
        expr: what it is.
        dtype: of the tensor; None for a Python number, which takes the dtype of the tensors beside it.
        shape: of the dimensions that have no index yet.
    """

    expr: Expr
    dtype: torch.dtype | None
    shape: tuple = ()


class Wraps(ExprError):
    """An operation that PyTorch computes modulo a power of two, as far as its operands' dtypes tell.

    Args:
        message: what wraps around, and in which dtype.
        expr: what the operation is without that; an attribute of this name.
    """

    def __init__(self, message: str, expr: Expr):
        super().__init__(message)
        self.expr = expr


class Typing(NamedTuple):
    """The dtypes around an operation.

    Attributes:
        result: the dtype of its result.
        range_of: the values that a table's dtype has, by the number of the table.
    """

    result: torch.dtype
    range_of: Callable[[int], tuple[int, int]]


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any], typing: Typing) -> Expr:
    """The result of an operation, of `typing.result`, as an expression. Its `name` is as `name_of` spells it, and its
    arguments are `MaskOperand`s, and what is no number as it is. Raises ExprError where expressions cannot say it;
    `Wraps`, if they could but for the dtype."""
    operation = _OPERATIONS.get(name)
    if operation is None:
        raise ExprError(f"`{name}` is not an operation on masks")
    try:
        return operation(typing, *args, **kwargs)
    except (TypeError, AttributeError):
        raise ExprError(f"`{name}` is called in a way that masks do not have") from None


def is_number(value: Any) -> bool:
    """True if it is a number of Python or numpy."""
    return isinstance(value, (bool, int, float)) or is_numpy_scalar(value)


# Operands


def _scalar(x: Any) -> MaskOperand:
    if not isinstance(x, MaskOperand):
        raise ExprError(f"`{x}` is not an integer, a truth value or a captured tensor")
    if x.shape:
        raise ExprError(
            f"`{x.expr}` has shape {list(x.shape)}; give it an index for each of its dimensions"
        )
    if x.dtype is not None and x.dtype != torch.bool and x.dtype not in INTEGERS:
        raise ExprError(f"`{x.expr}` is {x.dtype}; masks are computed with integers")
    return x


def _is_truth(x: MaskOperand) -> bool:
    return x.dtype == torch.bool if x.dtype is not None else x.expr.kind == "bool"


def _integer(x: Any) -> Expr:
    """`x` as a number: a truth value is 1 or 0."""
    x = _scalar(x)
    return build("where", x.expr, ONE, ZERO) if _is_truth(x) else x.expr


def _truth(x: Any) -> Expr:
    """`x` as a truth value: a number is true unless it is 0."""
    x = _scalar(x)
    return x.expr if _is_truth(x) else build("ne", x.expr, ZERO)


def _checked(expr: Expr, typing: Typing) -> Expr:
    """`expr`, whose value PyTorch has in `typing.result`."""
    if expr.reasons:
        return expr
    if typing.result not in INTEGERS:
        raise ExprError(f"`{expr}` is {typing.result}; masks are computed with integers")
    limits = torch.iinfo(typing.result)
    low, high = bounds_of(expr, MAX_SEQLEN, typing.range_of)
    if low < limits.min or high > limits.max:
        raise Wraps(f"`{expr}` may wrap around in {typing.result}", expr)
    return expr


def marked(expr: Expr, dtype: torch.dtype) -> Expr | None:
    """`expr` with a mark that it has to fit `dtype`; None where marks do not have that dtype."""
    name = str(dtype).removeprefix("torch.")
    return build(name, expr) if name in FITS else None


# Operations


def _arithmetic(op: str, of_bools: str | None = None) -> Callable[..., Expr]:
    def apply(typing: Typing, *args: Any, **kwargs: Any) -> Expr:
        if kwargs.pop("alpha", 1) != 1 or kwargs:
            raise ExprError(f"`{op}` with keyword arguments")
        if typing.result == torch.bool:
            if of_bools is None:
                raise ExprError(f"`{op}` of truth values")
            return build(of_bools, *map(_truth, args))
        return _checked(build(op, *map(_integer, args)), typing)

    return apply


def _reversed_sub(typing: Typing, x: Any, y: Any, **kwargs: Any) -> Expr:
    return _arithmetic("sub")(typing, y, x, **kwargs)


def _comparison(op: str) -> Callable[..., Expr]:
    def apply(_: Typing, x: Any, y: Any) -> Expr:
        for one, other, comparison in ((x, y, op), (y, x, _SWAPPED[op])):
            if isinstance(other, float):
                return _with_float(comparison, _integer(one), other)
        x, y = _scalar(x), _scalar(y)
        for one, other in ((x, y), (y, x)):
            if one.dtype in INTEGERS and other.dtype is None:
                value = int_value(other.expr)
                limits = torch.iinfo(one.dtype)
                if value is not None and not limits.min <= value <= limits.max:
                    raise Wraps(f"`{other.expr}` is not a number of {one.dtype}", other.expr)
        if _is_truth(x) and _is_truth(y) and op in ("eq", "ne"):
            return build(op, x.expr, y.expr)
        return build(op, _integer(x), _integer(y))

    return apply


_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def _with_float(op: str, x: Expr, number: float) -> Expr:
    """An integer compared with a float: PyTorch rounds both to its default dtype, which changes no answer here."""
    if math.isinf(number) or math.isnan(number):
        is_true = op == "ne" or (op in (("lt", "le") if number > 0 else ("gt", "ge")))
        return const(is_true if math.isinf(number) else op == "ne")
    exact = float(torch.tensor(number, dtype=torch.get_default_dtype(), device="cpu"))
    if not abs(exact) < EXACT_FLOAT or torch.get_default_dtype() not in (
        torch.float32,
        torch.float64,
    ):
        raise ExprError(f"`{number}` is compared with `{x}`, which is not exact")
    down, up = math.floor(exact), math.ceil(exact)
    if op in ("eq", "ne"):
        return build(op, x, const(down)) if down == up else const(op == "ne")
    return build(op, x, const(up if op in ("lt", "ge") else down))


def _bitwise(op: str) -> Callable[..., Expr]:
    def apply(typing: Typing, x: Any, y: Any) -> Expr:
        if typing.result == torch.bool:
            return build(op, _truth(x), _truth(y))
        a, b = _integer(x), _integer(y)
        if a.op == "int":
            a, b = b, a
        bits = int_value(b)
        if op == "and" and bits is not None:  # a constant that keeps or clears low bits
            if bits >= 0 and not bits & (bits + 1):
                return build("mod", a, const(bits + 1))
            if bits < 0 and not -bits & (-bits - 1):
                low = build("floordiv", a, const(-bits))
                return _checked(build("mul", low, const(-bits)), typing)
        raise ExprError(f"`{SIGNS[op]}` of the bits of `{a}` and `{b}`")

    return apply


def _not(typing: Typing, x: Any) -> Expr:
    if typing.result == torch.bool:
        return build("not", _truth(x))
    number = _integer(x)
    if number.reasons:
        return number
    if bounds_of(number, MAX_SEQLEN, typing.range_of)[0] == INT64[0]:  # -x - 1 has no room for -x
        raise ExprError(f"`~` of the bits of `{number}`")
    return _checked(build("sub", const(-1), number), typing)


def _logical(op: str) -> Callable[..., Expr]:
    return lambda _, *args: build(op, *map(_truth, args))


def _where(typing: Typing, condition: Any, x: Any, y: Any) -> Expr:
    cast = _truth if typing.result == torch.bool else _integer
    chosen = build("where", _truth(condition), cast(x), cast(y))
    return chosen if typing.result == torch.bool else _checked(chosen, typing)


def _convert(typing: Typing, x: Any, *_: Any, **__: Any) -> Expr:
    """`x` in the dtype of the result."""
    if typing.result == torch.bool:
        return _truth(x)
    return _checked(_integer(x), typing)


def _full(typing: Typing, _: Any, size: Any = (), fill_value: Any = None, **__: Any) -> Expr:
    if not isinstance(size, (tuple, list)) or len(size):
        raise ExprError(f"a tensor of shape {size} is made inside the mask_mod")
    return _convert(typing, fill_value)


def _constant(value: int) -> Callable[..., Expr]:
    return lambda typing, *_, **__: _convert(typing, MaskOperand(const(value), None))


def _full_like(typing: Typing, _: Any, fill_value: Any, **__: Any) -> Expr:
    return _convert(typing, fill_value)


def _new(value: int) -> Callable[..., Expr]:
    number = MaskOperand(const(value), None)
    return lambda typing, x, size=(), **_: _full(typing, x, size, number)


def _clamp(typing: Typing, x: Any, min: Any = None, max: Any = None) -> Expr:
    expr = _integer(x)
    if min is not None:
        expr = build("max", expr, _integer(min))
    if max is not None:
        expr = build("min", expr, _integer(max))
    return _checked(expr, typing)


def _divide(typing: Typing, x: Any, y: Any, *, rounding_mode: str | None = None) -> Expr:
    a, b = _integer(x), _integer(y)
    down = build("floordiv", a, b)
    if rounding_mode == "trunc" and is_le(ONE, b):
        up = build("neg", build("floordiv", build("neg", a), b))
        down = down if is_le(ZERO, a) else build("where", build("lt", a, ZERO), up, down)
    elif rounding_mode != "floor":
        raise ExprError(f"a division that does not round down; write `{down}`")
    return _checked(down, typing)


def _shift(op: str) -> Callable[..., Expr]:
    def apply(typing: Typing, x: Any, y: Any) -> Expr:
        y = _scalar(y)
        bits = int_value(y.expr)
        if bits is None or not 0 <= bits < 63:
            raise ExprError(f"a shift by `{y.expr}`")
        return _checked(build(op, _integer(x), const(2**bits)), typing)

    return apply


def _get_item(_: Typing, x: Any, index: Any) -> Expr:
    indices = (
        [index] if isinstance(index, MaskOperand) or not isinstance(index, (tuple, list)) else index
    )
    if not isinstance(x, MaskOperand) or x.expr.op != "table" or not x.shape:
        what = x.expr if isinstance(x, MaskOperand) else x
        raise ExprError(f"`{what}` is indexed; only captured tensors can be")
    places = []
    for item in indices:
        if not isinstance(item, MaskOperand) or item.dtype in (torch.bool, torch.uint8):
            kind = "`...`" if item is Ellipsis else f"`{getattr(item, 'expr', item)}`"
            raise ExprError(
                f"a captured tensor is indexed with {kind}; use one index for each dimension"
            )
        places.append(_scalar(item).expr)
    if any(place.kind == "bool" for place in places) or len(places) > len(x.shape):
        raise ExprError(f"`{x.expr}` has too many indices, or one that is a truth value")
    return table(*x.expr.args, *places)


def _same(_: Typing, x: Any, **__: Any) -> Expr:
    return _scalar(x).expr


# What the table of operators says of masks: an operation, or what makes one of the words behind it.
_RULES: dict[str, Callable[..., Any]] = {
    "arithmetic": _arithmetic,
    "comparison": _comparison,
    "bitwise": _bitwise,
    "logical": _logical,
    "shift": _shift,
    "constant": lambda number: _constant(int(number)),
    "new": lambda number: _new(int(number)),
    "not": _not,
    "where": _where,
    "reversed_sub": _reversed_sub,
    "same": _same,
    "convert": _convert,
    "clamp": _clamp,
    "clamp_min": lambda typing, x, min: _clamp(typing, x, min=min),
    "clamp_max": lambda typing, x, max: _clamp(typing, x, max=max),
    "divide": _divide,
    "get_item": _get_item,
    "full": _full,
    "full_like": _full_like,
}


def _operation(spelling: str) -> Callable[..., Expr]:
    rule, *words = spelling.split()
    return _RULES[rule](*words) if words else _RULES[rule]


_OPERATIONS = {name: _operation(found.mask) for name, found in OPERATORS.items() if found.mask}
