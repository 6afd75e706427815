"""Sets of keys that depend on the row: unions of intervals whose edges are expressions, and their algebra.

Nothing here touches a tensor. Empty and duplicate intervals are dropped where that is decidable without data, so
that the number of intervals of a mask is small and known before there are data.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from magi_compile.masks.expr.expr import END, FALSE, TRUE, ZERO, Expr, build, is_le

MAX_INTERVALS = 64
_MAX_INTERMEDIATE = 64


class Refusal(Exception):
    """One reason why a part of the mask cannot be expressed."""


class Promise(NamedTuple):
    """`holds` must be true in every row where `when` is. `holds` is a row condition or one of

    is_sorted(keys): the values of `keys` never decrease along kv.
    is_grouped(keys, value): the keys with this value are next to each other.
    """

    holds: Expr
    when: Expr = TRUE


class KeyGrid(NamedTuple):
    """Numbers the keys, `x = (kv + shift) // step + start`, and cuts them where `x` is a multiple of `length`.

    `step` and `length` are positive, and known when the mask is evaluated, without looking into a tensor.
    """

    shift: Expr
    step: Expr
    start: Expr
    length: Expr


class Repeat(NamedTuple):
    """The keys with `lo <= x % length < hi`: one interval of each period of the grid."""

    grid: KeyGrid
    lo: Expr
    hi: Expr


class Lane(NamedTuple):
    """The keys of `[lo, hi)` for which `keys`, an expression of b, h and kv alone, holds,
    and that are in all of `repeats`.

    `grouped` are promises `is_grouped`. Where one is broken, keys of other values lie between those it speaks of, in
    `[lo, hi)` too: they do not count, and no harm is done if none lies between those that do.

    `ordered` are promises `is_sorted` of all keys in an `upper_bound(keys, limit)` of `lo` or `hi`. They have to be
    kept by the keys that the rest of the lane leaves: among these the bound is the first key above `limit`.
    """

    lo: Expr
    hi: Expr
    keys: Expr = TRUE
    grouped: tuple[Promise, ...] = ()
    ordered: tuple[Promise, ...] = ()
    repeats: tuple[Repeat, ...] = ()


class KeySet(NamedTuple):
    """The keys that a row sees: the union of `lanes`, if all `required` promises are kept."""

    lanes: tuple[Lane, ...]
    required: tuple[Promise, ...] = ()


EVERYTHING = KeySet((Lane(ZERO, END),))
NOTHING = KeySet(())


@lru_cache(maxsize=4096)
def has_bounds(edge: Expr) -> bool:
    """True if an edge depends on the order of keys."""
    return any(node.op == "upper_bound" for node in edge.walk())


def too_many(count: int) -> str:
    return f"a row needs up to {count} key intervals, at most {MAX_INTERVALS} are representable"


def intersect(x: KeySet, y: KeySet) -> KeySet:
    if len(x.lanes) * len(y.lanes) > _MAX_INTERMEDIATE:
        raise Refusal(too_many(len(x.lanes) * len(y.lanes)))
    lanes = [
        Lane(
            build("max", a.lo, b.lo),
            build("min", a.hi, b.hi),
            build("and", a.keys, b.keys),
            a.grouped + b.grouped,
            _merged(a.ordered, b.ordered),
            _in_both(a.repeats, b.repeats),
        )
        for a in x.lanes
        for b in y.lanes
    ]
    return KeySet(prune(lanes), x.required + y.required)


def unite(x: KeySet, y: KeySet) -> KeySet:
    return KeySet(prune([*x.lanes, *y.lanes]), x.required + y.required)


def select(rows: Expr, x: KeySet, y: KeySet) -> KeySet:
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
            a, b = (part._replace(keys=full.keys, repeats=full.repeats) for part in (a, b))
        if a.keys == b.keys and a.repeats == b.repeats:
            grouped, ordered = (
                _during(rows, of_a) + _during(others, of_b)
                for of_a, of_b in ((a.grouped, b.grouped), (a.ordered, b.ordered))
            )
            lo, hi = build("where", rows, a.lo, b.lo), build("where", rows, a.hi, b.hi)
            lanes.append(Lane(lo, hi, a.keys, grouped, ordered, a.repeats))
        else:
            for part, when in ((a, rows), (b, others)):
                lanes.append(part._replace(hi=build("where", when, part.hi, ZERO)))
    return KeySet(prune(lanes), required)


def _merged(x: tuple[Promise, ...], y: tuple[Promise, ...]) -> tuple[Promise, ...]:
    return tuple(dict.fromkeys(x + y))


def _in_both(x: tuple[Repeat, ...], y: tuple[Repeat, ...]) -> tuple[Repeat, ...]:
    """The repeats of both, one for each grid."""
    found = {repeat.grid: repeat for repeat in x}
    for repeat in y:
        other = found.get(repeat.grid, repeat)
        lo, hi = build("max", other.lo, repeat.lo), build("min", other.hi, repeat.hi)
        found[repeat.grid] = Repeat(repeat.grid, lo, hi)
    return tuple(found.values())


def _during(rows: Expr, promises: tuple[Promise, ...]) -> tuple[Promise, ...]:
    return tuple(Promise(holds, build("and", when, rows)) for holds, when in promises)


def as_key_set(value: Expr | KeySet) -> KeySet:
    return value if isinstance(value, KeySet) else select(value, EVERYTHING, NOTHING)


def prune(lanes: list[Lane]) -> tuple[Lane, ...]:
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
    return tuple(kept) if len(kept) == len(lanes) else prune(kept)


def _join(x: Lane, y: Lane) -> Lane | None:
    """One lane for the union of two, where it is one for sure."""
    if x.grouped != y.grouped or x.repeats != y.repeats:
        return None
    ordered = _merged(x.ordered, y.ordered)
    if x.lo == y.lo and x.hi == y.hi:
        return x._replace(keys=build("or", x.keys, y.keys), ordered=ordered)
    if x.keys != y.keys:
        return None
    for inner, outer in ((x, y), (y, x)):
        if is_le(outer.lo, inner.lo) and is_le(inner.hi, outer.hi):
            return outer
    # Two intervals from the same edge are one interval, even where one of them is empty.
    if x.lo == y.lo:
        return x._replace(hi=build("max", x.hi, y.hi), ordered=ordered)
    if x.hi == y.hi:
        return x._replace(lo=build("min", x.lo, y.lo), ordered=ordered)
    return None
