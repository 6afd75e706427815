"""Evaluates a solved mask: edges of key intervals from captured tensors, and checks of what it takes for granted.

All on the tensors' device, in O(rows + keys) memory, and on a GPU without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck, first_of
from magi_compile.functions.text import column, names_of_captures
from magi_compile.masks.evaluation import messages
from magi_compile.masks.evaluation.key_index import (
    Groups,
    Marks,
    Peaks,
    Stretches,
    gather,
    is_readable,
)
from magi_compile.masks.evaluation.sizes import MaskSizes
from magi_compile.masks.evaluation.visit import Visitor, is_plain
from magi_compile.masks.expr.expr import Expr
from magi_compile.masks.expr.integers import INT32, INT64, Value, apply, counted
from magi_compile.masks.program.program import MaskProgram
from magi_compile.masks.solver.key_sets import Lane, Promise


class Evaluation(Visitor[Value, Tensor]):
    """One evaluation: everything is computed once, however often the program mentions it."""

    def __init__(
        self,
        program: MaskProgram,
        tables: Sequence[Tensor],
        symbols: Sequence[int],
        sizes: MaskSizes,
        device: torch.device,
    ):
        self.program = program
        self.tables = tables
        self.symbols = symbols
        self.sizes = sizes
        self.seqlen_k = sizes.seqlen_k
        self.device = device
        self.checks: list[MaskCheck] = []
        self.known = {}

    def once(self, kind: str, expr: Expr, compute: Callable):
        if (kind, expr) not in self.known:
            self.known[kind, expr] = compute()
        return self.known[kind, expr]

    # Lanes and promises

    def edges(self, lane: Lane) -> tuple[Tensor, Tensor]:
        """int32 and in [0, seqlen_k], broadcastable to `[entries, seqlen_q]`."""
        return self.edge(lane.lo, lambda *_: 0), self.edge(lane.hi, lambda *_: self.seqlen_k)

    def edge(self, expr: Expr, bound: Callable[[Expr, Expr], Tensor | int]) -> Tensor:
        value = self.with_bounds(expr, bound)
        if not isinstance(value.data, Tensor):
            number = min(max(value.data, 0), self.seqlen_k)
            return torch.full((1, 1), number, dtype=torch.int32, device=self.device)
        data = value.data
        if value.low < 0 or value.high > self.seqlen_k:
            data = data.clamp(0, self.seqlen_k)
        return data.to(torch.int32)

    def narrow(self, keys: Expr, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        data = self.along_kv(keys, must_be_truth=True)
        marks = self.once("marks", keys, lambda: Marks.of(data))
        lo, hi, is_split = marks.narrow(lo, hi)
        words = messages.are_neighbours(self.program.describe(keys))
        self.check(is_split, words, of_conversion=True)
        return lo, hi

    def narrow_to_group(
        self, group: _Group, when: Value, lo: Tensor, hi: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The split is None where others lie between nowhere. Rows that do not count stay."""
        if group.among.number is None or when.data is False:
            return lo, hi, None
        begin, end, is_split = group.among.narrow(group.place, lo, hi)
        if not isinstance(when.data, Tensor):
            return begin, end, is_split
        return (
            torch.where(when.data, begin, lo),
            torch.where(when.data, end, hi),
            is_split & when.data,
        )

    def narrow_to_bounds(self, lane: Lane, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        def bound(keys: Expr, limit: Expr) -> Tensor:
            stretches = self.stretches(keys)
            return stretches.bound_within(lo, hi, self.tensor(counted(self.value(limit))))

        if self.looks_for_bounds:
            return self.narrow_one_by_one(lane, lo, hi)
        begin, end = self.edge(lane.lo, bound), self.edge(lane.hi, bound)
        return torch.maximum(lo, begin), torch.minimum(hi, end)

    @property
    def looks_for_bounds(self) -> bool:
        """True if what lies above a limit is looked for where keys are not sorted: it may come last all the same, as
        the ends of subtrees do behind the beginning of one."""
        return self.program.by_keys and self.device.type == "cpu"

    def narrow_one_by_one(self, lane: Lane, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """`narrow_to_bounds`, the upper edge behind the lower one."""

        def bound(keys: Expr, limit: Expr) -> Tensor:
            found = self.bound_within(lane, keys, self.tensor(counted(self.value(limit))), lo, hi)
            return torch.minimum(torch.maximum(found, lo), hi)

        lo = torch.maximum(lo, self.edge(lane.lo, bound))
        return lo, torch.minimum(hi, self.edge(lane.hi, bound))

    def bound_within(self, lane: Lane, keys: Expr, limit: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        """The first key of `[lo, hi)` with a value above `limit`; checks that no key behind it has another one."""
        stretches = self.stretches(keys)
        promises = (x for x in lane.ordered if x.holds.args == (keys,))
        is_needed = sum(self.tensor(self.value(promise.when)) for promise in promises) > 0
        is_open = ~stretches.is_one(lo, hi) & (lo < hi) & is_needed
        if is_readable(is_open) and not bool(is_open.any()):
            return stretches.bound_within(lo, hi, limit)
        data = self.along_kv(keys).long()
        peaks = self.once("peaks", keys, lambda: Peaks.of(data))
        valleys = self.once("valleys", keys, lambda: Peaks.of(~data))
        found = peaks.first_above(lo, limit)
        is_broken = is_open & (valleys.first_above(found, ~limit.long() - 1) < hi)
        words = messages.is_sorted(self.program.describe(keys))
        self.check(is_broken, words, of_conversion=True)
        return found

    def expect_order(
        self, promise: Promise, keys: Tensor, when: Value, lo: Tensor, hi: Tensor
    ) -> None:
        (expr,) = promise.holds.args
        if when.data is False or self.looks_for_bounds:
            return
        is_broken = ~self.stretches(expr).is_one(lo, hi) & (lo < hi) & when.data
        words = messages.is_sorted(self.program.describe(expr))
        self.check(is_broken, words, of_conversion=True)

    def expect_group(
        self, promise: Promise, is_split: Tensor | None, lo: Tensor, hi: Tensor
    ) -> None:
        if is_split is not None:
            self.check_group(promise, is_split & (lo < hi))

    def expect_whole(self, promise: Promise, when: Value) -> None:
        if when.data is False:
            return
        group = self.group(*promise.holds.args)
        if group.among.is_whole is not None:
            assert group.is_found is not None
            is_whole = gather(group.among.is_whole, group.place) | ~group.is_found
            self.check_group(promise, ~is_whole & when.data)

    def expect_true(self, condition: Expr, when: Value) -> None:
        if when.data is False:
            return
        holds = self.tensor(self.value(condition))
        words = messages.is_true(self.program.describe(condition))
        self.check(~holds & when.data, words, of_conversion=True)

    def check_group(self, promise: Promise, is_split: Tensor) -> None:
        keys, wanted = promise.holds.args
        words = messages.is_grouped(self.program.describe(keys))
        self.check(is_split, words, self.tensor(self.value(wanted)), of_conversion=True)

    def check(
        self,
        broken: Tensor,
        words: messages.Words,
        values: Tensor | None = None,
        *,
        of_conversion: bool = False,
    ) -> None:
        """Adds a check: `broken` `[1 or entries, rows or keys]` must be False everywhere."""
        if not broken.numel():
            return
        first = first_of(broken)
        row, entry = first % broken.shape[1], first // broken.shape[1]
        place: tuple[Tensor, ...] = (row, entry)
        if self.program.by_keys:
            words = messages.of_a_key(words)
        if self.program.differs_by_head:
            heads = self.sizes.heads.q
            words, place = messages.of_a_head(words), (row, entry // heads, entry % heads)
        sought = () if values is None else (values.expand_as(broken).take(first),)
        check = MaskCheck(~broken.any(), *words, (*sought, *place), of_conversion)
        self.checks.append(check)

    # Values

    def tensor(self, value: Value) -> Tensor:
        if isinstance(value.data, Tensor):
            return value.data
        return torch.full((1, 1), value.data, device=self.device)

    def leaf(self, expr: Expr) -> Value | None:
        if expr.op in ("int", "bool", "symbol"):
            number = self.symbols[expr.args[0]] if expr.op == "symbol" else expr.args[0]
            return Value(number, number, number)
        return self.variable(expr.args[0]) if expr.op == "var" else None

    def variable(self, name: str) -> Value:
        """`[entries, 1]` or `[1, rows or keys]`."""
        size, heads = self.sizes.by_variable[name], self.sizes.heads.q
        is_of_entry = name in ("b", "h")
        count = self.sizes.entries if is_of_entry else size
        index = torch.arange(count, dtype=torch.int32, device=self.device)
        if is_of_entry and heads > 1:
            index = index // heads if name == "b" else index % heads
        elif name == "h":
            index = torch.zeros_like(index)
        return Value(index[:, None] if is_of_entry else index[None], 0, size - 1)

    def pointwise(self, op: str, values: Sequence[Value]) -> Value:
        return apply(op, values)

    def place(self, key: Tensor | int) -> Value:
        return Value(key, 0, self.seqlen_k)

    def want_truth(self, expr: Expr, value: Value) -> None:
        if isinstance(value.data, Tensor) and value.data.dtype != torch.bool:
            text = self.program.describe(expr)
            raise TypeError(f"`{text}` must be bool where it is a truth value, got integers")

    def divisor(self, quotient: Expr, value: Value) -> Value:
        return self.not_zero(quotient.args[1], value)

    def not_zero(self, expr: Expr, value: Value) -> Value:
        """A divisor; checks that it is not zero, and makes it 1 where it is."""
        text = self.program.describe(expr)
        if not isinstance(value.data, Tensor):
            if value.data == 0:
                raise ValueError(f"`{text}` must not be zero, it divides")
        elif value.low <= 0 <= value.high:
            is_zero = value.data == 0
            self.check(is_zero, messages.is_not_zero(text))
            value = value._replace(data=torch.where(is_zero, 1, value.data))
        return value

    def load(self, look_up: Expr, places: list[Tensor] | None) -> Value:
        """`[1 or entries, 1 or rows or keys]`."""
        table, indices = self.table(look_up), look_up.args[1:]
        if not indices:
            data = table.to(self.device).reshape(1, 1)
        elif places is None:
            data = self.in_place(table, [index.args[0] for index in indices])
        else:
            data = table[tuple(places)]
        if data.dtype == torch.bool:
            return Value(data, 0, 1)
        if data.dtype in (torch.int8, torch.int16, torch.uint8, torch.int32):
            return Value(data.to(torch.int32), *INT32)
        return Value(data.to(torch.int64), *INT64)

    def table(self, look_up: Expr) -> Tensor:
        """The captured tensor of a look-up, which fits it."""
        table = self.tables[look_up.args[0]]
        check_look_up(look_up, self.program.describe(look_up), table.shape, self.sizes)
        return table

    def in_place(self, table: Tensor, names: list[str]) -> Tensor:
        """A captured tensor that is looked up where it stands, at the variables `names`."""
        sizes = self.sizes.by_variable
        data = table[tuple(slice(sizes[name]) for name in names)]
        if "b" not in names:
            data = data[None]
        if "h" not in names:
            data = data[:, None]
        if names[-1] in ("b", "h"):
            data = data[..., None]
        if "b" in names or "h" in names:
            data = data.expand(self.sizes.batch, self.sizes.heads.q, -1)
        return data.flatten(0, 1)

    def index(self, look_up: Expr, dim: int) -> Tensor:
        """Negative ones count from the end, as in PyTorch."""
        size, value = self.table(look_up).shape[dim], self.value(look_up.args[1 + dim])
        index = self.tensor(value)
        if value.low < 0:
            index = torch.where(index < 0, index + size, index)
        if value.low < 0 or value.high >= size:
            is_outside = (index < 0) | (index >= size)
            text = self.program.describe(look_up)
            self.check(is_outside, messages.is_entry(text, size), self.tensor(value))
            index = index.clamp(0, size - 1)
        return index

    # Searches along kv

    def along_kv(self, keys: Expr, *, must_be_truth: bool = False) -> Tensor:
        """`[1 or entries, seqlen_k]`"""
        value = self.value(keys)
        if must_be_truth:
            self.want_truth(keys, value)
        return self.tensor(value if must_be_truth else counted(value)).expand(-1, self.seqlen_k)

    def group(self, keys: Expr, wanted: Expr) -> _Group:
        def locate() -> _Group:
            groups = self.once("groups", keys, lambda: Groups.of(self.along_kv(keys)))
            return _Group(groups, *groups.locate(self.tensor(counted(self.value(wanted)))))

        return self.once("group", Expr("is_grouped", (keys, wanted)), locate)

    def group_edge(self, group: _Group, edge: str) -> Value:
        """That of a group which is not there is 0."""
        found = gather(getattr(group.among, edge), group.place)
        if group.is_found is not None:
            found = torch.where(group.is_found, found, 0)
        return Value(found, 0, self.seqlen_k)

    def stretches(self, keys: Expr) -> Stretches:
        return self.once("stretches", keys, lambda: Stretches.of(self.along_kv(keys)))


class _Group(NamedTuple):
    """The keys that each row wants: the place of their first run `among` all groups, and whether there is one; None
    where there always is."""

    among: Groups
    place: Tensor
    is_found: Tensor | None


def with_columns(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    device: torch.device,
) -> list[Tensor]:
    """The captured tensors and, behind them, those that the program computes: all that its expression looks up, by the
    numbers that it has for them."""
    named = names_of_captures(tables, symbols)
    if not program.columns:
        return list(tables)
    nothing = torch.empty(0, dtype=torch.int32, device=device)  # for those that are not looked up
    first = min(program.columns)
    lengths = sizes.by_variable
    computed = [
        column(function, named, lengths, device, program.names)
        for function in program.columns.values()
    ]
    return [*tables[:first], *[nothing] * (first - len(tables)), *computed]


def check_look_up(look_up: Expr, text: str, shape: Sequence[int], sizes: MaskSizes) -> None:
    """Raises ValueError where a captured tensor of `shape` cannot be looked up so, whatever its values; `text` is the
    look-up for messages."""
    indices, lengths = look_up.args[1:], sizes.by_variable
    if len(indices) != len(shape):
        raise ValueError(
            f"captured tensor in `{text}` must have {len(indices)} dimensions, got {len(shape)}"
        )
    for dim, index in enumerate(indices):
        if is_plain(look_up) and shape[dim] < lengths[index.args[0]]:
            raise ValueError(
                f"captured tensor in `{text}` must have at least {lengths[index.args[0]]} entries in "
                f"dimension {dim}, got {shape[dim]}"
            )
        if not shape[dim]:
            raise ValueError(f"`{text}` looks up a captured tensor without entries")
