"""What shows of a number without values: a bound that it never exceeds, and what it leaves when divided."""

from __future__ import annotations

from functools import lru_cache

from magi_compile.masks.program.expr import Expr, build, const, int_value, is_natural, linear

_MAX_CHOICES = 12  # of min, max and where, one inside the other's result


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
