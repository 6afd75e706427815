"""Mask expressions: what a mask_mod computes, as a small immutable tree with a readable printed form.

    (q >= kv) & (t0[b, q] == t0[b, kv])

Variables are `b`, `h`, `q`, `kv`; `t{i}` are captured tensors, looked up at every index they have; `s{i}` are
captured integers that are known only when the mask is evaluated. Integers are unbounded, `//` and `%` floor,
as in Python and PyTorch. `int32(x)` is x, of which is known only when the mask is evaluated that it fits that dtype.

Trees are made by `build` alone, which folds constants and sorts sums, so that equal trees compare equal and
`parse(str(expr)) == expr`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from magi_compile.functions.names import SIGNS


class ExprError(ValueError):
    """An operation that mask expressions do not have, or a text that is not a mask expression."""


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """One node. `args` holds sub-expressions, but for the leaves:

    int (value), bool (value), var (name), symbol (number), table (number, *indices),
    unsupported (serial number, *reasons).
    """

    op: str
    args: tuple

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Expr):
            return NotImplemented
        same = self._hash == other._hash and self.op == other.op
        return same and self.args == other.args

    @property
    def children(self) -> tuple[Expr, ...]:
        return tuple(arg for arg in self.args if isinstance(arg, Expr))

    @cached_property
    def tables(self) -> frozenset[int]:
        """The numbers of the tables that it looks up."""
        return frozenset(node.args[0] for node in self.walk() if node.op == "table")

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that occur in it."""
        if self.op == "var":
            return frozenset(self.args)
        return frozenset().union(*(child.variables for child in self.children))

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why it has no value: the unsupported parts in it. Empty where it has one."""
        if self.op == "unsupported":
            return self.args[1:]
        return tuple(dict.fromkeys(reason for child in self.children for reason in child.reasons))

    @cached_property
    def kind(self) -> str:
        """ "int", "bool", or "any" where that depends on the dtype of a captured tensor."""
        if self.op in _KINDS:
            return _KINDS[self.op]
        # The condition of a `where` does not count.
        kinds = {child.kind for child in self.children[-2:]}
        return kinds.pop() if len(kinds) == 1 else "any"

    def walk(self):
        """The node and all nodes below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def __str__(self) -> str:
        return _show(self, 0)

    def __repr__(self) -> str:
        return f"Expr({self})"


# Marks of a sum or product that PyTorch computes in this dtype, and that has to fit it.
FITS = ("int32", "int64")

OPPOSITES = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_KINDS = {
    **dict.fromkeys(
        ("int", "var", "symbol", "add", "sub", "neg", "mul", "floordiv", "mod", "abs"), "int"
    ),
    **dict.fromkeys(("group_begin", "group_end", "upper_bound", *FITS), "int"),
    **dict.fromkeys((*OPPOSITES, "bool", "and", "or", "xor", "not"), "bool"),
    **dict.fromkeys(("table", "unsupported"), "any"),
}

TRUE, FALSE = Expr("bool", (True,)), Expr("bool", (False,))
ZERO, ONE = Expr("int", (0,)), Expr("int", (1,))
END = Expr("int", (2**31 - 1,))  # behind every key


def const(value: int | bool) -> Expr:
    if isinstance(value, bool):
        return TRUE if value else FALSE
    return Expr("int", (value,))


def var(name: str) -> Expr:
    return Expr("var", (name,))


KV = var("kv")


def symbol(index: int) -> Expr:
    return Expr("symbol", (index,))


def table(index: int, *indices: Expr) -> Expr:
    """The captured tensor `t{index}` at `indices`."""
    return Expr("table", (index, *indices))


_CONNECTIVES = ("and", "or", "xor", "not")
_serial = itertools.count()


def unsupported(*reasons: str) -> Expr:
    """A value that mask expressions cannot state; the reasons reach the user.

    No two of them are equal: nothing is known of their values, so nothing may be folded or cancelled.
    """
    return Expr("unsupported", (next(_serial), *reasons))


