"""Numbers that depend on the key, and their arithmetic: what the two sides of a comparison are solved as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from magi_compile.masks.expr.expr import (
    KV,
    ONE,
    TRUE,
    ZERO,
    Expr,
    build,
    const,
    int_value,
    linear,
)
from magi_compile.masks.expr.integers import MAX_SYMBOL
from magi_compile.masks.solver.key_sets import KeyGrid, Promise, Refusal


@dataclass(frozen=True)
class Term:
    """`m * ((a * base + r) // c) + s`, where `base` depends on b, h and kv and is kv itself or holds look-ups, or is
    the number of a key in its period of a `grid`.

    Whether `m` is negative is known, also where it is not a constant.
    """

    base: Expr
    a: int = 1
    r: Expr = ZERO
    c: Expr = ONE
    m: Expr = ONE
    s: Expr = ZERO
    is_negative: bool = False
    grid: KeyGrid | None = None

    @property
    def quotient(self) -> Expr:
        top = build("add", build("mul", self.base, const(self.a)), self.r)
        return build("floordiv", top, self.c)


@dataclass(frozen=True)
class Choice:
    """min or max of two numbers, or `where(condition, x, y)`."""

    op: str
    x: Number
    y: Number
    condition: Expr = TRUE

    def map(self, function: Callable[[Number], Number], op: str | None = None) -> Choice:
        return Choice(op or self.op, function(self.x), function(self.y), self.condition)


# A plain expression is a number of the row alone.
Number = Expr | Term | Choice


def is_of_keys(*exprs: Expr) -> bool:
    """True if they are the same in all rows of a batch entry and head."""
    return not any("q" in expr.variables for expr in exprs)


def looks_up_keys(expr: Expr) -> bool:
    return any(node.op == "table" and "kv" in node.variables for node in expr.walk())


def refuse_repeats(expr: Expr) -> None:
    """Raises where `expr` repeats along the keys by more than what it looks up, and is not a repeat alone."""
    for node in outside_tables(expr):
        if node.op == "mod" and any(inner == KV for inner in outside_tables(node)):
            raise Refusal(f"`{expr}` depends on the key by more than `{node}` alone")


def direction(expr: Expr) -> int | None:
    """+1, -1 or 0 if `expr` grows, falls or stays along kv, taking every table for growing; None: no order."""
    if "kv" not in expr.variables:
        return 0
    if expr.op in ("var", "table"):
        return 1
    inner = [direction(child) for child in expr.children]
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
        return _sign_of_key(expr) if looks_up_keys(expr) else None
    return 1 if 1 in inner else -1


def _sign_of_key(expr: Expr) -> int | None:
    """The direction of a multiple of kv beside which there are look-ups alone: positions in documents, say, which grow
    in each of them. None: it is something else."""
    terms, _ = linear(expr)
    count = terms.get(KV, 0)
    if count == 0 or any(KV in outside_tables(term) for term in terms if term != KV):
        return None
    return 1 if count > 0 else -1


def outside_tables(expr: Expr) -> Iterator[Expr]:
    """The nodes of `expr` that are not indices of a look-up."""
    yield expr
    if expr.op != "table":
        for child in expr.children:
            yield from outside_tables(child)


class Arithmetic:
    """Sums, products and quotients of such numbers. What they take for granted is left in `promises`."""

    def __init__(self) -> None:
        self.promises: list[Promise] = []

    def number(self, expr: Expr) -> Number:
        """`expr` as a function of the key."""
        op, args = expr.op, expr.args
        if "kv" not in expr.variables:
            return expr
        if op == "var":
            return Term(KV)
        if op == "table":
            if not is_of_keys(expr):
                raise Refusal(f"`{expr}` looks up a row and a key together")
            return Term(expr)
        if op in ("min", "max"):
            return Choice(op, self.number(args[0]), self.number(args[1]))
        if op == "abs":
            inner = self.number(args[0])
            return Choice("max", inner, self.scale(inner, const(-1)))
        if op == "where":
            return Choice("where", self.number(args[1]), self.number(args[2]), args[0])
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
        if is_of_keys(expr) and op in ("mul", "floordiv"):
            return Term(expr)
        raise Refusal(f"`{expr}` mixes rows and keys in a way that intervals cannot express")

    def add(self, x: Number, y: Number) -> Number:
        if isinstance(x, Choice):
            return x.map(lambda arm: self.add(arm, y))
        if isinstance(y, Choice):
            return y.map(lambda arm: self.add(x, arm))
        if isinstance(x, Expr) and isinstance(y, Expr):
            return build("add", x, y)
        if isinstance(x, Expr):
            x, y = y, x
        assert isinstance(x, Term)
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
        if is_of_keys(*parts):
            whole = build("add", *parts)
            if direction(whole) == -1:
                return Term(build("neg", whole), m=const(-1), s=s, is_negative=True)
            return Term(whole, s=s)
        raise Refusal(
            f"`{parts[0]}` and `{parts[1]}` are compared, but depend on the key in two ways"
        )

    def scale(self, x: Number, factor: Expr) -> Number:
        if isinstance(x, Expr):
            return build("mul", x, factor)
        is_negative = self.sign(factor) < 0
        if isinstance(x, Choice):
            flip = {"min": "max", "max": "min"}.get(x.op) if is_negative else None
            return x.map(lambda arm: self.scale(arm, factor), flip)
        m, s = (build("mul", part, factor) for part in (x.m, x.s))
        return replace(x, m=m, s=s, is_negative=x.is_negative != is_negative)

    def divide(self, x: Number, divisor: Expr) -> Number:
        if isinstance(x, Expr):
            return build("floordiv", x, divisor)
        if self.sign(divisor) < 0:
            return self.divide(self.scale(x, const(-1)), build("neg", divisor))
        if isinstance(x, Choice):
            return x.map(lambda arm: self.divide(arm, divisor))
        is_plain = x.base == KV or x.grid is not None
        if not is_plain and is_of_keys(x.quotient, x.m, x.s, divisor):
            whole = build("add", build("mul", x.quotient, x.m), x.s)
            return Term(build("floordiv", whole, divisor))
        factor = int_value(x.m)
        if x.c == ONE and factor is not None:
            top = build("add", build("mul", x.r, x.m), x.s)
            return Term(x.base, a=x.a * factor, r=top, c=divisor, grid=x.grid)
        if x.m == ONE:
            top = build("add", x.r, build("mul", x.s, x.c))
            return Term(x.base, a=x.a, r=top, c=build("mul", x.c, divisor), grid=x.grid)
        raise Refusal(f"`({x.quotient} * {x.m} + {x.s}) // {divisor}` is not a step function of kv")

    def modulo(self, dividend: Expr, divisor: Expr) -> Number:
        """`dividend % divisor`, of a number of the key."""
        if dividend.op == "abs":
            inner = dividend.args[0]
            arms = (build("mod", x, divisor) for x in (inner, build("neg", inner)))
            return self.number(build("where", build("ge", inner, ZERO), *arms))
        if dividend.op == "where":
            arms = (build("mod", x, divisor) for x in dividend.args[1:])
            return self.number(build("where", dividend.args[0], *arms))
        whole = build("mod", dividend, divisor)
        if abs(int_value(divisor) or 0) > MAX_SYMBOL:
            raise Refusal(f"`{whole}` repeats in steps of more keys than there can be")
        x = self.number(dividend)
        if isinstance(x, Expr):
            return build("mod", x, divisor)
        if isinstance(x, Term) and looks_up_keys(x.base) and is_of_keys(whole):
            return Term(whole)
        if divisor.variables or any(node.op == "table" for node in divisor.walk()):
            raise Refusal(f"`{whole}` repeats along the keys in steps that are not one number")
        if isinstance(x, Term) and x.base == KV and x.a == 1 and self.sign(divisor) > 0:
            if x.m == ONE:
                return self.repeat(KeyGrid(x.r, x.c, x.s, divisor))
            if x.m == const(-1):  # -x % n is n - 1 - (x - 1) % n
                start = build("neg", build("add", x.s, ONE))
                inner = self.scale(self.repeat(KeyGrid(x.r, x.c, start, divisor)), const(-1))
                return self.add(inner, build("sub", divisor, ONE))
        grid = self.without_repeat(x, divisor)
        if grid is None:
            raise Refusal(
                f"`{whole}` repeats along the keys, but not as a multiple of their number"
            )
        return self.repeat(grid)

    def repeat(self, grid: KeyGrid) -> Term:
        """The number of a key in its period of the grid."""
        quotient = build("floordiv", build("add", KV, grid.shift), grid.step)
        return Term(build("mod", build("add", quotient, grid.start), grid.length), grid=grid)

    def without_repeat(self, x: Number, divisor: Expr) -> KeyGrid | None:
        """The grid of `x % divisor` where `x` is `y % n // c`, and n a multiple of `c * divisor`:
        that of `y // c % divisor`."""
        if not isinstance(x, Term) or x.grid is None:
            return None
        is_plain = x.a == 1 and x.r == ZERO and x.m == ONE and x.s == ZERO
        grid = x.grid
        n, c, length = (int_value(y) for y in (grid.length, x.c, divisor))
        if not is_plain or n is None or c is None or length is None:
            return None
        if length <= 0 or n % (c * length):
            return None
        # ((kv + shift) // step + start) // c
        shift = build("add", grid.shift, build("mul", grid.start, grid.step))
        return KeyGrid(shift, build("mul", grid.step, x.c), ZERO, divisor)

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
