"""RowIntervals: for each row of each batch entry, the keys it sees, as a few disjoint intervals.

The exact meeting point of all kinds of masks. `row_intervals` evaluates a mask program with plain tensor
operations, on the device of the captured tensors, in O(rows) memory. On a GPU nothing waits for the device:
what a program takes for granted about its tensors comes back as `MaskCheck`s.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.expr import TRUE, Expr
from magi_compile.masks.program import MaskProgram
from magi_compile.masks.solve import Lane, Promise

_INT32 = (-(2**31), 2**31 - 1)
_INT64 = (-(2**63), 2**63 - 1)


class MaskCheck(NamedTuple):
    """Something a mask takes for granted about its data.

    Attributes:
        ok: bool, 0-d: whether it is so.
        message: what has to be so, with the name of the captured tensor.
        detail: what was found instead, with a `{}` for each of `values`.
        values: integers, 0-d; they mean something only if `ok` is False.
    """

    ok: Tensor
    message: str
    detail: str = ""
    values: tuple[Tensor, ...] = ()

    def raise_if_broken(self) -> None:
        """Raises ValueError if it is not so. Waits for the device if `ok` is on a GPU."""
        if not bool(self.ok):
            detail = self.detail.format(*(int(value) for value in self.values))
            raise ValueError(f"{self.message}{', but ' if detail else ''}{detail}")


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """The keys each row sees: the union of `[lo[j], hi[j])` over j.

    Attributes:
        lo: int32 `[num_intervals, batch, seqlen_q]`.
        hi: int32, the same shape. Intervals that are not empty are disjoint, not adjacent, and in increasing
            order of j; empty ones are `[0, 0)`.
        seqlen_k: number of keys of a batch entry.
        checks: the intervals are right if all of them are ok.
    """

    lo: Tensor
    hi: Tensor
    seqlen_k: int
    checks: tuple[MaskCheck, ...] = ()

    @property
    def num_intervals(self) -> int:
        return self.lo.shape[0]

    @property
    def batch(self) -> int:
        return self.lo.shape[1]

    @property
    def seqlen_q(self) -> int:
        return self.lo.shape[2]

    def check(self) -> None:
        """Raises ValueError for the first check that fails. Waits for the device if it is a GPU."""
        for check in self.checks:
            check.raise_if_broken()

    def to_dense(self) -> Tensor:
        """The mask as bool `[batch, seqlen_q, seqlen_k]`. For tests and small masks."""
        key = torch.arange(self.seqlen_k, device=self.lo.device)
        inside = (key >= self.lo[..., None]) & (key < self.hi[..., None])
        return inside.any(0)


def row_intervals(
    program: MaskProgram | str,
    tables: Sequence[Tensor] = (),
    symbols: Sequence[int] = (),
    *,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Evaluates a mask program.

    Args:
        program: a `MaskProgram` or its printed form.
        tables: the captured tensors, integer or bool, on `device` (scalars may be elsewhere).
        symbols: the captured ints.
        batch: number of batch entries.
        seqlen_q: rows of a batch entry.
        seqlen_k: keys of a batch entry.
        device: where to compute; by default where the first table with entries is.

    Raises:
        UnsupportedMaskError: intervals can not express the mask.
        TypeError: a table has the wrong dtype.
        ValueError: too few tables or symbols, or a table with the wrong device or shape.
    """
    if isinstance(program, str):
        program = MaskProgram.parse(program)
    if device is None:
        device = next((t.device for t in tables if t.dim()), torch.device("cpu"))
    device = torch.device(device)
    _check_arguments(program, tables, symbols, device)
    shape = (batch, seqlen_q)
    if 0 in (batch, seqlen_q, seqlen_k):
        empty = torch.zeros(max(program.max_intervals, 1), *shape, dtype=torch.int32, device=device)
        return RowIntervals(empty, empty, seqlen_k)
    run = _Evaluation(program, tables, symbols, batch, seqlen_q, seqlen_k, device)
    lanes = [run.lane(lane) for lane in program.keys.lanes]
    for promise in program.keys.required:
        run.expect(promise)
    if not lanes:
        zero = torch.zeros(1, 1, dtype=torch.int32, device=device)
        lanes = [(zero, zero)]
    lanes = _disjoint(lanes)
    lo, hi = (torch.stack([x.expand(shape) for x in edges]) for edges in zip(*lanes, strict=True))
    return RowIntervals(lo, hi, seqlen_k, tuple(run.checks))