def int_value(expr: Expr) -> int | None:
    """The value of an integer constant, None for everything else."""
    return expr.args[0] if expr.op == "int" else None


def build(op: str, *args: Expr) -> Expr:
    """The expression `op(*args)`, simplified. Raises ExprError where `op` does not exist for operands of these kinds.

    What has an unsupported operand is neither simplified nor known, so that it cannot be cancelled or folded; truth
    values keep their other operands, so that the user hears of all that is unsupported in them.
    """
    reasons = [reason for arg in args for reason in arg.reasons]
    if not reasons:
        return _BUILDERS[op](*args)
    return Expr(op, args) if op in _CONNECTIVES else unsupported(*dict.fromkeys(reasons))


# Sums. They are kept as one term after the other in order of appearance, the constant last.


@lru_cache(maxsize=1 << 16)
def linear(expr: Expr) -> tuple[Mapping[Expr, int], int]:
    """`expr` as integer multiples of terms plus a constant."""
    if expr.op == "int":
        return {}, expr.args[0]
    if expr.op in ("add", "sub"):
        left, right = (linear(arg) for arg in expr.args)
        return _combine(left, right, -1 if expr.op == "sub" else 1)
    if expr.op == "neg":
        return _combine(({}, 0), linear(expr.args[0]), -1)
    if expr.op == "mul" and expr.args[1].op == "int":
        return _combine(({}, 0), linear(expr.args[0]), expr.args[1].args[0])
    return {expr: 1}, 0


def _combine(
    left: tuple[Mapping[Expr, int], int], right: tuple[Mapping[Expr, int], int], factor: int
) -> tuple[dict[Expr, int], int]:
    terms = dict(left[0])
    for term, count in right[0].items():
        terms[term] = terms.get(term, 0) + factor * count
        if not terms[term]:
            del terms[term]
    return terms, left[1] + factor * right[1]


def _sum(terms: Mapping[Expr, int], constant: int) -> Expr:
    total: Expr | None = None
    for term, count in terms.items():
        size = term if abs(count) == 1 else Expr("mul", (term, const(abs(count))))
        if total is None:
            total = size if count > 0 else Expr("neg", (size,))
        else:
            total = Expr("add" if count > 0 else "sub", (total, size))
    if total is None:
        return const(constant)
    if constant:
        total = Expr("add" if constant > 0 else "sub", (total, const(abs(constant))))
    return total


def _add(x: Expr, y: Expr) -> Expr:
    if x.kind == y.kind == "bool":
        return _or(x, y)
    x, y = _integers("+", x, y)
    return _sum(*_combine(linear(x), linear(y), 1))


def _sub(x: Expr, y: Expr) -> Expr:
    x, y = _integers("-", x, y)
    return _sum(*_combine(linear(x), linear(y), -1))


def _neg(x: Expr) -> Expr:
    return _sub(const(0), x)


def _mul(x: Expr, y: Expr) -> Expr:
    if x.kind == y.kind == "bool":
        return _and(x, y)
    x, y = _integers("*", x, y)
    if x.op == "int":
        x, y = y, x
    if y.op == "int":
        return _sum(*_combine(({}, 0), linear(x), y.args[0])) if y.args[0] else y
    return Expr("mul", (x, y))


