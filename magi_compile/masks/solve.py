"""Solves a mask expression for kv: which key intervals does a row see, as expressions of the row.

    (q >= kv) & (t0[q] == t0[kv])      ->      [group_begin(t0[kv], t0[q]), min(q + 1, group_end(...)))

Each rule below is an equality of sets, exact for every value of the captured tensors, or exact under a
`Promise` about them that is checked when the intervals are evaluated. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from magi_compile.masks.expr import (
    END,
    ONE,
    OPPOSITES,
    TRUE,
    ZERO,
    Expr,
    ExprError,
    build,
    const,
    int_value,
    linear,
    var,
)
from magi_compile.masks.key_sets import (
    EVERYTHING,
    MAX_INTERVALS,
    NOTHING,
    Grid,
    KeySet,
    Lane,
    Promise,
    Refusal,
    Repeat,
    as_key_set,
    intersect,
    prune,
    select,
    too_many,
    unite,
)

_KV = var("kv")


class UnsupportedMaskError(NotImplementedError):
    """A valid mask that intervals can not express.

    Attributes:
        reasons: why, every reason that was found.
    """

    def __init__(self, reasons: list[str]):
        self.reasons = list(dict.fromkeys(reasons))
        super().__init__("this mask is not representable yet: " + "; ".join(self.reasons))


@lru_cache(maxsize=1024)
def solve(expr: Expr) -> KeySet:
    """The keys for which the mask expression `expr` holds, in lanes that may repeat along the keys.

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
    keys = as_key_set(solver.truth(expr, True))
    if len(keys.lanes) > MAX_INTERVALS and not solver.reasons:
        solver.reasons.append(too_many(len(keys.lanes)))
    if solver.reasons:
        raise UnsupportedMaskError(solver.reasons)
    return keys


# Numbers that depend on the key


@dataclass(frozen=True)
class _Term:
    """`m * ((a * base + r) // c) + s`, where `base` depends on b and kv and is kv itself or holds look-ups.

    Whether `m` is negative is known, also where it is not a constant.
    """

    base: Expr
    a: int = 1
    r: Expr = ZERO
    c: Expr = ONE
    m: Expr = ONE
    s: Expr = ZERO
    is_negative: bool = False

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


def _is_of_keys(*exprs: Expr) -> bool:
    """Whether they are the same in all rows of a batch entry."""
    return not any(expr.variables & {"q", "h"} for expr in exprs)


def _looks_up_keys(expr: Expr) -> bool:
    return any(node.op == "table" and "kv" in node.variables for node in expr.walk())


def _refuse_repeats(expr: Expr) -> None:
    """Raises where `expr` repeats along the keys by more than what it looks up, and is not a repeat alone."""
    for node in _outside_tables(expr):
        if node.op == "mod" and any(inner == _KV for inner in _outside_tables(node)):
            raise Refusal(f"`{expr}` depends on the key by more than `{node}` alone")


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
        return _sign_of_key(expr) if _looks_up_keys(expr) else None
    return 1 if 1 in inner else -1


def _sign_of_key(expr: Expr) -> int | None:
    """The direction of a multiple of kv beside which there are look-ups alone: positions in documents, say, which grow in each of
    them. None: it is something else."""
    terms, _ = linear(expr)
    count = terms.get(_KV, 0)
    if count == 0 or any(_KV in _outside_tables(term) for term in terms if term != _KV):
        return None
    return 1 if count > 0 else -1


