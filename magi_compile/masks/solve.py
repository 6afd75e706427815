"""Solves a mask expression for kv: which key intervals does a row see, as expressions of the row.

    (q >= kv) & (t0[q] == t0[kv])      ->      [group_begin(t0[kv], t0[q]), min(q + 1, group_end(...)))

Each rule below is an equality of sets, exact for every value of the captured tensors, or exact under a
`Promise` about them that is checked when the intervals are evaluated. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from magi_compile.masks.expr import (
    END,
    FALSE,
    ONE,
    TRUE,
    ZERO,
    Expr,
    build,
    const,
    int_value,
    is_le,
    var,
)

MAX_INTERVALS = 8
_MAX_INTERMEDIATE = 64
_KV = var("kv")


class UnsupportedMaskError(NotImplementedError):
    """A valid mask that intervals can not express.

    Attributes:
        reasons: why, every reason that was found.
    """

    def __init__(self, reasons: list[str]):
        self.reasons = list(dict.fromkeys(reasons))
        super().__init__("this mask is not representable yet: " + "; ".join(self.reasons))


class Promise(NamedTuple):
    """`holds` must be true in every row where `when` is. `holds` is a row condition or one of

    is_sorted(keys): the values of `keys` never decrease along kv.
    is_grouped(keys, value): the keys with this value are next to each other.
    """

    holds: Expr
    when: Expr = TRUE


class Lane(NamedTuple):
    """The keys of `[lo, hi)` for which `keys`, an expression of b and kv alone, holds.

    Where a promise of `exact` is broken the lane contains all keys it should, and others: no harm is done
    if nothing is left of it.
    """

    lo: Expr
    hi: Expr
    keys: Expr = TRUE
    exact: tuple[Promise, ...] = ()


class KeySet(NamedTuple):
    """The keys that a row sees: the union of `lanes`, if all `required` promises are kept."""

    lanes: tuple[Lane, ...]
    required: tuple[Promise, ...] = ()


EVERYTHING = KeySet((Lane(ZERO, END),))
NOTHING = KeySet(())


def solve(expr: Expr) -> KeySet:
    """The keys for which the mask expression `expr` holds.

    Raises:
        UnsupportedMaskError: with every reason found why intervals can not express the mask.
    """
    solver = _Solver()
    if expr.kind == "int":
        solver.reasons.append(f"a mask must be a truth value, got the integer `{expr}`")
        expr = TRUE
    for node in expr.walk():
        if node.op == "unsupported":
            solver.reasons.append(node.args[0])
    if "h" in expr.variables:
        solver.reasons.append(
            "the mask depends on the head (h): per-head masks are not representable"
        )
    keys = _as_keys(solver.truth(expr, True))
    if len(keys.lanes) > MAX_INTERVALS and not solver.reasons:
        solver.reasons.append(_too_many(len(keys.lanes)))
    if solver.reasons:
        raise UnsupportedMaskError(solver.reasons)
    return keys


def _too_many(count: int) -> str:
    return f"a row needs up to {count} key intervals, at most {MAX_INTERVALS} are representable"


# Sets of keys


def _intersect(x: KeySet, y: KeySet) -> KeySet:
    if len(x.lanes) * len(y.lanes) > _MAX_INTERMEDIATE:
        raise _Refusal(_too_many(len(x.lanes) * len(y.lanes)))
    lanes = [
        Lane(
            build("max", a.lo, b.lo),
            build("min", a.hi, b.hi),
            build("and", a.keys, b.keys),
            a.exact + b.exact,
        )
        for a in x.lanes
        for b in y.lanes
    ]
    return KeySet(_prune(lanes), x.required + y.required)


def _unite(x: KeySet, y: KeySet) -> KeySet:
    return KeySet(_prune([*x.lanes, *y.lanes]), x.required + y.required)


def _select(rows: Expr, x: KeySet, y: KeySet) -> KeySet:
    """`x` in the rows where `rows` holds, `y` in the others."""
    others = build("not", rows)
    required = _during(rows, x.required) + _during(others, y.required)
    count = max(len(x.lanes), len(y.lanes))
    empty = Lane(ZERO, ZERO)
    lanes = []
    for i in range(count):
        a = x.lanes[i] if i < len(x.lanes) else empty
        b = y.lanes[i] if i < len(y.lanes) else empty
        if a is empty or b is empty:
            full = b if a is empty else a
            a, b = (part._replace(keys=full.keys) for part in (a, b))
        if a.keys == b.keys:
            exact = _during(rows, a.exact) + _during(others, b.exact)
            lo, hi = build("where", rows, a.lo, b.lo), build("where", rows, a.hi, b.hi)
            lanes.append(Lane(lo, hi, a.keys, exact))
        else:
            for part, when in ((a, rows), (b, others)):
                lanes.append(part._replace(hi=build("where", when, part.hi, ZERO)))
    return KeySet(_prune(lanes), required)


def _during(rows: Expr, promises: tuple[Promise, ...]) -> tuple[Promise, ...]:
    return tuple(Promise(holds, build("and", when, rows)) for holds, when in promises)


def _as_keys(value: Expr | KeySet) -> KeySet:
    return value if isinstance(value, KeySet) else _select(value, EVERYTHING, NOTHING)


def _prune(lanes: list[Lane]) -> tuple[Lane, ...]:
    """Drops lanes that are empty or inside another one, joins those that share an edge: fewer lanes, the same
    union, as far as it shows without values."""
    kept: list[Lane] = []
    for lane in lanes:
        if is_le(lane.hi, lane.lo) or lane.keys == FALSE:
            continue
        for i, other in enumerate(kept):
            joined = _join(other, lane)
            if joined is not None:
                kept[i] = joined
                break
        else:
            kept.append(lane)
    return tuple(kept) if len(kept) == len(lanes) else _prune(kept)


def _join(x: Lane, y: Lane) -> Lane | None:
    """One lane for the union of two, where it is one for sure."""
    if x.exact != y.exact:
        return None
    if x.lo == y.lo and x.hi == y.hi:
        return x._replace(keys=build("or", x.keys, y.keys))
    if x.keys != y.keys:
        return None
    for inner, outer in ((x, y), (y, x)):
        if is_le(outer.lo, inner.lo) and is_le(inner.hi, outer.hi):
            return outer
    # Two intervals from the same edge are one interval, even where one of them is empty.
    if x.lo == y.lo:
        return x._replace(hi=build("max", x.hi, y.hi))
    if x.hi == y.hi:
        return x._replace(lo=build("min", x.lo, y.lo))
    return None


# Numbers that depend on the key


@dataclass(frozen=True)
class _Term:
    """`m * ((a * base + r) // c) + s`, where `base` depends on b and kv and is kv itself or holds look-ups."""

    base: Expr
    a: int = 1
    r: Expr = ZERO
    c: Expr = ONE
    m: Expr = ONE
    s: Expr = ZERO

    @property
    def quotient(self) -> Expr:
        top = build("add", build("mul", self.base, const(self.a)), self.r)
        return build("floordiv", top, self.c)


@dataclass(frozen=True)
class _Choice:
    """min or max of two numbers, or `where(condition, x, y)`."""

    op: str
    x: _Number
    y: _Number
    condition: Expr = TRUE

    def map(self, function: Callable[[_Number], _Number], op: str | None = None) -> _Choice:
        return _Choice(op or self.op, function(self.x), function(self.y), self.condition)


# A plain expression is a number of the row alone.
_Number = Expr | _Term | _Choice


class _Refusal(Exception):
    """One reason why a part of the mask can not be expressed."""


def _is_of_keys(*exprs: Expr) -> bool:
    """Whether they are the same in all rows of a batch entry."""
    return not any(expr.variables & {"q", "h"} for expr in exprs)


def _looks_up_keys(expr: Expr) -> bool:
    return any(node.op == "table" and "kv" in node.variables for node in expr.walk())


def _refuse_periods(expr: Expr) -> None:
    for node in expr.walk():
        if node.op == "mod" and "kv" in node.variables:
            raise _Refusal(
                f"`{node}` repeats along the keys, which is not a small union of intervals"
            )


def _direction(expr: Expr) -> int | None:
    """+1, -1 or 0 if `expr` grows, falls or stays along kv, taking every table for growing; None: no order."""
    if "kv" not in expr.variables:
        return 0
    if expr.op in ("var", "table"):
        return 1
    inner = [_direction(child) for child in expr.children]
    if expr.op in ("neg", "sub"):
        inner[-1] = None if inner[-1] is None else -inner[-1]
    elif expr.op == "mul" and expr.args[1].op == "int":
        inner = [
            None if inner[0] is None else (inner[0] if expr.args[1].args[0] > 0 else -inner[0])
        ]
    elif expr.op == "floordiv" and (int_value(expr.args[1]) or 0) > 0:
        inner = inner[:1]
    elif expr.op not in ("add", "min", "max"):
        return None
    if None in inner or {1, -1} <= set(inner):
        return None
    return 1 if 1 in inner else -1


class _Solver:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.memo: dict[tuple[Expr, bool], Expr | KeySet] = {}
        self.promises: list[Promise] = []  # of the comparison at hand

    # Truth values. Negation is pushed down to the leaves, where complements are exact and small.

    def truth(self, expr: Expr, positive: bool) -> Expr | KeySet:
        """Where `expr` is `positive`: a condition of the row if kv does not matter, a set of keys otherwise."""
        if "kv" not in expr.variables:
            return expr if positive else build("not", expr)
        if (expr, positive) not in self.memo:
            try:
                self.memo[expr, positive] = self._truth(expr, positive)
            except _Refusal as refusal:
                self.reasons.append(str(refusal))
                self.memo[expr, positive] = TRUE
        return self.memo[expr, positive]

    def _truth(self, expr: Expr, positive: bool) -> Expr | KeySet:
        op, args = expr.op, expr.args
        if op == "not":
            return self.truth(args[0], not positive)
        if op in ("and", "or"):
            combine = self.both if (op == "and") == positive else self.either
            return combine(self.truth(args[0], positive), self.truth(args[1], positive))
        if op == "xor":
            return self.choose(args[0], (args[1], not positive), (args[1], positive))
        if op == "where":
            return self.choose(args[0], (args[1], positive), (args[2], positive))
        if op == "table":
            return self.key_condition(expr, positive)
        if op == "unsupported":
            return TRUE
        if not positive:
            op = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}[op]
        return self.compare(op, *args)

    def both(self, x: Expr | KeySet, y: Expr | KeySet) -> Expr | KeySet:
        if isinstance(x, Expr) and isinstance(y, Expr):
            return build("and", x, y)
        if isinstance(x, Expr):
            return _select(x, _as_keys(y), NOTHING)
        return _select(y, x, NOTHING) if isinstance(y, Expr) else _intersect(x, y)

    def either(self, x: Expr | KeySet, y: Expr | KeySet) -> Expr | KeySet:
        if isinstance(x, Expr) and isinstance(y, Expr):
            return build("or", x, y)
        if isinstance(x, Expr):
            return _select(x, EVERYTHING, _as_keys(y))
        return _select(y, EVERYTHING, x) if isinstance(y, Expr) else _unite(x, y)

    def choose(self, condition: Expr, x: tuple[Expr, bool], y: tuple[Expr, bool]) -> Expr | KeySet:
        """Where `x` holds under the condition, or `y` without it."""
        yes = self.truth(condition, True)
        if isinstance(yes, Expr):
            return _select(yes, _as_keys(self.truth(*x)), _as_keys(self.truth(*y)))
        no = self.truth(condition, False)
        return self.either(self.both(yes, self.truth(*x)), self.both(no, self.truth(*y)))

    def key_condition(self, expr: Expr, positive: bool) -> KeySet:
        """A condition on the key alone, taken as it is."""
        _refuse_periods(expr)
        if not _is_of_keys(expr):
            raise _Refusal(f"`{expr}` looks up a row and a key together")
        return KeySet((Lane(ZERO, END, expr if positive else build("not", expr)),))

    # Comparisons

    def compare(self, op: str, x: Expr, y: Expr) -> Expr | KeySet:
        if _is_of_keys(x, y) and (_looks_up_keys(x) or _looks_up_keys(y)):
            return self.key_condition(build(op, x, y), True)
        outer, self.promises = self.promises, []
        try:
            result = self.ordered(op, self.number(x), self.number(y))
            if self.promises:
                result = _as_keys(result)
                result = result._replace(required=result.required + tuple(self.promises))
        finally:
            self.promises = outer
        return result

    def ordered(self, op: str, x: _Number, y: _Number) -> Expr | KeySet:
        """The keys for which `x op y` holds."""
        if isinstance(x, Expr) and isinstance(y, Expr):
            return build(op, x, y)
        for side, one in enumerate((x, y)):
            if isinstance(one, _Choice) and one.op == "where":
                pairs = [(arm, y) if side == 0 else (x, arm) for arm in (one.x, one.y)]
                yes, no = (_as_keys(self.ordered(op, *pair)) for pair in pairs)
                condition = self.truth(one.condition, True)
                if isinstance(condition, Expr):
                    return _select(condition, yes, no)
                other = self.truth(one.condition, False)
                return self.either(self.both(condition, yes), self.both(other, no))
        if isinstance(x, _Choice) or isinstance(y, _Choice):
            if op in ("eq", "ne"):
                parts = ("le", "ge") if op == "eq" else ("lt", "gt")
                combine = self.both if op == "eq" else self.either
                return combine(*(self.ordered(part, x, y) for part in parts))
            if isinstance(y, _Choice):
                x, y, op = y, x, {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}[op]
            assert isinstance(x, _Choice)
            # max(a, b) <= y needs both, max(a, b) >= y needs one; min is the other way round.
            combine = self.both if (x.op == "max") == (op in ("le", "lt")) else self.either
            return combine(self.ordered(op, x.x, y), self.ordered(op, x.y, y))
        difference = self.add(x, self.scale(y, const(-1)))
        if isinstance(difference, Expr):
            return build(op, difference, ZERO)
        assert isinstance(difference, _Term)
        bound = build("neg", difference.s)
        term = replace(difference, s=ZERO)
        if op in ("eq", "ne"):
            return self.equal(term, bound, op == "eq")
        if op in ("lt", "gt"):
            bound = build("sub" if op == "lt" else "add", bound, ONE)
        return self.at_most(term, bound) if op in ("lt", "le") else self.at_least(term, bound)

    def at_most(self, term: _Term, bound: Expr) -> KeySet:
        """The keys with `term <= bound`; term.s is 0."""
        is_lower = False  # base >= limit instead of base <= limit
        factor = int_value(term.m)
        if factor is not None and factor < 0:
            # -m * x <= bound  is  x >= ceil(-bound / m)  is  not x <= ceil(...) - 1
            limit = build("neg", build("floordiv", bound, const(-factor)))
            limit, is_lower = build("sub", limit, ONE), True
        else:
            limit = build("floordiv", bound, term.m)
        # (a * base + r) // c <= limit  is  a * base <= (limit + 1) * c - 1 - r
        limit = build("mul", build("add", limit, ONE), term.c)
        limit = build("sub", build("sub", limit, ONE), term.r)
        if term.a > 0:
            limit = build("floordiv", limit, const(term.a))
        else:
            limit = build("neg", build("floordiv", limit, const(-term.a)))
            limit, is_lower = build("sub", limit, ONE), not is_lower
        edge, required = self.first_above(term.base, limit)
        lane = Lane(edge, END) if is_lower else Lane(ZERO, edge)
        return KeySet(_prune([lane]), required)

    def first_above(self, base: Expr, limit: Expr) -> tuple[Expr, tuple[Promise, ...]]:
        """The key from which on `base > limit`."""
        if base == _KV:
            return build("add", limit, ONE), ()
        _refuse_periods(base)
        if _direction(base) != 1:
            raise _Refusal(f"`{base}` is compared with a row, but does not grow along the keys")
        return Expr("upper_bound", (base, limit)), (Promise(Expr("is_sorted", (base,))),)

    def equal(self, term: _Term, value: Expr, positive: bool) -> Expr | KeySet:
        """The keys with `term == value`, or with `term != value`; term.s is 0."""
        if term.base == _KV or term.c != ONE:
            if positive:
                return _intersect(self.at_most(term, value), self.at_least(term, value))
            below = self.at_most(term, build("sub", value, ONE))
            return _unite(below, self.at_least(term, build("add", value, ONE)))
        _refuse_periods(term.base)
        bare = any(node == _KV for node in _outside_tables(term.base))
        if bare and _direction(term.base) is None:
            raise _Refusal(f"`{term.base}` is compared with a row, but has no order along the keys")
        # m * (a * base + r) == value
        factor = build("mul", term.m, const(term.a))
        value = build("sub", value, build("mul", term.m, term.r))
        divides: Expr = TRUE
        if int_value(factor) in (1, -1):
            value = build("mul", value, factor)
        else:
            divides = build("eq", build("mod", value, factor), ZERO)
            value = build("floordiv", value, factor)
        begin, end = (Expr(op, (term.base, value)) for op in ("group_begin", "group_end"))
        grouped = (Promise(Expr("is_grouped", (term.base, value))),)
        if positive:
            return _select(divides, KeySet((Lane(begin, end, exact=grouped),)), NOTHING)
        rest = KeySet((Lane(ZERO, begin), Lane(end, END)), grouped)
        return _select(divides, rest, EVERYTHING)

    def at_least(self, term: _Term, bound: Expr) -> KeySet:
        flipped = self.scale(term, const(-1))
        assert isinstance(flipped, _Term)
        return self.at_most(flipped, build("neg", bound))

    # Arithmetic

    def number(self, expr: Expr) -> _Number:
        """`expr` as a function of the key."""
        op, args = expr.op, expr.args
        if "kv" not in expr.variables:
            return expr
        if op == "var":
            return _Term(_KV)
        if op == "table":
            if not _is_of_keys(expr):
                raise _Refusal(f"`{expr}` looks up a row and a key together")
            return _Term(expr)
        if op in ("min", "max"):
            return _Choice(op, self.number(args[0]), self.number(args[1]))
        if op == "abs":
            inner = self.number(args[0])
            return _Choice("max", inner, self.scale(inner, const(-1)))
        if op == "where":
            return _Choice("where", self.number(args[1]), self.number(args[2]), args[0])
        if op == "neg":
            return self.scale(self.number(args[0]), const(-1))
        if op == "add":
            return self.add(self.number(args[0]), self.number(args[1]))
        if op == "sub":
            return self.add(self.number(args[0]), self.scale(self.number(args[1]), const(-1)))
        if op == "mul":
            for one, other in (args, args[::-1]):
                if "kv" not in other.variables:
                    return self.scale(self.number(one), other)
        if op == "floordiv" and "kv" not in args[1].variables:
            return self.divide(self.number(args[0]), args[1])
        _refuse_periods(expr)
        if _is_of_keys(expr) and op in ("mul", "floordiv"):
            return _Term(expr)
        raise _Refusal(f"`{expr}` mixes rows and keys in a way that intervals can not express")

    def add(self, x: _Number, y: _Number) -> _Number:
        if isinstance(x, _Choice):
            return x.map(lambda arm: self.add(arm, y))
        if isinstance(y, _Choice):
            return y.map(lambda arm: self.add(x, arm))
        if isinstance(x, Expr) and isinstance(y, Expr):
            return build("add", x, y)
        if isinstance(x, Expr):
            x, y = y, x
        assert isinstance(x, _Term)
        if isinstance(y, Expr):
            return replace(x, s=build("add", x.s, y))
        s = build("add", x.s, y.s)
        if replace(x, m=ONE, s=ZERO) == replace(y, m=ONE, s=ZERO):
            m = build("add", x.m, y.m)
            return s if m == ZERO else replace(x, m=m, s=s)
        parts = [build("mul", part.quotient, part.m) for part in (x, y)]
        if _is_of_keys(*parts):
            return _Term(build("add", *parts), s=s)
        raise _Refusal(
            f"`{parts[0]}` and `{parts[1]}` are compared, but depend on the key in two ways"
        )

    def scale(self, x: _Number, factor: Expr) -> _Number:
        if isinstance(x, Expr):
            return build("mul", x, factor)
        is_negative = self.sign(factor) < 0
        if isinstance(x, _Choice):
            flip = {"min": "max", "max": "min"}.get(x.op) if is_negative else None
            return x.map(lambda arm: self.scale(arm, factor), flip)
        return replace(x, m=build("mul", x.m, factor), s=build("mul", x.s, factor))

    def divide(self, x: _Number, divisor: Expr) -> _Number:
        if isinstance(x, Expr):
            return build("floordiv", x, divisor)
        if self.sign(divisor) < 0:
            return self.divide(self.scale(x, const(-1)), build("neg", divisor))
        if isinstance(x, _Choice):
            return x.map(lambda arm: self.divide(arm, divisor))
        if x.base != _KV and _is_of_keys(x.quotient, x.m, x.s, divisor):
            whole = build("add", build("mul", x.quotient, x.m), x.s)
            return _Term(build("floordiv", whole, divisor))
        factor = int_value(x.m)
        if x.c == ONE and factor is not None:
            top = build("add", build("mul", x.r, x.m), x.s)
            return _Term(x.base, a=x.a * factor, r=top, c=divisor)
        if x.m == ONE:
            top = build("add", x.r, build("mul", x.s, x.c))
            return _Term(x.base, a=x.a, r=top, c=build("mul", x.c, divisor))
        raise _Refusal(
            f"`({x.quotient} * {x.m} + {x.s}) // {divisor}` is not a step function of kv"
        )

    def sign(self, factor: Expr) -> int:
        """The sign of a factor or divisor of kv; what is not a constant has to be positive."""
        known = int_value(factor)
        if known is not None:
            return known
        if "q" in factor.variables:
            raise _Refusal(
                f"kv is multiplied or divided by `{factor}`, which changes from row to row"
            )
        self.promises.append(Promise(build("gt", factor, ZERO)))
        return 1


def _outside_tables(expr: Expr):
    yield expr
    if expr.op != "table":
        for child in expr.children:
            yield from _outside_tables(child)
