"""The one order in which a solved mask is evaluated: its lanes, the promises about them,
and the values that these are made of.

`Evaluation` does each step with tensors, `kernels/sm90/masks/source.py` writes it in CUDA. Both make their checks in
the order that stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from magi_compile.masks.expr.expr import TRUE, Expr
from magi_compile.masks.solver.key_sets import KeySet, Lane, Promise, has_bounds

V = TypeVar("V")  # a value of each row or key
E = TypeVar("E")  # an edge of a lane

_ORDER = {"b": 0, "h": 1, "q": 2, "kv": 2}


class Visitor(ABC, Generic[V, E]):
    """The steps. `known` holds what was computed, once each, by expressions."""

    known: dict[Any, Any]

    # Lanes and promises

    def intervals(self, keys: KeySet) -> list[tuple[E, E]]:
        """The edges of all lanes; checks all that the mask takes for granted."""
        lanes = [self.lane(lane) for lane in keys.lanes]
        for promise in keys.required:
            matters = self.value(promise.when)
            if promise.holds.op == "is_grouped":
                self.expect_whole(promise, matters)
            else:
                self.expect_true(promise.holds, matters)
        return lanes

    def lane(self, lane: Lane) -> tuple[E, E]:
        lo, hi = self.edges(lane)
        splits = []
        for promise in lane.grouped:
            group = self.group(*promise.holds.args)
            lo, hi, is_split = self.narrow_to_group(group, self.value(promise.when), lo, hi)
            splits.append((promise, is_split))
        for promise in lane.ordered:
            keys = self.along_kv(*promise.holds.args)
            self.expect_order(promise, keys, self.value(promise.when), lo, hi)
        if lane.ordered:
            lo, hi = self.narrow_to_bounds(lane, lo, hi)
        if lane.keys != TRUE:
            lo, hi = self.narrow(lane.keys, lo, hi)
        for promise, is_split in splits:
            self.expect_group(promise, is_split, lo, hi)
        return lo, hi

    @abstractmethod
    def edges(self, lane: Lane) -> tuple[E, E]:
        """The edges of a lane, which bounds do not cut yet."""

    @abstractmethod
    def narrow_to_group(self, group: Any, when: V, lo: E, hi: E) -> tuple[E, E, Any]:
        """A lane cut to the keys of a group, in the rows `when` that counts, and whether others lie between these."""

    @abstractmethod
    def narrow_to_bounds(self, lane: Lane, lo: E, hi: E) -> tuple[E, E]:
        """A lane, in which keys are sorted, cut by the bounds among its edges."""

    @abstractmethod
    def narrow(self, keys: Expr, lo: E, hi: E) -> tuple[E, E]:
        """The keys of a lane for which the condition `keys` holds; checks that they are one interval."""

    @abstractmethod
    def expect_order(self, promise: Promise, keys: Any, when: V, lo: E, hi: E) -> None:
        """Checks that keys are sorted in a lane, in the rows `when` that counts."""

    @abstractmethod
    def expect_group(self, promise: Promise, is_split: Any, lo: E, hi: E) -> None:
        """Checks what `narrow_to_group` has found, in the rows whose lane is not empty."""

    @abstractmethod
    def expect_whole(self, promise: Promise, when: V) -> None:
        """Checks that all keys of a group are next to each other, in the rows `when` that counts."""

    @abstractmethod
    def expect_true(self, condition: Expr, when: V) -> None:
        """Checks a condition of a row, in the rows `when` that counts."""

    # Values

    def value(self, expr: Expr) -> V:
        if expr not in self.known:
            leaf = self.leaf(expr)
            self.known[expr] = self.computed(expr) if leaf is None else leaf
        return self.known[expr]  # type: ignore[no-any-return]

    def computed(self, expr: Expr) -> V:
        op, args = expr.op, expr.args
        if op == "table":
            dims = range(len(args) - 1)
            return self.load(expr, None if is_plain(expr) else [self.index(expr, i) for i in dims])
        if op in ("group_begin", "group_end"):
            return self.group_edge(self.group(*args), op.removeprefix("group_"))
        return self.operation(expr, [self.value(arg) for arg in args])

    def with_bounds(self, expr: Expr, bound: Callable[[Expr, Expr], Any]) -> V:
        """A value whose `upper_bound(keys, limit)` are what `bound` says."""
        if expr.op == "upper_bound":
            return self.place(bound(*expr.args))
        if not has_bounds(expr):
            return self.value(expr)
        return self.operation(expr, [self.with_bounds(arg, bound) for arg in expr.args])

    def operation(self, expr: Expr, values: list[V]) -> V:
        op, args = expr.op, expr.args
        if op in ("and", "or", "xor", "not", "where"):
            for arg, value in zip(args[: 1 if op == "where" else None], values, strict=False):
                self.want_truth(arg, value)
        if op in ("floordiv", "mod"):
            values[1] = self.divisor(expr, values[1])
        return self.pointwise(op, values)

    @abstractmethod
    def leaf(self, expr: Expr) -> V | None:
        """A constant, a variable or a captured int; None for all else."""

    @abstractmethod
    def index(self, look_up: Expr, dim: int) -> Any:
        """An index of a look-up, from the beginning of a dimension; checks that there is such an entry."""

    @abstractmethod
    def load(self, look_up: Expr, places: list[Any] | None) -> V:
        """A captured tensor at these places; None: where it stands."""

    @abstractmethod
    def along_kv(self, keys: Expr) -> Any:
        """A value of all keys."""

    @abstractmethod
    def group(self, keys: Expr, wanted: Expr) -> Any:
        """The keys with a value that each row wants."""

    @abstractmethod
    def group_edge(self, group: Any, edge: str) -> V:
        """The begin or the end of a group."""

    @abstractmethod
    def place(self, key: Any) -> V:
        """A key that a bound has found, as a value."""

    @abstractmethod
    def want_truth(self, expr: Expr, value: V) -> None:
        """Raises TypeError where integers stand for a truth value."""

    @abstractmethod
    def divisor(self, quotient: Expr, value: V) -> V:
        """The divisor of a quotient; checks that it is not zero, and makes it 1 where it is."""

    @abstractmethod
    def pointwise(self, op: str, values: Sequence[V]) -> V:
        """An operation of values."""


def is_plain(look_up: Expr) -> bool:
    """True if a captured tensor is looked up where it stands: at batch entries, heads, and rows or keys, or at some of
    these."""
    places = [
        _ORDER.get(index.args[0], -1) if index.op == "var" else -1 for index in look_up.args[1:]
    ]
    return -1 not in places and places == sorted(set(places))
