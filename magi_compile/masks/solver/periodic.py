"""Lanes that repeat along the keys as plain lanes, once it is known how many keys there are.

    (kv // 32 == q // 32) & (kv % 32 <= q % 32)    ->    one lane
    kv % 4096 <= q, of 8192 keys                   ->    two lanes

A row sees one interval of each period of a grid. Its periods are numbered from the one with the first key of the lane
on, so that as many lanes do as there can be periods in one row, which a bound of the lane's length tells. That needs no
data where both edges move together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from magi_compile.masks.expr.expr import (
    KV,
    ZERO,
    Expr,
    build,
    const,
    int_value,
    is_natural,
    linear,
)
from magi_compile.masks.solver.key_sets import (
    MAX_INTERVALS,
    KeyGrid,
    KeySet,
    Lane,
    Refusal,
    Repeat,
    has_bounds,
    too_many,
)

_LOOK_UPS = ("table", "group_begin", "group_end", "upper_bound")  # which are not built
_MAX_CHOICES = 12  # of min, max and where, one inside the other's result


@lru_cache(maxsize=1024)
def unroll(keys: KeySet, seqlen_k: int, symbols: tuple[int, ...]) -> KeySet:
    """The same keys, of `seqlen_k`, in lanes without repeats, which hold each of their keys once. The captured ints
    `symbols` have their names in the lanes still. Raises Refusal where a row sees more intervals than it may, and
    ValueError where a captured int by which keys repeat is not positive, or one that divides is zero."""
    lanes = [plain for lane in keys.lanes for plain in _plain_lanes(lane, seqlen_k, symbols)]
    if len(lanes) > MAX_INTERVALS:
        raise Refusal(too_many(len(lanes)))
    return keys._replace(lanes=tuple(lanes))


def least_period(keys: KeySet, seqlen_k: int, symbols: tuple[int, ...]) -> int | None:
    """The number of keys in the shortest periods of which a row may see several; None: it sees one of each grid."""
    periods = [
        period for lane in keys.lanes for period in _periods_in_rows(lane, seqlen_k, symbols)
    ]
    return min(periods, default=None)


def _periods_in_rows(lane: Lane, seqlen_k: int, symbols: tuple[int, ...]) -> Iterator[int]:
    while lane.repeats:
        grid, count = _next_repeat(lane, symbols).grid, _num_periods(lane, seqlen_k, symbols)
        if count > 1:
            yield _keys_of_a_period(grid, symbols)
        lane = _in_period(lane, 0, symbols)  # the others are as long


def _plain_lanes(lane: Lane, seqlen_k: int, symbols: tuple[int, ...]) -> Iterator[Lane]:
    if not lane.repeats:
        yield lane
        return
    count = _num_periods(lane, seqlen_k, symbols)
    if count > MAX_INTERVALS:
        grid = _next_repeat(lane, symbols).grid
        number = build("mod", _number(KV, grid), grid.length)
        raise Refusal(f"`{number}`: {too_many(count)}")
    for i in range(count):
        yield from _plain_lanes(_in_period(lane, i, symbols), seqlen_k, symbols)


def _next_repeat(lane: Lane, symbols: tuple[int, ...]) -> Repeat:
    """The one with the longest periods: shorter ones then count in what these leave."""
    return max(lane.repeats, key=lambda repeat: _keys_of_a_period(repeat.grid, symbols))


def _begin(lane: Lane) -> Expr:
    """The origin of periods. The order of keys is not known yet there."""
    return ZERO if has_bounds(lane.lo) else build("max", lane.lo, ZERO)


def _in_period(lane: Lane, i: int, symbols: tuple[int, ...]) -> Lane:
    """The rest of a lane in the period `i` of its next repeat."""
    repeat = _next_repeat(lane, symbols)
    grid = repeat.grid
    period = build("add", build("floordiv", _number(_begin(lane), grid), grid.length), const(i))
    first = build("mul", period, grid.length)
    lo = build("add", first, build("max", repeat.lo, ZERO))
    hi = build("add", first, build("min", repeat.hi, grid.length))
    return lane._replace(
        lo=build("max", lane.lo, _key(lo, grid)),
        hi=build("min", lane.hi, _key(hi, grid)),
        repeats=tuple(other for other in lane.repeats if other != repeat),
    )


def _number(key: Expr, grid: KeyGrid) -> Expr:
    """The number that the grid gives to `key`."""
    return build("add", build("floordiv", build("add", key, grid.shift), grid.step), grid.start)


def _key(number: Expr, grid: KeyGrid) -> Expr:
    """The first key with such a number."""
    return build("sub", build("mul", build("sub", number, grid.start), grid.step), grid.shift)


def _keys_of_a_period(grid: KeyGrid, symbols: tuple[int, ...]) -> int:
    sizes = []
    for size in (grid.step, grid.length):
        value = int_value(_bind(size, symbols))
        assert value is not None, size
        if value <= 0:
            raise ValueError(f"`{size}` must be positive, keys repeat by it, got {value}")
        sizes.append(value)
    return sizes[0] * sizes[1]


def _num_periods(lane: Lane, seqlen_k: int, symbols: tuple[int, ...]) -> int:
    """The largest number of periods of its next repeat in which a lane has keys, in any row."""
    grid = _next_repeat(lane, symbols).grid
    begin, end = (_bind(edge, symbols) for edge in (_begin(lane), lane.hi))
    num_keys = upper_bound_of(build("sub", build("min", end, const(seqlen_k)), begin))
    num_keys = seqlen_k if num_keys is None else min(num_keys, seqlen_k)
    if num_keys <= 0:
        return 0
    size = _keys_of_a_period(grid, symbols)
    steps = build("mul", grid.start, grid.step)
    place = build("add", build("add", begin, grid.shift), steps)
    in_period = remainder_of(_bind(place, symbols), size)
    return ((size - 1 if in_period is None else in_period) + num_keys - 1) // size + 1


@lru_cache(maxsize=4096)
def _bind(expr: Expr, symbols: tuple[int, ...]) -> Expr:
    """`expr` with the captured ints as numbers."""
    if expr.op == "symbol":
        return const(symbols[expr.args[0]])
    if not any(node.op == "symbol" for node in expr.walk()):
        return expr
    args = tuple(_bind(arg, symbols) if isinstance(arg, Expr) else arg for arg in expr.args)
    if expr.op in ("floordiv", "mod") and args[1] == ZERO:
        raise ValueError(f"`{expr.args[1]}` must not be zero, it divides")
    return Expr(expr.op, args) if expr.op in _LOOK_UPS else build(expr.op, *args)


# What shows of a number without values: a bound that it never exceeds, and what it leaves when divided.


def upper_bound_of(expr: Expr) -> int | None:
    """A number that `expr` never exceeds, whatever the row and the data; None: none shows."""
    return _upper(expr, _MAX_CHOICES)


@lru_cache(maxsize=4096)
def _upper(expr: Expr, num_choices: int) -> int | None:
    terms, total = linear(expr)
    for term, count in terms.items():
        if term.op not in ("min", "max", "where"):
            continue
        if num_choices == 0:
            return None
        bounds = [_upper(other, num_choices - 1) for other in _cases(expr, term, count)]
        if (term.op == "min") == (count > 0) and term.op != "where":
            return min((bound for bound in bounds if bound is not None), default=None)
        return None if None in bounds else max(bound for bound in bounds if bound is not None)
    for term, count in terms.items():
        length = int_value(term.args[1]) if term.op == "mod" else None
        if count > 0 and length is not None and length > 0:
            total += count * (length - 1)
        elif count > 0 or not is_natural(term):
            return None
    return total


def _cases(expr: Expr, term: Expr, count: int) -> list[Expr]:
    """`expr`, in which `term` counts so many times, for each of what `term` chooses between."""
    if term.op != "where":
        return [_exchange(expr, term, count, arm) for arm in term.args]
    cases = []
    for side in (1, 2):
        case = expr
        for other, times in linear(expr)[0].items():
            if other.op == "where" and other.args[0] == term.args[0]:
                case = _exchange(case, other, times, other.args[side])
        cases.append(case)
    return cases


def _exchange(expr: Expr, term: Expr, count: int, other: Expr) -> Expr:
    return build("add", expr, build("mul", build("sub", other, term), const(count)))


def remainder_of(expr: Expr, divisor: int) -> int | None:
    """`expr % divisor`, where it is the same whatever the row and the data."""
    terms, total = linear(expr)
    for term, count in terms.items():
        if count % divisor == 0:
            continue
        if term.op not in ("min", "max", "where"):
            return None
        arms = term.args[1:] if term.op == "where" else term.args
        parts = {remainder_of(build("mul", arm, const(count)), divisor) for arm in arms}
        part = parts.pop()
        if parts or part is None:
            return None
        total += part
    return total % divisor