class _Solver:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.memo: dict[tuple[Expr, bool], Expr | KeySet] = {}
        self.promises: list[Promise] = []  # of the comparison at hand
        self.grids: dict[Expr, Grid] = {}  # of `x % length`, the numbers of keys that repeat

    # Truth values. Negation is pushed down to the leaves, where complements are exact and small.

    def truth(self, expr: Expr, positive: bool) -> Expr | KeySet:
        """Where `expr` is `positive`: a condition of the row if kv does not matter, a set of keys otherwise."""
        if "kv" not in expr.variables:
            return expr if positive else build("not", expr)
        if (expr, positive) not in self.memo:
            try:
                self.memo[expr, positive] = self._truth(expr, positive)
            except (Refusal, ExprError) as refusal:
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
            op = OPPOSITES[op]
        return self.compare(op, *args)

    def both(self, x: Expr | KeySet, y: Expr | KeySet) -> Expr | KeySet:
        if isinstance(x, Expr) and isinstance(y, Expr):
            return build("and", x, y)
        if isinstance(x, Expr):
            return select(x, as_key_set(y), NOTHING)
        return select(y, x, NOTHING) if isinstance(y, Expr) else intersect(x, y)

    def either(self, x: Expr | KeySet, y: Expr | KeySet) -> Expr | KeySet:
        if isinstance(x, Expr) and isinstance(y, Expr):
            return build("or", x, y)
        if isinstance(x, Expr):
            return select(x, EVERYTHING, as_key_set(y))
        return select(y, EVERYTHING, x) if isinstance(y, Expr) else unite(x, y)

    def choose(self, condition: Expr, x: tuple[Expr, bool], y: tuple[Expr, bool]) -> Expr | KeySet:
        """Where `x` holds under the condition, or `y` without it."""
        yes = self.truth(condition, True)
        if isinstance(yes, Expr):
            return select(yes, as_key_set(self.truth(*x)), as_key_set(self.truth(*y)))
        no = self.truth(condition, False)
        return self.either(self.both(yes, self.truth(*x)), self.both(no, self.truth(*y)))

    def key_condition(self, expr: Expr, positive: bool) -> KeySet:
        """A condition on the key alone, taken as it is."""
        if not _is_of_keys(expr):
            raise Refusal(f"`{expr}` looks up a row and a key together")
        return KeySet((Lane(ZERO, END, expr if positive else build("not", expr)),))

    # Comparisons

    def compare(self, op: str, x: Expr, y: Expr) -> Expr | KeySet:
        if _is_of_keys(x, y) and (_looks_up_keys(x) or _looks_up_keys(y)):
            return self.key_condition(build(op, x, y), True)
        outer, self.promises = self.promises, []
        try:
            result = self.ordered(op, self.number(x), self.number(y))
            if self.promises:
                result = as_key_set(result)
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
                yes, no = (as_key_set(self.ordered(op, *pair)) for pair in pairs)
                condition = self.truth(one.condition, True)
                if isinstance(condition, Expr):
                    return select(condition, yes, no)
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
        if term.is_negative:
            # -m * x <= bound  is  x >= ceil(-bound / m)  is  not x <= ceil(...) - 1
            limit = build("neg", build("floordiv", bound, build("neg", term.m)))
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
        if term.base in self.grids:
            return self.repeated(term.base, limit, is_lower)
        edge, ordered = self.first_above(term.base, limit)
        lane = Lane(edge, END) if is_lower else Lane(ZERO, edge)
        return KeySet(prune([lane._replace(ordered=ordered)]))

    def first_above(self, base: Expr, limit: Expr) -> tuple[Expr, tuple[Promise, ...]]:
        """The key from which on `base > limit`."""
        if base == _KV:
            return build("add", limit, ONE), ()
        _refuse_repeats(base)
        if _direction(base) != 1:
            raise Refusal(f"`{base}` is compared with a row, but does not grow along the keys")
        return Expr("upper_bound", (base, limit)), (Promise(Expr("is_sorted", (base,))),)

    def repeated(self, base: Expr, limit: Expr, is_lower: bool) -> KeySet:
        """The keys with `base <= limit`, or `base > limit`, where `base` repeats along them."""
        grid, above = self.grids[base], build("add", limit, ONE)
        repeat = Repeat(grid, above, grid.length) if is_lower else Repeat(grid, ZERO, above)
        return KeySet((Lane(ZERO, END, repeats=(repeat,)),))

    def equal(self, term: _Term, value: Expr, positive: bool) -> Expr | KeySet:
        """The keys with `term == value`, or with `term != value`; term.s is 0."""
        if term.base == _KV or term.c != ONE or term.base in self.grids:
            if positive:
                return intersect(self.at_most(term, value), self.at_least(term, value))
            below = self.at_most(term, build("sub", value, ONE))
            return unite(below, self.at_least(term, build("add", value, ONE)))
        _refuse_repeats(term.base)
        bare = any(node == _KV for node in _outside_tables(term.base))
        if bare and _direction(term.base) is None:
            raise Refusal(f"`{term.base}` is compared with a row, but has no order along the keys")
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
            return select(divides, KeySet((Lane(begin, end, grouped=grouped),)), NOTHING)
        rest = KeySet((Lane(ZERO, begin), Lane(end, END)), grouped)
        return select(divides, rest, EVERYTHING)

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
                raise Refusal(f"`{expr}` looks up a row and a key together")
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
        if op == "mod" and "kv" not in args[1].variables:
            return self.modulo(args[0], args[1])
        if _is_of_keys(expr) and op in ("mul", "floordiv"):
            return _Term(expr)
        raise Refusal(f"`{expr}` mixes rows and keys in a way that intervals can not express")

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
        if x.quotient == y.quotient:
            m = build("add", x.m, y.m)
            if m == ZERO:
                return s
            is_negative = x.is_negative if x.is_negative == y.is_negative else self.sign(m) < 0
            return replace(x, m=m, s=s, is_negative=is_negative)
        parts = [build("mul", part.quotient, part.m) for part in (x, y)]
        if _is_of_keys(*parts):
            whole = build("add", *parts)
            if _direction(whole) == -1:
                return _Term(build("neg", whole), m=const(-1), s=s, is_negative=True)
            return _Term(whole, s=s)
        raise Refusal(
            f"`{parts[0]}` and `{parts[1]}` are compared, but depend on the key in two ways"
        )

    def scale(self, x: _Number, factor: Expr) -> _Number:
        if isinstance(x, Expr):
            return build("mul", x, factor)
        is_negative = self.sign(factor) < 0
        if isinstance(x, _Choice):
            flip = {"min": "max", "max": "min"}.get(x.op) if is_negative else None
            return x.map(lambda arm: self.scale(arm, factor), flip)
        m, s = (build("mul", part, factor) for part in (x.m, x.s))
        return replace(x, m=m, s=s, is_negative=x.is_negative != is_negative)

    def divide(self, x: _Number, divisor: Expr) -> _Number:
        if isinstance(x, Expr):
            return build("floordiv", x, divisor)
        if self.sign(divisor) < 0:
            return self.divide(self.scale(x, const(-1)), build("neg", divisor))
        if isinstance(x, _Choice):
            return x.map(lambda arm: self.divide(arm, divisor))
        is_plain = x.base == _KV or x.base in self.grids
        if not is_plain and _is_of_keys(x.quotient, x.m, x.s, divisor):
            whole = build("add", build("mul", x.quotient, x.m), x.s)
            return _Term(build("floordiv", whole, divisor))
        factor = int_value(x.m)
        if x.c == ONE and factor is not None:
            top = build("add", build("mul", x.r, x.m), x.s)
            return _Term(x.base, a=x.a * factor, r=top, c=divisor)
        if x.m == ONE:
            top = build("add", x.r, build("mul", x.s, x.c))
            return _Term(x.base, a=x.a, r=top, c=build("mul", x.c, divisor))
        raise Refusal(f"`({x.quotient} * {x.m} + {x.s}) // {divisor}` is not a step function of kv")

    def modulo(self, dividend: Expr, divisor: Expr) -> _Number:
        """`dividend % divisor`, of a number of the key."""
        if dividend.op == "abs":
            inner = dividend.args[0]
            arms = (build("mod", x, divisor) for x in (inner, build("neg", inner)))
            return self.number(build("where", build("ge", inner, ZERO), *arms))
        if dividend.op == "where":
            arms = (build("mod", x, divisor) for x in dividend.args[1:])
            return self.number(build("where", dividend.args[0], *arms))
        whole = build("mod", dividend, divisor)
        x = self.number(dividend)
        if isinstance(x, Expr):
            return build("mod", x, divisor)
        if isinstance(x, _Term) and _looks_up_keys(x.base) and _is_of_keys(whole):
            return _Term(whole)
        if divisor.variables or any(node.op == "table" for node in divisor.walk()):
            raise Refusal(f"`{whole}` repeats along the keys in steps that are not one number")
        if isinstance(x, _Term) and x.base == _KV and x.a == 1 and self.sign(divisor) > 0:
            if x.m == ONE:
                return self.repeat(Grid(x.r, x.c, x.s, divisor))
            if x.m == const(-1):  # -x % n is n - 1 - (x - 1) % n
                start = build("neg", build("add", x.s, ONE))
                inner = self.scale(self.repeat(Grid(x.r, x.c, start, divisor)), const(-1))
                return self.add(inner, build("sub", divisor, ONE))
        grid = self.without_repeat(x, divisor)
        if grid is None:
            raise Refusal(
                f"`{whole}` repeats along the keys, but not as a multiple of their number"
            )
        return self.repeat(grid)

    def repeat(self, grid: Grid) -> _Term:
        """The number of a key in its piece of the grid."""
        quotient = build("floordiv", build("add", _KV, grid.shift), grid.step)
        base = build("mod", build("add", quotient, grid.start), grid.length)
        self.grids[base] = grid
        return _Term(base)

    def without_repeat(self, x: _Number, divisor: Expr) -> Grid | None:
        """The grid of `x % divisor` where `x` is `y % n // c`, and n a multiple of `c * divisor`: that of `y // c % divisor`."""
        if not isinstance(x, _Term) or x.base not in self.grids:
            return None
        is_plain = x.a == 1 and x.r == ZERO and x.m == ONE and x.s == ZERO
        grid = self.grids[x.base]
        n, c, length = (int_value(y) for y in (grid.length, x.c, divisor))
        if not is_plain or n is None or c is None or length is None:
            return None
        if length <= 0 or n % (c * length):
            return None
        # ((kv + shift) // step + start) // c
        shift = build("add", grid.shift, build("mul", grid.start, grid.step))
        return Grid(shift, build("mul", grid.step, x.c), ZERO, divisor)

    def sign(self, factor: Expr) -> int:
        """The sign of a factor or divisor of kv; what is not a constant has to be positive."""
        known = int_value(factor)
        if known is not None:
            return known
        if "q" in factor.variables:
            raise Refusal(
                f"kv is multiplied or divided by `{factor}`, which changes from row to row"
            )
        self.promises.append(Promise(build("gt", factor, ZERO)))
        return 1


def _outside_tables(expr: Expr):
    yield expr
    if expr.op != "table":
        for child in expr.children:
            yield from _outside_tables(child)
