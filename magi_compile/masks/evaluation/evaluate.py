"""Evaluates a solved mask: edges of key intervals from captured tensors, and checks of what it takes for granted.

All on the tensors' device, in O(rows + keys) memory, and on a GPU without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck
from magi_compile.functions.text import column, names_of_captures
from magi_compile.masks.evaluation import messages
from magi_compile.masks.evaluation.key_index import Groups, Marks, Stretches, gather
from magi_compile.masks.evaluation.sizes import MaskSizes
from magi_compile.masks.expr.expr import TRUE, Expr
from magi_compile.masks.expr.integers import INT32, INT64, Value, apply, counted
from magi_compile.masks.program.program import MaskProgram
from magi_compile.masks.solver.key_sets import Lane, Promise, has_bounds


class Evaluation:
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
        self.memo: dict[tuple[str, Expr], object] = {}

    def once(self, kind: str, expr: Expr, compute: Callable):
        if (kind, expr) not in self.memo:
            self.memo[kind, expr] = compute()
        return self.memo[kind, expr]

    # Lanes and promises

    def lane(self, lane: Lane) -> tuple[Tensor, Tensor]:
        """The edges of a lane, int32 and in [0, seqlen_k], broadcastable to `[entries, seqlen_q]`."""
        lo, hi = self.edge(lane.lo, lambda *_: 0), self.edge(lane.hi, lambda *_: self.seqlen_k)
        splits = []
        for promise in lane.grouped:
            lo, hi, is_split = self.narrow_to_group(promise, lo, hi)
            splits.append((promise, is_split))
        for promise in lane.ordered:
            self.expect_order(promise, lo, hi)
        if lane.ordered:
            bound = partial(self.bound_within, lo, hi)
            lo, hi = (
                torch.maximum(lo, self.edge(lane.lo, bound)),
                torch.minimum(hi, self.edge(lane.hi, bound)),
            )
        if lane.keys != TRUE:
            lo, hi = self.narrow(lane.keys, lo, hi)
        for promise, is_split in splits:
            if is_split is not None:
                self.check_group(promise, is_split & (lo < hi))
        return lo, hi

    def edge(self, expr: Expr, bound: Callable[[Expr, Expr], Tensor | int]) -> Tensor:
        """An edge whose `upper_bound(keys, limit)` are what `bound` says."""
        value = self.with_bounds(expr, bound)
        if not isinstance(value.data, Tensor):
            number = min(max(value.data, 0), self.seqlen_k)
            return torch.full((1, 1), number, dtype=torch.int32, device=self.device)
        data = value.data
        if value.low < 0 or value.high > self.seqlen_k:
            data = data.clamp(0, self.seqlen_k)
        return data.to(torch.int32)

    def with_bounds(self, expr: Expr, bound: Callable[[Expr, Expr], Tensor | int]) -> Value:
        if expr.op == "upper_bound":
            return Value(bound(*expr.args), 0, self.seqlen_k)
        if not has_bounds(expr):
            return self.value(expr)
        values = [self.with_bounds(arg, bound) for arg in expr.args]
        if expr.op == "where":
            self.want_truth(expr.args[0], values[0])
        return apply(expr.op, values)

    def narrow(self, keys: Expr, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of `[lo, hi)` where the key condition holds; checks that they are one interval."""
        self.want_truth(keys, self.value(keys))
        marks = self.once("marks", keys, lambda: Marks.of(self.along_kv(self.value(keys))))
        lo, hi, is_split = marks.narrow(lo, hi)
        words = messages.are_neighbours(self.program.describe(keys))
        self.check(is_split, words, of_conversion=True)
        return lo, hi

    def narrow_to_group(
        self, promise: Promise, lo: Tensor, hi: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`Groups.narrow` in rows where the promise counts; None: others lie between nowhere. The other rows stay."""
        groups, when = self.groups(promise.holds.args[0]), self.value(promise.when).data
        if groups.number is None or when is False:
            return lo, hi, None
        begin, end, is_split = groups.narrow(self.located(promise.holds)[0], lo, hi)
        if not isinstance(when, Tensor):
            return begin, end, is_split
        return torch.where(when, begin, lo), torch.where(when, end, hi), is_split & when

    def check_group(self, promise: Promise, is_split: Tensor) -> None:
        keys, wanted = promise.holds.args
        words = messages.is_grouped(self.program.describe(keys))
        self.check(is_split, words, self.tensor(self.value(wanted)), of_conversion=True)

    def expect_order(self, promise: Promise, lo: Tensor, hi: Tensor) -> None:
        """Checks that keys are sorted in `[lo, hi)`, in the rows where it counts."""
        (keys,), when = promise.holds.args, self.value(promise.when).data
        if when is False:
            return
        is_broken = ~self.stretches(keys).is_one(lo, hi) & (lo < hi) & when
        words = messages.is_sorted(self.program.describe(keys))
        self.check(is_broken, words, of_conversion=True)

    def expect(self, promise: Promise) -> None:
        """Checks a promise of a row in the rows where it counts."""
        matters = self.value(promise.when).data
        if matters is False:
            return
        if promise.holds.op == "is_grouped":
            is_whole = self.group_field(promise.holds, "is_whole")
            if is_whole is not None:
                self.check_group(promise, ~is_whole & matters)
        else:
            holds = self.value(promise.holds).data
            if not isinstance(holds, Tensor):
                holds = torch.full((1, 1), holds, device=self.device)
            words = messages.is_true(self.program.describe(promise.holds))
            self.check(~holds & matters, words, of_conversion=True)

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
        flat = broken.flatten()
        first = flat.to(torch.uint8).argmax()
        row, entry = first % broken.shape[1], first // broken.shape[1]
        place: tuple[Tensor, ...] = (row, entry)
        if self.program.differs_by_head:
            heads = self.sizes.heads.q
            words, place = messages.of_a_head(words), (row, entry // heads, entry % heads)
        sought = () if values is None else (values.expand_as(broken).take(first),)
        check = MaskCheck(~flat.any(), *words, (*sought, *place), of_conversion)
        self.checks.append(check)

    # Values

    def value(self, expr: Expr) -> Value:
        return self.once("value", expr, lambda: self._value(expr))

    def tensor(self, value: Value) -> Tensor:
        if isinstance(value.data, Tensor):
            return value.data
        return torch.full((1, 1), value.data, device=self.device)

    def _value(self, expr: Expr) -> Value:
        op, args = expr.op, expr.args
        if op in ("int", "bool"):
            return Value(args[0], args[0], args[0])
        if op == "symbol":
            number = self.symbols[args[0]]
            return Value(number, number, number)
        if op == "var":
            return self.variable(args[0])
        if op == "table":
            return self.look_up(expr)
        if op in ("group_begin", "group_end"):
            edge = self.group_field(expr, op.removeprefix("group_"))
            assert edge is not None
            return Value(edge, 0, self.seqlen_k)
        values = [self.value(arg) for arg in args]
        if op in ("and", "or", "xor", "not", "where"):
            for arg, value in zip(args[: 1 if op == "where" else None], values, strict=False):
                self.want_truth(arg, value)
        if op in ("floordiv", "mod"):
            values[1] = self.divisor(args[1], values[1])
        return apply(op, values)

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

    def want_truth(self, expr: Expr, value: Value) -> None:
        if isinstance(value.data, Tensor) and value.data.dtype != torch.bool:
            text = self.program.describe(expr)
            raise TypeError(f"`{text}` must be bool where it is a truth value, got integers")

    def divisor(self, expr: Expr, value: Value) -> Value:
        """A divisor; checks that it is not zero, and makes it 1 where it is."""
        if not isinstance(value.data, Tensor):
            if value.data == 0:
                raise ValueError(f"`{self.program.describe(expr)}` must not be zero, it divides")
        elif value.low <= 0 <= value.high:
            is_zero = value.data == 0
            self.check(is_zero, messages.is_not_zero(self.program.describe(expr)))
            value = value._replace(data=torch.where(is_zero, 1, value.data))
        return value

    def look_up(self, expr: Expr) -> Value:
        """A captured tensor at its indices, `[1 or entries, 1 or rows or keys]`."""
        table, indices = self.tables[expr.args[0]], expr.args[1:]
        text = self.program.describe(expr)
        check_look_up(expr, text, table.shape, self.sizes)
        if not indices:
            data = table.to(self.device).reshape(1, 1)
        elif is_plain(expr):
            data = self.in_place(table, [index.args[0] for index in indices])
        else:
            places = [
                self.index(index, size, text)
                for index, size in zip(indices, table.shape, strict=True)
            ]
            data = table[tuple(places)]
        if data.dtype == torch.bool:
            return Value(data, 0, 1)
        if data.dtype in (torch.int8, torch.int16, torch.uint8, torch.int32):
            return Value(data.to(torch.int32), *INT32)
        return Value(data.to(torch.int64), *INT64)

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

    def index(self, expr: Expr, size: int, text: str) -> Tensor:
        """Values of an index into a dimension; negative ones count from the end, as in PyTorch."""
        value = self.value(expr)
        index = self.tensor(value)
        if value.low < 0:
            index = torch.where(index < 0, index + size, index)
        if value.low < 0 or value.high >= size:
            is_outside = (index < 0) | (index >= size)
            self.check(is_outside, messages.is_entry(text, size), self.tensor(value))
            index = index.clamp(0, size - 1)
        return index

    # Searches along kv

    def along_kv(self, value: Value) -> Tensor:
        """`[1 or entries, seqlen_k]`"""
        return self.tensor(value).expand(-1, self.seqlen_k)

    def groups(self, keys: Expr) -> Groups:
        return self.once(
            "groups", keys, lambda: Groups.of(self.along_kv(counted(self.value(keys))))
        )

    def group_field(self, expr: Expr, field: str) -> Tensor | None:
        """A field of the group that each row looks up; empty and whole where there is no such group."""
        place, is_found = self.located(expr)
        data = getattr(self.groups(expr.args[0]), field)
        if data is None:
            return None
        found = gather(data, place)
        return found | ~is_found if field == "is_whole" else torch.where(is_found, found, 0)

    def located(self, expr: Expr) -> tuple[Tensor, Tensor]:
        """`Groups.locate` of what each row looks up."""
        keys, wanted = expr.args
        return self.once(
            "located",
            Expr("is_grouped", expr.args),
            lambda: self.groups(keys).locate(self.tensor(counted(self.value(wanted)))),
        )

    def stretches(self, keys: Expr) -> Stretches:
        return self.once(
            "stretches", keys, lambda: Stretches.of(self.along_kv(counted(self.value(keys))))
        )

    def bound_within(self, lo: Tensor, hi: Tensor, keys: Expr, limit: Expr) -> Tensor:
        """The first key of `[lo, hi)` whose value is above `limit`, or hi; the values never decrease there."""
        return self.stretches(keys).bound_within(lo, hi, self.tensor(counted(self.value(limit))))


def with_columns(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    device: torch.device,
) -> list[Tensor]:
    """The captured tensors and, behind them, those that the program computes: all that its expression looks up.

    Args:
        program: the mask.
        tables: the captured tensors.
        symbols: the captured ints.
        sizes: how many values each variable takes.
        device: where to compute.

    Returns:
        The tensors, by the numbers that the expression has for them.
    """
    named = names_of_captures(tables, symbols)
    if not program.columns:
        return list(tables)
    nothing = torch.empty(0, dtype=torch.int32, device=device)  # for those that are not looked up
    first = min(program.columns)
    lengths = sizes.by_variable
    computed = [column(function, named, lengths, device) for function in program.columns.values()]
    return [*tables[:first], *[nothing] * (first - len(tables)), *computed]


def is_plain(look_up: Expr) -> bool:
    """True if a captured tensor is looked up where it stands: at batch entries, heads, and rows or keys, or at some of
    these."""
    places = [
        _ORDER.get(index.args[0], -1) if index.op == "var" else -1 for index in look_up.args[1:]
    ]
    return -1 not in places and places == sorted(set(places))


_ORDER = {"b": 0, "h": 1, "q": 2, "kv": 2}


def check_look_up(look_up: Expr, text: str, shape: Sequence[int], sizes: MaskSizes) -> None:
    """Raises ValueError where a captured tensor of `shape` cannot be looked up so, whatever its values.

    Args:
        look_up: the captured tensor at its indices.
        text: the same, for messages.
        shape: of the captured tensor.
        sizes: how many values each variable takes.
    """
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
