"""Solves a mask expression for kv: which key intervals does a row see, as expressions of the row.

    (q >= kv) & (t0[q] == t0[kv])      ->      [group_begin(t0[kv], t0[q]), min(q + 1, group_end(...)))

Each rule below is an equality of sets, exact for every value of the captured tensors, or exact under a
`Promise` about them that is checked when the intervals are evaluated. Nothing here touches a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from magi_compile.masks.errors import UnsupportedMaskError
from magi_compile.masks.expr.expr import (
    END,
    KV,
    ONE,
    OPPOSITES,
    TRUE,
    ZERO,
    Expr,
    ExprError,
    build,
    const,
    int_value,
)
from magi_compile.masks.solver.affine import (
    Arithmetic,
    Choice,
    Number,
    Term,
    direction,
    is_of_keys,
    looks_up_keys,
    outside_tables,
    refuse_repeats,
)
from magi_compile.masks.solver.key_sets import (
    EVERYTHING,
    MAX_INTERVALS,
    NOTHING,
    KeyGrid,
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


@lru_cache(maxsize=1024)
def solve(expr: Expr) -> KeySet:
    """The keys for which the mask expression `expr` holds, in lanes that may repeat along the keys. Raises
    UnsupportedMaskError with every reason found why intervals cannot express the mask."""
    solver = _Solver()
    if expr.kind == "int":
        solver.reasons.append(f"a mask must be a truth value, got the integer `{expr}`")
        expr = TRUE
    for node in expr.walk():
        if node.op == "unsupported":
            solver.reasons += node.args[1:]
    keys = as_key_set(solver.truth(expr, True))
    if len(keys.lanes) > MAX_INTERVALS and not solver.reasons:
        solver.reasons.append(too_many(len(keys.lanes)))
    if solver.reasons:
        raise UnsupportedMaskError(solver.reasons)
    return keys


class _Solver:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.memo: dict[tuple[Expr, bool], Expr | KeySet] = {}
        self.numbers = Arithmetic()

    # Truth values. Negation is pushed down to the leaves, where complements are exact and small.

    def truth(self, expr: Expr, positive: bool) -> Expr | KeySet:
        """Solves `expr` being `positive`: a condition of the row if kv does not matter, a set of keys otherwise."""
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
        """Selects `x` under the condition, or `y` without it."""
        yes = self.truth(condition, True)
        if isinstance(yes, Expr):
            return select(yes, as_key_set(self.truth(*x)), as_key_set(self.truth(*y)))
        no = self.truth(condition, False)
        return self.either(self.both(yes, self.truth(*x)), self.both(no, self.truth(*y)))

    def key_condition(self, expr: Expr, positive: bool) -> KeySet:
        """A condition on the key alone, taken as it is."""
        if not is_of_keys(expr):
            raise Refusal(f"`{expr}` looks up a row and a key together")
        return KeySet((Lane(ZERO, END, expr if positive else build("not", expr)),))

    # Comparisons

    def compare(self, op: str, x: Expr, y: Expr) -> Expr | KeySet:
        if is_of_keys(x, y) and (looks_up_keys(x) or looks_up_keys(y)):
            return self.key_condition(build(op, x, y), True)
        outer, self.numbers.promises = self.numbers.promises, []  # of the comparison at hand
        try:
            result = self.ordered(op, self.numbers.number(x), self.numbers.number(y))
            if self.numbers.promises:
                result = as_key_set(result)
                result = result._replace(required=result.required + tuple(self.numbers.promises))
        finally:
            self.numbers.promises = outer
        return result

    def ordered(self, op: str, x: Number, y: Number) -> Expr | KeySet:
        """The keys for which `x op y` holds."""
        if isinstance(x, Expr) and isinstance(y, Expr):
            return build(op, x, y)
        for side, one in enumerate((x, y)):
            if isinstance(one, Choice) and one.op == "where":
                pairs = [(arm, y) if side == 0 else (x, arm) for arm in (one.x, one.y)]
                yes, no = (as_key_set(self.ordered(op, *pair)) for pair in pairs)
                condition = self.truth(one.condition, True)
                if isinstance(condition, Expr):
                    return select(condition, yes, no)
                other = self.truth(one.condition, False)
                return self.either(self.both(condition, yes), self.both(other, no))
        if isinstance(x, Choice) or isinstance(y, Choice):
            if op in ("eq", "ne"):
                parts = ("le", "ge") if op == "eq" else ("lt", "gt")
                combine = self.both if op == "eq" else self.either
                return combine(*(self.ordered(part, x, y) for part in parts))
            if isinstance(y, Choice):
                x, y, op = y, x, {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}[op]
            assert isinstance(x, Choice)
            # max(a, b) <= y needs both, max(a, b) >= y needs one; min is the other way round.
            combine = self.both if (x.op == "max") == (op in ("le", "lt")) else self.either
            return combine(self.ordered(op, x.x, y), self.ordered(op, x.y, y))
        difference = self.numbers.add(x, self.numbers.scale(y, const(-1)))
        if isinstance(difference, Expr):
            return build(op, difference, ZERO)
        assert isinstance(difference, Term)
        bound = build("neg", difference.s)
        term = replace(difference, s=ZERO)
        if op in ("eq", "ne"):
            return self.equal(term, bound, op == "eq")
        if op in ("lt", "gt"):
            bound = build("sub" if op == "lt" else "add", bound, ONE)
        return self.at_most(term, bound) if op in ("lt", "le") else self.at_least(term, bound)

    def at_most(self, term: Term, bound: Expr) -> KeySet:
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
        if term.grid is not None:
            return self.repeated(term.grid, limit, is_lower)
        edge, ordered = self.first_above(term.base, limit)
        lane = Lane(edge, END) if is_lower else Lane(ZERO, edge)
        return KeySet(prune([lane._replace(ordered=ordered)]))

    def first_above(self, base: Expr, limit: Expr) -> tuple[Expr, tuple[Promise, ...]]:
        """The key from which on `base > limit`."""
        if base == KV:
            return build("add", limit, ONE), ()
        refuse_repeats(base)
        if direction(base) != 1:
            raise Refusal(f"`{base}` is compared with a row, but does not grow along the keys")
        return Expr("upper_bound", (base, limit)), (Promise(Expr("is_sorted", (base,))),)

    def repeated(self, grid: KeyGrid, limit: Expr, is_lower: bool) -> KeySet:
        """The keys whose number in their period is at most `limit`, or above it."""
        above = build("add", limit, ONE)
        repeat = Repeat(grid, above, grid.length) if is_lower else Repeat(grid, ZERO, above)
        return KeySet((Lane(ZERO, END, repeats=(repeat,)),))

    def equal(self, term: Term, value: Expr, positive: bool) -> Expr | KeySet:
        """The keys with `term == value`, or with `term != value`; term.s is 0."""
        if term.base == KV or term.c != ONE or term.grid is not None:
            if positive:
                return intersect(self.at_most(term, value), self.at_least(term, value))
            below = self.at_most(term, build("sub", value, ONE))
            return unite(below, self.at_least(term, build("add", value, ONE)))
        refuse_repeats(term.base)
        bare = any(node == KV for node in outside_tables(term.base))
        if bare and direction(term.base) is None:
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

    def at_least(self, term: Term, bound: Expr) -> KeySet:
        flipped = self.numbers.scale(term, const(-1))
        assert isinstance(flipped, Term)
        return self.at_most(flipped, build("neg", bound))
