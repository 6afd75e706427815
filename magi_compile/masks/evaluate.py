"""Evaluates a solved mask: edges of key intervals from captured tensors, and checks of what it takes for granted.

All on the tensors' device, in O(rows + keys) memory, and on a GPU without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck
from magi_compile.masks import preconditions
from magi_compile.masks.arithmetic import INT32, INT64, Value, apply, counted
from magi_compile.masks.expr import TRUE, Expr
from magi_compile.masks.key_sets import Lane, Promise
from magi_compile.masks.program import MaskProgram


class _Groups(NamedTuple):
    """The runs of equal values of a table along kv, sorted by value; all `[1 or batch, num_runs]`."""

    value: Tensor
    begin: (
        Tensor  # of a run; of the first one, it is the begin of the group of all keys of this value
    )
    run_end: Tensor
    end: Tensor  # behind the last key of this value
    number: Tensor | None  # of the group; None: every run is one
    is_whole: Tensor | None  # this run and those of this value behind it are one; None: all are


class _Stretches(NamedTuple):
    """Along kv, where the values of a table do not decrease; all `[1 or batch, seqlen_k]`."""

    number: Tensor  # of the stretch
    values: Tensor  # sorted, whatever the stretch
    place: Tensor  # never decreases: first the stretch, then how many values are smaller


class Evaluation:
    """One evaluation: everything is computed once, however often the program mentions it."""

    def __init__(
        self,
        program: MaskProgram,
        tables: Sequence[Tensor],
        symbols: Sequence[int],
        batch: int,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device,
    ):
        self.program = program
        self.tables = tables
        self.symbols = symbols
        self.sizes = {"b": batch, "q": seqlen_q, "kv": seqlen_k}
        self.seqlen_k = seqlen_k
        self.device = device
        self.checks: list[MaskCheck] = []
        self.memo: dict[tuple[str, Expr], object] = {}

    def once(self, kind: str, expr: Expr, compute: Callable):
        if (kind, expr) not in self.memo:
            self.memo[kind, expr] = compute()
        return self.memo[kind, expr]

    # Lanes and promises

    def lane(self, lane: Lane) -> tuple[Tensor, Tensor]:
        """The edges of a lane, int32 and in [0, seqlen_k], broadcastable to `[batch, seqlen_q]`."""
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
        return apply(expr.op, [self.with_bounds(arg, bound) for arg in expr.args])

    def narrow(self, keys: Expr, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of `[lo, hi)` where the key condition holds; checks that they are one interval."""
        self.want_truth(keys, self.value(keys))
        is_key = self.tensor(self.value(keys)).expand(-1, self.seqlen_k)
        position = torch.arange(self.seqlen_k, dtype=torch.int32, device=self.device)
        pad = torch.nn.functional.pad
        after = torch.where(is_key, position, self.seqlen_k).flip(-1).cummin(-1).values.flip(-1)
        after = pad(after, (0, 1), value=self.seqlen_k)  # the first such key from here on
        before = torch.where(is_key, position + 1, 0).cummax(-1).values
        before = pad(before, (1, 0))  # behind the last such key before here
        count = pad(is_key.cumsum(-1, dtype=torch.int32), (1, 0))
        begin, end = _gather(after, lo), _gather(before, hi)
        is_live = (lo < hi) & (begin < end)
        is_whole = _gather(count, hi) - _gather(count, lo) == end - begin
        words = preconditions.are_neighbours(self.program.describe(keys))
        self.check(is_live & ~is_whole, words)
        return torch.where(is_live, begin, 0), torch.where(is_live, end, 0)

    def narrow_to_group(
        self, promise: Promise, lo: Tensor, hi: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`[lo, hi)` from the first to the last key of the group in it, and where there are others between; None: nowhere.

        `[lo, hi)` is what it is of all keys around the group, in rows where the promise counts. The others stay.
        """
        groups, when = self.groups(promise.holds.args[0]), self.value(promise.when).data
        if groups.number is None or when is False:
            return lo, hi, None
        place, _ = self.located(promise.holds)
        number = _gather(groups.number, place)
        # In order of their groups, and within a group along the keys.
        stride = self.seqlen_k + 1
        begins, ends = (groups.number * stride + x for x in (groups.begin, groups.run_end))
        first = torch.searchsorted(*_aligned(ends, number * stride + lo), right=True)
        last = torch.searchsorted(*_aligned(begins, number * stride + hi)) - 1
        matters = (lo < hi) & when
        is_in = matters & (first <= last)
        first, last = (torch.where(is_in, x, 0) for x in (first, last))
        begin, end = _gather(groups.begin, first), _gather(groups.run_end, last)
        is_split = is_in & (begin != _gather(groups.begin, last))
        lo = torch.where(matters, torch.where(is_in, torch.maximum(lo, begin), 0), lo)
        return lo, torch.where(matters, torch.where(is_in, torch.minimum(hi, end), 0), hi), is_split

    def check_group(self, promise: Promise, is_split: Tensor) -> None:
        keys, wanted = promise.holds.args
        words = preconditions.is_grouped(self.program.describe(keys))
        self.check(is_split, words, self.tensor(self.value(wanted)))

    def expect_order(self, promise: Promise, lo: Tensor, hi: Tensor) -> None:
        """Checks that keys are sorted in `[lo, hi)`, in the rows where it counts."""
        (keys,), when = promise.holds.args, self.value(promise.when).data
        if when is False:
            return
        stretch = self.stretches(keys).number
        first, last = lo.clamp(max=self.seqlen_k - 1), (hi - 1).clamp(min=0)
        is_broken = _gather(stretch, first) != _gather(stretch, last)
        words = preconditions.is_sorted(self.program.describe(keys))
        self.check(is_broken & (lo < hi) & when, words)

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
            words = preconditions.is_true(self.program.describe(promise.holds))
            self.check(~holds & matters, words)

    def check(
        self, broken: Tensor, words: preconditions.Words, values: Tensor | None = None
    ) -> None:
        """Adds a check: `broken` `[1 or batch, rows or keys]` must be False everywhere."""
        if not broken.numel():
            return
        flat = broken.flatten()
        first = flat.to(torch.uint8).argmax()
        row, entry = first % broken.shape[1], first // broken.shape[1]
        sought = () if values is None else (values.expand_as(broken).take(first),)
        self.checks.append(MaskCheck(~flat.any(), *words, (*sought, row, entry)))

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
            size = self.sizes[args[0]]
            index = torch.arange(size, dtype=torch.int32, device=self.device)
            return Value(index[:, None] if args[0] == "b" else index[None], 0, size - 1)
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
            self.check(is_zero, preconditions.is_not_zero(self.program.describe(expr)))
            value = value._replace(data=torch.where(is_zero, 1, value.data))
        return value

    def look_up(self, expr: Expr) -> Value:
        """A captured tensor at its indices, `[1 or batch, 1 or rows or keys]`."""
        table, indices = self.tables[expr.args[0]], expr.args[1:]
        text = self.program.describe(expr)
        check_look_up(expr, text, table.shape, self.sizes)
        if not indices:
            data = table.to(self.device).reshape(1, 1)
        elif is_plain(expr):
            sizes = [self.sizes[index.args[0]] for index in indices]
            data = table[: sizes[0]]
            if len(indices) == 2:
                data = data[:, : sizes[1]]
            else:
                data = data[:, None] if indices[0].args[0] == "b" else data[None]
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

    def index(self, expr: Expr, size: int, text: str) -> Tensor:
        """Values of an index into a dimension; negative ones count from the end, as in PyTorch."""
        value = self.value(expr)
        index = self.tensor(value)
        if value.low < 0:
            index = torch.where(index < 0, index + size, index)
        if value.low < 0 or value.high >= size:
            is_outside = (index < 0) | (index >= size)
            self.check(is_outside, preconditions.is_entry(text, size), self.tensor(value))
            index = index.clamp(0, size - 1)
        return index

    # Searches along kv

    def runs(self, keys: Expr) -> tuple[Tensor, Tensor, Tensor]:
        """Maximal runs of equal values along kv: value, begin, end, each `[1 or batch, num_runs]`.

        Where there are fewer runs the last one is repeated. On a host num_runs is what the data need; on a GPU
        nobody waits for that and it is seqlen_k.
        """

        def compute():
            data = self.tensor(counted(self.value(keys))).expand(-1, self.seqlen_k)
            starts = torch.ones_like(data, dtype=torch.bool)
            torch.ne(data[:, 1:], data[:, :-1], out=starts[:, 1:])
            number = starts.cumsum(-1, dtype=torch.int32)
            last = number[:, -1:]
            room = int(last.max()) if _is_readable(data) else self.seqlen_k
            wanted = torch.arange(1, room + 1, dtype=torch.int32, device=self.device)
            begin = torch.searchsorted(number, torch.minimum(wanted, last))
            follower = torch.nn.functional.pad(begin[:, 1:], (0, 1), value=self.seqlen_k)
            end = torch.where(follower > begin, follower, self.seqlen_k)
            return data.gather(-1, begin), begin.to(torch.int32), end.to(torch.int32)

        return self.once("runs", keys, compute)

    def groups(self, keys: Expr) -> _Groups:
        def compute():
            value, begin, end = self.runs(keys)
            value, order = value.sort(dim=-1, stable=True)
            begin, end = begin.gather(-1, order), end.gather(-1, order)
            is_split = (value[:, 1:] == value[:, :-1]) & (begin[:, 1:] != begin[:, :-1])
            if _is_readable(value) and not bool(is_split.any()):
                return _Groups(value, begin, end, end, None, None)
            last = torch.searchsorted(value, value, right=True) - 1
            splits = torch.nn.functional.pad(is_split.cumsum(-1, dtype=torch.int32), (1, 0))
            is_whole = splits.gather(-1, last) == splits
            return _Groups(value, begin, end, end.gather(-1, last), last, is_whole)

        return self.once("groups", keys, compute)

    def group_field(self, expr: Expr, field: str) -> Tensor | None:
        """A field of the group that each row looks up; empty and whole where there is no such group."""
        place, is_found = self.located(expr)
        data = getattr(self.groups(expr.args[0]), field)
        if data is None:
            return None
        found = _gather(data, place)
        return found | ~is_found if field == "is_whole" else torch.where(is_found, found, 0)

    def located(self, expr: Expr) -> tuple[Tensor, Tensor]:
        """Where in `groups` the group that each row looks up begins, and whether there is one."""
        keys, wanted = expr.args

        def locate():
            groups = self.groups(keys)
            values, sought = _aligned(groups.value, self.tensor(counted(self.value(wanted))))
            place = torch.searchsorted(values, sought).clamp(max=values.shape[-1] - 1)
            return place, _gather(groups.value, place) == sought

        return self.once("locate", Expr("is_grouped", expr.args), locate)

    def stretches(self, keys: Expr) -> _Stretches:
        def compute():
            data = self.tensor(counted(self.value(keys))).expand(-1, self.seqlen_k).contiguous()
            number = torch.zeros_like(data, dtype=torch.int64)
            torch.cumsum(data[:, 1:] < data[:, :-1], -1, out=number[:, 1:])
            values = data.sort(dim=-1).values
            place = number * (self.seqlen_k + 1) + torch.searchsorted(values, data)
            return _Stretches(number, values, place)

        return self.once("stretches", keys, compute)

    def bound_within(self, lo: Tensor, hi: Tensor, keys: Expr, limit: Expr) -> Tensor:
        """The first key of `[lo, hi)` whose value is above `limit`, or hi; the values never decrease there."""
        number, values, place = self.stretches(keys)
        sought = _aligned(values, self.tensor(counted(self.value(limit))))
        num_below = torch.searchsorted(*sought, right=True)
        stretch = _gather(number, lo.clamp(max=self.seqlen_k - 1))
        bound = torch.searchsorted(*_aligned(place, stretch * (self.seqlen_k + 1) + num_below))
        return torch.minimum(torch.maximum(bound, lo), hi)


def has_bounds(expr: Expr) -> bool:
    """Whether an edge depends on the order of keys."""
    return any(node.op == "upper_bound" for node in expr.walk())


def is_plain(look_up: Expr) -> bool:
    """Whether a captured tensor is looked up where it stands: at rows or keys, at batch entries, or at both."""
    indices = look_up.args[1:]
    of_entries = [index.args[0] == "b" for index in indices if index.op == "var"]
    return len(of_entries) == len(indices) and of_entries in ([True], [False], [True, False])


def check_look_up(look_up: Expr, text: str, shape: Sequence[int], sizes: Mapping[str, int]) -> None:
    """Raises ValueError where a captured tensor of `shape` can not be looked up so, whatever its values.

    Args:
        look_up: the captured tensor at its indices.
        text: the same, for messages.
        shape: of the captured tensor.
        sizes: how many values each of the variables b, q and kv takes.
    """
    indices = look_up.args[1:]
    if len(indices) != len(shape):
        raise ValueError(
            f"captured tensor in `{text}` must have {len(indices)} dimensions, got {len(shape)}"
        )
    for dim, index in enumerate(indices):
        if is_plain(look_up) and shape[dim] < sizes[index.args[0]]:
            raise ValueError(
                f"captured tensor in `{text}` must have at least {sizes[index.args[0]]} entries in "
                f"dimension {dim}, got {shape[dim]}"
            )
        if not shape[dim]:
            raise ValueError(f"`{text}` looks up a captured tensor without entries")


def _is_readable(tensor: Tensor) -> bool:
    """Whether values can be looked at for free: on the host, and not fake."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def _aligned(values: Tensor, sought: Tensor) -> tuple[Tensor, Tensor]:
    """Operands for searchsorted: one dtype, and a row of `values` for each row of `sought`."""
    dtype = torch.promote_types(values.dtype, sought.dtype)
    values, sought = values.to(dtype), sought.to(dtype)
    if values.shape[0] == 1:
        return values[0], sought.contiguous()
    return values.contiguous(), sought.expand(values.shape[0], -1).contiguous()


def _gather(table: Tensor, index: Tensor) -> Tensor:
    """`table [1 or batch, n]` at `index [1 or batch, rows]`, batch entry by batch entry."""
    if table.shape[0] == 1:
        return table[0][index]
    return table.gather(-1, index.long().expand(table.shape[0], -1))