def _check_arguments(
    program: MaskProgram, tables: Sequence[Tensor], symbols: Sequence[int], device: torch.device
) -> None:
    if len(tables) < program.num_tables:
        raise ValueError(f"`tables` must hold {program.num_tables} tensors, got {len(tables)}")
    if len(symbols) < program.num_symbols:
        raise ValueError(f"`symbols` must hold {program.num_symbols} ints, got {len(symbols)}")
    for index, tensor in enumerate(tables[: program.num_tables]):
        name = program.describe(Expr("table", (index,)))
        if tensor.is_floating_point() or tensor.is_complex():
            raise TypeError(f"captured tensor `{name}` must hold ints or bools, got {tensor.dtype}")
        if tensor.dim() and tensor.device.type != device.type:
            raise ValueError(f"captured tensor `{name}` must be on {device}, got {tensor.device}")


def _disjoint(lanes: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Sorts the intervals of each row and joins those that overlap or touch; the others become `[0, 0)`."""
    far = 2**31 - 1
    lanes = [(torch.where(lo < hi, lo, far), torch.where(lo < hi, hi, far)) for lo, hi in lanes]
    count = len(lanes)
    for step in range(count):  # odd-even transposition sort
        for j in range(step % 2, count - 1, 2):
            (a, b), (x, y) = lanes[j : j + 2]
            swap = a > x
            lanes[j] = torch.where(swap, x, a), torch.where(swap, y, b)
            lanes[j + 1] = torch.where(swap, a, x), torch.where(swap, b, y)
    for j in range(count - 1):
        (a, b), (x, y) = lanes[j : j + 2]
        join = (x <= b) & (x < far)
        lanes[j] = torch.where(join, far, a), torch.where(join, far, b)
        lanes[j + 1] = torch.where(join, a, x), torch.where(join, torch.maximum(b, y), y)
    return [(torch.where(lo < far, lo, 0), torch.where(lo < far, hi, 0)) for lo, hi in lanes]


class _Value(NamedTuple):
    """An expression's value: a number, or a tensor that broadcasts to `[batch, rows or keys]`; and bounds that
    hold whatever the data, so that int32 is used exactly where it can not overflow."""

    data: Tensor | int
    low: int
    high: int


class _Groups(NamedTuple):
    """The equal values of a table along kv, sorted by value; all `[1 or batch, num_groups]`."""

    value: Tensor
    begin: Tensor
    end: Tensor  # behind the last key of this value
    is_whole: Tensor | None  # the keys of this value are next to each other; None: all of them are


_POINTWISE: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_TRUTH = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not")


class _Evaluation:
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
        lo, hi = self.edge(lane.lo), self.edge(lane.hi)
        if lane.keys != TRUE:
            lo, hi = self.narrow(lane.keys, lo, hi)
        for promise in lane.exact:
            self.expect(promise, lo < hi)
        return lo, hi

    def edge(self, expr: Expr) -> Tensor:
        value = self.value(expr)
        if not isinstance(value.data, Tensor):
            number = min(max(value.data, 0), self.seqlen_k)
            return torch.full((1, 1), number, dtype=torch.int32, device=self.device)
        data = value.data
        if value.low < 0 or value.high > self.seqlen_k:
            data = data.clamp(0, self.seqlen_k)
        return data.to(torch.int32)

    def narrow(self, keys: Expr, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of `[lo, hi)` where the key condition holds; checks that they are one interval."""
        is_key = self.tensor(self.value(keys)).bool().expand(-1, self.seqlen_k)
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
        text = self.program.describe(keys)
        self.check(
            is_live & ~is_whole,
            f"the keys with `{text}` that a row may see must be next to each other",
            "in row q = {} of batch entry {} there is a gap",
        )
        return torch.where(is_live, begin, 0), torch.where(is_live, end, 0)

    def expect(self, promise: Promise, is_live: Tensor | None = None) -> None:
        """Checks a promise in the rows where it matters, all of them unless `is_live` says which."""
        op, args = promise.holds.op, promise.holds.args
        when = self.value(promise.when).data
        matters = when if is_live is None else is_live & when
        if matters is False:
            return
        if op == "is_grouped":
            is_whole = self.group_field(promise.holds, "is_whole")
            if is_whole is None:
                return
            text = self.program.describe(args[0])
            self.check(
                ~is_whole & matters,
                f"`{text}` must hold equal values next to each other along kv",
                "the value {} that row q = {} of batch entry {} looks up lies in several places",
                self.tensor(self.value(args[1])),
            )
        elif op == "is_sorted":
            keys = self.tensor(self.value(args[0])).expand(-1, self.seqlen_k)
            drops = keys[:, 1:] < keys[:, :-1]
            if isinstance(matters, Tensor):
                drops = drops & matters.any(-1, keepdim=True)
            text = self.program.describe(args[0])
            self.check(
                drops,
                f"`{text}` must never decrease along kv",
                "it does from kv = {0} on in batch entry {1}",
            )
        else:
            holds = self.value(promise.holds).data
            if not isinstance(holds, Tensor):
                holds = torch.full((1, 1), holds, device=self.device)
            text = self.program.describe(promise.holds)
            self.check(
                ~holds & matters, f"`{text}` must be true in every row", "it is not at q = {}"
            )

    def check(
        self, broken: Tensor, message: str, detail: str, values: Tensor | None = None
    ) -> None:
        """Adds a check: `broken` `[1 or batch, rows or keys]` must be False everywhere."""
        if not broken.numel():
            return
        flat = broken.flatten()
        first = flat.to(torch.uint8).argmax()
        row, entry = first % broken.shape[1], first // broken.shape[1]
        sought = () if values is None else (values.expand_as(broken).take(first),)
        self.checks.append(MaskCheck(~flat.any(), message, detail, (*sought, row, entry)))

    # Values

    def value(self, expr: Expr) -> _Value:
        return self.once("value", expr, lambda: self._value(expr))

    def tensor(self, value: _Value) -> Tensor:
        if isinstance(value.data, Tensor):
            return value.data
        return torch.full((1, 1), value.data, device=self.device)

    def _value(self, expr: Expr) -> _Value:
        op, args = expr.op, expr.args
        if op in ("int", "bool"):
            return _Value(args[0], args[0], args[0])
        if op == "symbol":
            number = self.symbols[args[0]]
            return _Value(number, number, number)
        if op == "var":
            size = self.sizes[args[0]]
            index = torch.arange(size, dtype=torch.int32, device=self.device)
            return _Value(index[:, None] if args[0] == "b" else index[None], 0, size - 1)
        if op == "table":
            return self.look_up(expr)
        if op == "upper_bound":
            return _Value(self.upper_bound(*args), 0, self.seqlen_k)
        if op in ("group_begin", "group_end"):
            edge = self.group_field(expr, op.removeprefix("group_"))
            assert edge is not None
            return _Value(edge, 0, self.seqlen_k)
        values = [self.value(arg) for arg in args]
        if op in ("floordiv", "mod"):
            values[1] = self.divisor(args[1], values[1])
        return self.pointwise(op, values)

    def divisor(self, expr: Expr, value: _Value) -> _Value:
        """A divisor; checks that it is not zero, and makes it 1 where it is."""
        if not isinstance(value.data, Tensor):
            if value.data == 0:
                raise ValueError(f"`{self.program.describe(expr)}` must not be zero, it divides")
        elif value.low <= 0 <= value.high:
            is_zero = value.data == 0
            text = self.program.describe(expr)
            self.check(
                is_zero,
                f"`{text}` must not be zero, it divides",
                "it is at position {} of batch entry {}",
            )
            value = value._replace(data=torch.where(is_zero, 1, value.data))
        return value

    def pointwise(self, op: str, values: list[_Value]) -> _Value:
        low, high = _bounds(op, values)
        if op == "where":
            values[1:] = _alike(*values[1:])
        elif op not in _TRUTH:
            values = [_counted(value) for value in values]
        if any(x.low < _INT32[0] or x.high > _INT32[1] for x in (*values, _Value(0, low, high))):
            values = [
                value._replace(data=value.data.long())
                if isinstance(value.data, Tensor) and value.data.dtype == torch.int32
                else value
                for value in values
            ]
        data = [value.data for value in values]
        if op == "not":
            return _Value(~data[0] if isinstance(data[0], Tensor) else not data[0], 0, 1)
        if op == "where":
            return _Value(_where(*data), low, high)
        if op in ("min", "max"):
            return _Value(_extreme(op, *data), low, high)
        return _Value(_POINTWISE[op](*data), low, high)

    def look_up(self, expr: Expr) -> _Value:
        """A captured tensor at its indices, `[1 or batch, 1 or rows or keys]`."""
        table, indices = self.tables[expr.args[0]], expr.args[1:]
        text = self.program.describe(expr)
        if len(indices) != table.dim():
            raise ValueError(
                f"captured tensor in `{text}` must have {len(indices)} dimensions, got {table.dim()}"
            )
        if not indices:
            data = table.to(self.device).reshape(1, 1)
        elif all(index.op == "var" for index in indices) and [
            index.args[0] == "b" for index in indices
        ] in ([True], [False], [True, False]):
            sizes = [self.sizes[index.args[0]] for index in indices]
            for dim, size in enumerate(sizes):
                if table.shape[dim] < size:
                    raise ValueError(
                        f"captured tensor in `{text}` must have at least {size} entries in "
                        f"dimension {dim}, got {table.shape[dim]}"
                    )
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
            return _Value(data, 0, 1)
        if data.dtype in (torch.int8, torch.int16, torch.uint8, torch.int32):
            return _Value(data.to(torch.int32), *_INT32)
        return _Value(data.to(torch.int64), *_INT64)

    def index(self, expr: Expr, size: int, text: str) -> Tensor:
        """Values of an index into a dimension; negative ones count from the end, as in PyTorch."""
        value = self.value(expr)
        index = self.tensor(value)
        if value.low < 0:
            index = torch.where(index < 0, index + size, index)
        if value.low < 0 or value.high >= size:
            if not size:
                raise ValueError(f"`{text}` looks up a captured tensor without entries")
            self.check(
                (index < 0) | (index >= size),
                f"`{text}` must look up entries in [{-size}, {size})",
                "it looks up {} at position {} of batch entry {}",
                self.tensor(value),
            )
            index = index.clamp(0, size - 1)
        return index

    # Searches along kv

    def runs(self, keys: Expr) -> tuple[Tensor, Tensor, Tensor]:
        """Maximal runs of equal values along kv: value, begin, end, each `[1 or batch, num_runs]`.

        Where there are fewer runs the last one is repeated. On a host num_runs is what the data need; on a GPU
        nobody waits for that and it is seqlen_k.
        """

        def compute():
            data = self.tensor(_counted(self.value(keys))).expand(-1, self.seqlen_k)
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
                return _Groups(value, begin, end, None)
            last = torch.searchsorted(value, value, right=True) - 1
            splits = torch.nn.functional.pad(is_split.cumsum(-1, dtype=torch.int32), (1, 0))
            is_whole = splits.gather(-1, last) == splits
            return _Groups(value, begin, end.gather(-1, last), is_whole)

        return self.once("groups", keys, compute)

    def group_field(self, expr: Expr, field: str) -> Tensor | None:
        """A field of the group that each row looks up; empty and whole where there is no such group."""
        keys, wanted = expr.args
        groups = self.groups(keys)

        def locate():
            values, sought = _aligned(groups.value, self.tensor(_counted(self.value(wanted))))
            place = torch.searchsorted(values, sought).clamp(max=values.shape[-1] - 1)
            return place, _gather(groups.value, place) == sought

        place, is_found = self.once("locate", Expr("is_grouped", expr.args), locate)
        data = getattr(groups, field)
        if data is None:
            return None
        found = _gather(data, place)
        return found | ~is_found if field == "is_whole" else torch.where(is_found, found, 0)

    def upper_bound(self, keys: Expr, limit: Expr) -> Tensor:
        """The first key whose value is above `limit`, for values that never decrease."""
        value, begin, _ = self.runs(keys)
        edges = torch.nn.functional.pad(begin, (0, 1), value=self.seqlen_k)
        values, limits = _aligned(value, self.tensor(_counted(self.value(limit))))
        return _gather(edges, torch.searchsorted(values, limits, right=True))


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


def _counted(value: _Value) -> _Value:
    """Bools as the integers 0 and 1."""
    if isinstance(value.data, Tensor):
        is_bool = value.data.dtype == torch.bool
        return value._replace(data=value.data.to(torch.int32)) if is_bool else value
    return value._replace(data=int(value.data))


def _alike(x: _Value, y: _Value) -> tuple[_Value, _Value]:
    """Both as they are if both are bools, as integers otherwise."""
    types = {v.data.dtype if isinstance(v.data, Tensor) else type(v.data) for v in (x, y)}
    return (x, y) if types <= {bool, torch.bool} else (_counted(x), _counted(y))


def _bounds(op: str, values: list[_Value]) -> tuple[int, int]:
    if op in _TRUTH:
        return 0, 1
    (a, b), (x, y) = values[0][1:], values[-1][1:]
    if op == "add":
        return a + x, b + y
    if op == "sub":
        return a - y, b - x
    if op == "neg":
        return -b, -a
    if op == "mul":
        corners = (a * x, a * y, b * x, b * y)
        return min(corners), max(corners)
    if op == "where":
        (a, b) = values[1][1:]
        return min(a, x), max(b, y)
    if op == "min":
        return min(a, x), min(b, y)
    if op == "max":
        return max(a, x), max(b, y)
    if op == "mod":
        return min(x + 1, 0), max(y - 1, 0)
    size = max(abs(a), abs(b))  # of abs and floordiv
    return (0 if op == "abs" or (a >= 0 and x > 0) else -size), size


def _where(condition: Tensor | int, x: Tensor | int, y: Tensor | int) -> Tensor | int:
    if not isinstance(condition, Tensor):
        return x if condition else y
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        dtype = torch.bool if isinstance(x, bool) else torch.int32
        if dtype == torch.int32 and not all(_INT32[0] <= z <= _INT32[1] for z in (x, y)):
            dtype = torch.int64
        x = torch.full((1, 1), x, dtype=dtype, device=condition.device)
    return torch.where(condition, x, y)


def _extreme(op: str, x: Tensor | int, y: Tensor | int) -> Tensor | int:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.minimum(x, y) if op == "min" else torch.maximum(x, y)
    if isinstance(y, Tensor):
        x, y = y, x
    if isinstance(x, Tensor):
        return x.clamp(max=y) if op == "min" else x.clamp(min=y)
    return min(x, y) if op == "min" else max(x, y)