def _floordiv(x: Expr, y: Expr) -> Expr:
    x, y = _integers("//", x, y)
    if int_value(y) == 0:
        raise ExprError("division by zero")
    if int_value(y) == 1:
        return x
    if y.op == "int":
        terms, constant = linear(x)
        divisor = y.args[0]
        if all(count % divisor == 0 for count in terms.values()):
            parts = {term: count // divisor for term, count in terms.items()}
            return _sum(parts, constant // divisor)
    return Expr("floordiv", (x, y))


def _mod(x: Expr, y: Expr) -> Expr:
    x, y = _integers("%", x, y)
    if int_value(y) == 0:
        raise ExprError("division by zero")
    if y.op == "int":
        terms, constant = linear(x)
        if all(count % y.args[0] == 0 for count in terms.values()):
            return const(constant % y.args[0])
    return Expr("mod", (x, y))


def _abs(x: Expr) -> Expr:
    _want_int("abs", x)
    return const(abs(x.args[0])) if x.op == "int" else Expr("abs", (x,))


@lru_cache(maxsize=1 << 16)
def is_le(x: Expr, y: Expr) -> bool:
    """True if `x <= y` can be seen without values, for every row and key."""
    if x == y or y == END:
        return True
    if x.op == "max":
        return all(is_le(arg, y) for arg in x.args)
    if y.op == "min":
        return all(is_le(x, arg) for arg in y.args)
    if x.op == "min" and any(is_le(arg, y) for arg in x.args):
        return True
    if y.op == "max" and any(is_le(x, arg) for arg in y.args):
        return True
    terms, constant = _combine(linear(y), linear(x), -1)
    return constant >= 0 and all(n > 0 and is_natural(term) for term, n in terms.items())


def is_natural(term: Expr) -> bool:
    """True if a term is at least 0 by what it is."""
    return term.op in ("var", "abs", "group_begin", "group_end", "upper_bound") or (
        term.op in ("mod", "floordiv")
        and (int_value(term.args[1]) or 0) > 0
        and (term.op == "mod" or is_le(const(0), term.args[0]))
    )


def _min(x: Expr, y: Expr) -> Expr:
    if x.kind == y.kind == "bool":
        return _and(x, y)
    x, y = _integers("min", x, y)
    if is_le(x, y):
        return x
    return y if is_le(y, x) else Expr("min", (x, y))


def _max(x: Expr, y: Expr) -> Expr:
    if x.kind == y.kind == "bool":
        return _or(x, y)
    x, y = _integers("max", x, y)
    if is_le(x, y):
        return y
    return x if is_le(y, x) else Expr("max", (x, y))


# Truth


def _and(x: Expr, y: Expr) -> Expr:
    _want_bool("&", x, y)
    if x in (y, FALSE) or y == TRUE:
        return x
    return y if x == TRUE or y == FALSE else Expr("and", (x, y))


def _or(x: Expr, y: Expr) -> Expr:
    _want_bool("|", x, y)
    if x in (y, TRUE) or y == FALSE:
        return x
    return y if x == FALSE or y == TRUE else Expr("or", (x, y))


def _xor(x: Expr, y: Expr) -> Expr:
    _want_bool("^", x, y)
    if x == y:
        return FALSE
    for one, other in ((x, y), (y, x)):
        if one.op == "bool":
            return _not(other) if one == TRUE else other
    return Expr("xor", (x, y))


def _not(x: Expr) -> Expr:
    _want_bool("~", x)
    if x.op == "bool":
        return const(not x.args[0])
    if x.op in OPPOSITES:
        return Expr(OPPOSITES[x.op], x.args)
    return x.args[0] if x.op == "not" else Expr("not", (x,))


def _comparison(op: str) -> Callable[[Expr, Expr], Expr]:
    compute = getattr(operator, op)

    def compare(x: Expr, y: Expr) -> Expr:
        kinds = {x.kind, y.kind}
        if op in ("eq", "ne") and kinds in ({"bool"}, {"bool", "any"}):
            return _xor(x, y) if op == "ne" else _not(_xor(x, y))
        if kinds == {"bool", "any"}:
            raise ExprError(f"`{SIGNS[op]}` between {_kinds(x, y)}")
        if x.kind == "bool":
            return _where(x, compare(ONE, y), compare(ZERO, y))
        if y.kind == "bool":
            return _where(y, compare(x, ONE), compare(x, ZERO))
        if x.op == y.op == "int":
            return const(compute(*x.args, *y.args))
        return const(compute(0, 0)) if x == y else Expr(op, (x, y))

    return compare


def _where(condition: Expr, x: Expr, y: Expr) -> Expr:
    _want_bool("where", condition)
    if {x.kind, y.kind} == {"int", "bool"}:
        x, y = _integers("where", x, y)
    if condition.op == "bool":
        return x if condition == TRUE else y
    if x == y:
        return x
    if x.op == "bool":
        return _or(condition, y) if x == TRUE else _and(_not(condition), y)
    if y.op == "bool":
        return _or(_not(condition), x) if y == TRUE else _and(condition, x)
    return Expr("where", (condition, x, y))


def _fits(dtype: str) -> Callable[[Expr], Expr]:
    return lambda x: Expr(dtype, (x,))


def without_marks(expr: Expr) -> Expr:
    """`expr` as unbounded integers have it: `int32(x)` is x."""
    if not any(node.op in FITS for node in expr.walk()):
        return expr
    args = [without_marks(arg) if isinstance(arg, Expr) else arg for arg in expr.args]
    if expr.op in FITS:
        return args[0]
    return build(expr.op, *args) if expr.op in _BUILDERS else Expr(expr.op, tuple(args))


def exchanged(expr: Expr) -> Expr:
    """`expr` with q in the place of kv, and kv in that of q."""
    if not {"q", "kv"} & expr.variables:
        return expr
    if expr.op == "var":
        return var("kv" if expr.args[0] == "q" else "q")
    args = (exchanged(arg) if isinstance(arg, Expr) else arg for arg in expr.args)
    return Expr(expr.op, tuple(args))


def _integers(op: str, *args: Expr) -> tuple[Expr, ...]:
    """The operands of an operation on integers: a truth value beside an integer is 1 or 0, as PyTorch promotes it."""
    if {arg.kind for arg in args} != {"int", "bool"}:
        _want_int(op, *args)
    return tuple(_where(arg, ONE, ZERO) if arg.kind == "bool" else arg for arg in args)


def _want_int(op: str, *args: Expr) -> None:
    if any(arg.kind == "bool" for arg in args):
        raise ExprError(f"`{op}` of {_kinds(*args)}")


def _want_bool(op: str, *args: Expr) -> None:
    if any(arg.kind == "int" for arg in args):
        raise ExprError(f"`{op}` of {_kinds(*args)}")


def _kinds(*args: Expr) -> str:
    names = {"int": "integer", "bool": "truth value", "any": "captured value"}
    return " and ".join(f"{names[arg.kind]} `{arg}`" for arg in args)


_BUILDERS: dict[str, Callable[..., Expr]] = {
    "add": _add,
    "sub": _sub,
    "neg": _neg,
    "mul": _mul,
    "floordiv": _floordiv,
    "mod": _mod,
    "abs": _abs,
    "min": _min,
    "max": _max,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _not,
    "where": _where,
    **{name: _fits(name) for name in FITS},
    **{op: _comparison(op) for op in OPPOSITES},
}

# Text. Precedence is Python's, so that Python's own parser reads it: `parse`.

_LEVELS = {
    **dict.fromkeys(OPPOSITES, 1),
    "or": 2,
    "xor": 3,
    "and": 4,
    "add": 5,
    "sub": 5,
    "mul": 6,
    "floordiv": 6,
    "mod": 6,
}
INFIX = {op: (SIGNS[op], level) for op, level in _LEVELS.items()}
PREFIX = {"neg": "-", "not": "~"}
_PREFIX_LEVEL = 7


def _show(expr: Expr, level: int) -> str:
    op, args = expr.op, expr.args
    if op in ("int", "bool", "var"):
        return str(args[0])
    if op == "symbol":
        return f"s{args[0]}"
    if op == "table":
        return f"t{args[0]}" + (f"[{', '.join(map(str, args[1:]))}]" if len(args) > 1 else "")
    if op in PREFIX:
        text, own = PREFIX[op] + _show(args[0], _PREFIX_LEVEL), _PREFIX_LEVEL
    elif op in INFIX:
        sign, own = INFIX[op]
        # Comparisons do not chain, the other operators group to the left.
        left = _show(args[0], own + 1 if op in OPPOSITES else own)
        text = f"{left} {sign} {_show(args[1], own + 1)}"
    else:
        return f"{op}({', '.join(map(str, args))})"
    return f"({text})" if own < level else text
