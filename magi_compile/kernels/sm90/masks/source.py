"""A mask program as CUDA: the `Mask` that `csrc/sm90/masks/mask_slices.cuh` runs, for programs known when a graph runs.

    (q >= kv) & (t0[q] == t0[kv])      ->      static __device__ Int key(...)     t0[kv], an index of which is made
                                               static __device__ void lanes(...)  [group.begin, min(group.end, q + 1))
                                               static __device__ void find(...)   what a failed check has found

It computes and checks in the order of masks/evaluation/visit.py, like tensor operations (masks/evaluation/evaluate.py).
Sizes, captured ints and the shapes of captured tensors come in as values: they change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from magi_compile.kernels.sm90.codegen import pointwise
from magi_compile.masks.evaluation import messages as preconditions
from magi_compile.masks.evaluation.visit import Visitor
from magi_compile.masks.expr.expr import Expr
from magi_compile.masks.expr.integers import INT64
from magi_compile.masks.program.program import MaskProgram
from magi_compile.masks.solver.key_sets import KeySet, Lane, Promise

# The elements of captured tensors, as CUDA calls them.
ELEMENTS = {
    dtype: name for dtype, name in pointwise.ELEMENTS.items() if not dtype.is_floating_point
}
_CALLS = ("add", "sub", "mul", "neg", "abs", "min", "max", "mod", "floordiv")
_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_SIGNS |= {"and": "&", "or": "|", "xor": "^"}
# The order of the conditions of a mask gives no other kernel.
_COMMUTATIVE = ("min", "max", "and", "or")


_PLACE = (
    "[[maybe_unused]] const int b = entry / c.heads();",
    "[[maybe_unused]] const int h = entry % c.heads();",
)


class TableWords(NamedTuple):
    """The place of a captured tensor among the words: `first` is its address, then the size and the stride of each of
    its dimensions."""

    table: int
    first: int
    num_dims: int


class SourceCheck(NamedTuple):
    """A check that the source makes. `describe` takes the captured tensors' shapes."""

    describe: Callable[[Sequence[Sequence[int]]], preconditions.Words]
    length: str  # seqlen_q or seqlen_k: where it fails is told as `entry * length + position`
    sought: Expr | None  # a value to report before the position, the batch entry and the head


@dataclass
class MaskSource:
    """The source, and what has to be handed to it.

    Attributes:
        text: defines `ffa::Mask`.
        checks: what it checks, in the order of `Evaluation`.
        numbers: expressions of captured ints alone; their values are the first words.
        tables: the captured tensors among the words behind them.
        num_words: how many words there are.
        look_ups: every look-up, to be checked against the shapes.
        indexes: the expressions of keys of which an index is made.
        divisors: those of `numbers` that divide, and may not be zero.
        num_lanes: how many intervals a row has.
    """

    text: str = ""
    checks: list[SourceCheck] = field(default_factory=list)
    numbers: list[Expr] = field(default_factory=list)
    tables: list[TableWords] = field(default_factory=list)
    num_words: int = 0
    look_ups: list[Expr] = field(default_factory=list)
    indexes: list[Expr] = field(default_factory=list)
    divisors: list[Expr] = field(default_factory=list)
    num_lanes: int = 0

    def num_indexes(self, batch: int, heads: int) -> list[int]:
        """The number of each of `indexes`: for batch entries and heads as far as it differs between these."""
        return [
            (batch if "b" in keys.variables else 1) * (heads if "h" in keys.variables else 1)
            for keys in self.indexes
        ]


@lru_cache(maxsize=1024)
def mask_source(program: MaskProgram, keys: KeySet, dtypes: tuple[torch.dtype, ...]) -> MaskSource:
    """The CUDA source of a mask program.

    Args:
        program: the mask.
        keys: its `program.keys(...)`, of rows.
        dtypes: of the captured tensors, of `ELEMENTS`.

    Returns:
        The source, and the words that it reads.

    Raises:
        TypeError: a captured tensor of integers where a truth value is needed.
    """
    assert not program.by_keys
    return _SlicesWriter(program, keys, dtypes).write()


class _Code(NamedTuple):
    """A C++ expression without side effects."""

    text: str
    is_bool: bool


class _SlicesWriter:
    def __init__(self, program: MaskProgram, keys: KeySet, dtypes: tuple[torch.dtype, ...]):
        self.program = program
        self.keys = keys
        self.dtypes = dtypes
        self.source = MaskSource()
        self.key_bodies: list[_Body] = []
        self.searched: set[int] = set()
        self._lay_out_words()
        self.rows = _Body(self, "q")

    def _lay_out_words(self) -> None:
        exprs = [promise.when for promise in self.keys.required]
        exprs += [promise.holds for promise in self.keys.required]
        for lane in self.keys.lanes:
            exprs += (lane.lo, lane.hi, lane.keys)
            exprs += (part for promise in lane.grouped + lane.ordered for part in promise)
        source = self.source
        num_dims: dict[int, int] = {}
        for expr in exprs:
            for node in _outermost(expr, _is_number):
                if node not in source.numbers:
                    source.numbers.append(node)
            for node in expr.walk():
                if node.op == "table" and node not in source.look_ups:
                    source.look_ups.append(node)
                    table, dims = node.args[0], len(node.args) - 1
                    num_dims[table] = max(num_dims.get(table, 0), dims)
        source.num_words = len(source.numbers)
        for table, dims in sorted(num_dims.items()):
            source.tables.append(TableWords(table, source.num_words, dims))
            source.num_words += 1 + 2 * dims

    def write(self) -> MaskSource:
        lanes = self.rows.intervals(self.keys)
        for number, (lo, hi) in enumerate(lanes or [("0", "0")]):
            self.rows.lines += [f"lo[{number}] = {lo};", f"hi[{number}] = {hi};"]
        of_batch, of_heads = (
            [n for n, expr in enumerate(self.source.indexes) if name in expr.variables]
            for name in ("b", "h")
        )
        arguments = "const Context& c, int entry, int q, int* lo, int* hi"
        self.source.num_lanes = max(len(lanes), 1)
        self.source.text = "\n".join(
            [
                "namespace ffa {",
                "struct Mask {",
                f"static constexpr int kNumLanes = {self.source.num_lanes};",
                f"static constexpr int kNumChecks = {len(self.source.checks)};",
                f"static constexpr int kNumIndexes = {len(self.key_bodies)};",
                f"static constexpr int kNumWords = {self.source.num_words};",
                f"static constexpr Bits kIndexesOfBatch = {_bits(of_batch)};",
                f"static constexpr Bits kIndexesOfHeads = {_bits(of_heads)};",
                f"static constexpr Bits kSearchedIndexes = {_bits(self.searched)};",
                *_function("void", "lanes", arguments, [*_PLACE, *self.rows.lines]),
                *self._key_function(),
                *self._find_function(),
                "};",
                "}  // namespace ffa",
                "",
            ]
        )
        return self.source

    def check(self, describe: Callable, length: str, sought: Expr | None = None) -> int:
        """The number of a new check."""
        if self.program.differs_by_head:
            of_all, describe = describe, lambda shapes: preconditions.of_a_head(of_all(shapes))
        self.source.checks.append(SourceCheck(describe, length, sought))
        return len(self.source.checks) - 1

    def index(self, keys: Expr, is_searched: bool = False, must_be_truth: bool = False) -> int:
        """The number of the index of `keys`."""
        if keys not in self.source.indexes:
            self.source.indexes.append(keys)
            body = _Body(self, "kv")
            self.key_bodies.append(body)
            body.lines.append(f"return {body.value(keys).text};")
        number = self.source.indexes.index(keys)
        if must_be_truth:
            self.key_bodies[number].want_truth(keys, self.key_bodies[number].value(keys))
        if is_searched:
            self.searched.add(number)
        return number

    def first_word(self, table: int) -> int:
        return next(words.first for words in self.source.tables if words.table == table)

    def _key_function(self) -> list[str]:
        lines = [*_PLACE, "switch (index) {"]
        for number, body in enumerate(self.key_bodies):
            lines += [f"case {number}: {{", *body.lines, "}"]
        return _function(
            "Int",
            "key",
            "const Context& c, int index, int entry, int kv",
            [*lines, "}", "return 0;"],
        )

    def _find_function(self) -> list[str]:
        lines = ["switch (check) {"]
        for number, check in enumerate(self.source.checks):
            variable = "q" if check.length == "seqlen_q" else "kv"
            body = _Body(self, variable, makes_checks=False)
            found = [] if check.sought is None else [body.value(check.sought).text]
            found += [variable, "b", *(["h"] if self.program.differs_by_head else [])]
            lines += [
                f"case {number}: {{",
                f"const int entry = place / c.{check.length}(), {variable} = place % c.{check.length}();",
                *_PLACE,
                *body.lines,
                *(f"values[{i}] = {text};" for i, text in enumerate(found)),
                "return;",
                "}",
            ]
        return _function(
            "void", "find", "const Context& c, int check, int place, Int* values", [*lines, "}"]
        )


class _Body(Visitor[_Code, str]):
    """Statements that compute values for one row, or for one key; each value once. Edges are the names of variables."""

    def __init__(self, writer: _SlicesWriter, variable: str, makes_checks: bool = True):
        self.writer = writer
        self.variable = variable
        self.makes_checks = makes_checks
        self.lines: list[str] = []
        self.known = {}
        self.num_lanes = 0

    def require(self, check: int, holds: str) -> None:
        function = "require_in_row" if self.variable == "q" else "require_at_key"
        self.lines.append(f"c.{function}({check}, entry, {self.variable}, {holds});")

    # Lanes and promises

    def edges(self, lane: Lane) -> tuple[str, str]:
        lo, hi = f"lo{self.num_lanes}", f"hi{self.num_lanes}"
        self.num_lanes += 1
        for name, expr, end in ((lo, lane.lo, "0"), (hi, lane.hi, "c.seqlen_k()")):
            self.lines.append(f"int {name} = c.edge({self.edge(expr, lambda *_, end=end: end)});")
        return lo, hi

    def edge(self, expr: Expr, bound: Callable[[Expr, Expr], str]) -> str:
        """An edge of a lane, before it is cut to the keys there are."""
        if expr.op == "int":
            return _literal(min(max(expr.args[0], INT64[0]), INT64[1]))
        return self.with_bounds(expr, bound).text

    def narrow_to_group(
        self, group: _Searched, when: _Code, lo: str, hi: str
    ) -> tuple[str, str, str]:
        name = f"v{len(self.lines)}"
        narrowed = f"c.narrow_to({group.name}, {group.number}, entry, {lo}, {hi})"
        self.lines.append(f"const bool {name} = {when.text} && !{narrowed};")
        return lo, hi, name

    def narrow_to_bounds(self, lane: Lane, lo: str, hi: str) -> tuple[str, str]:
        begin, end = f"begin_{lo}", f"end_{hi}"
        self.lines.append(f"const int {begin} = {lo}, {end} = {hi};")

        def bound(keys: Expr, limit: Expr) -> str:
            index = self.along_kv(keys)
            return f"c.bound_within({index}, entry, {self.value(limit).text}, {begin}, {end})"

        for name, expr, pick in ((lo, lane.lo, "max"), (hi, lane.hi, "min")):
            edge = self.edge(expr, bound)
            self.lines.append(f"{name} = static_cast<int>(ffa::{pick}({name}, c.edge({edge})));")
        return lo, hi

    def narrow(self, keys: Expr, lo: str, hi: str) -> tuple[str, str]:
        index = self.writer.index(keys, must_be_truth=True)
        check = self.check(preconditions.are_neighbours, keys)
        self.require(check, f"c.narrow({index}, entry, {lo}, {hi})")
        return lo, hi

    def expect_order(self, promise: Promise, keys: int, when: _Code, lo: str, hi: str) -> None:
        check = self.check(preconditions.is_sorted, *promise.holds.args)
        self.require(check, f"c.is_ordered({keys}, entry, {lo}, {hi}) | !{when.text}")

    def expect_group(self, promise: Promise, is_split: str, lo: str, hi: str) -> None:
        self.check_group(promise, f"{is_split} & ({lo} < {hi})")

    def expect_whole(self, promise: Promise, when: _Code) -> None:
        group = self.group(*promise.holds.args)
        self.check_group(promise, f"!{group.name}.is_whole() & {when.text}")

    def expect_true(self, condition: Expr, when: _Code) -> None:
        holds = self.value(condition).text
        self.require(self.check(preconditions.is_true, condition), f"{holds} | !({when.text})")

    def check_group(self, promise: Promise, is_split: str) -> None:
        keys, wanted = promise.holds.args
        self.require(self.check(preconditions.is_grouped, keys, wanted), f"!({is_split})")

    def check(
        self, say: Callable[[str], preconditions.Words], expr: Expr, sought: Expr | None = None
    ) -> int:
        """The number of a new check of a row or a key, about `expr` whatever the shapes."""
        length = "seqlen_q" if self.variable == "q" else "seqlen_k"
        return self.writer.check(lambda _: say(self.writer.program.describe(expr)), length, sought)

    # Values

    def leaf(self, expr: Expr) -> _Code | None:
        op, args = expr.op, expr.args
        if op == "bool":
            return _Code("true" if args[0] else "false", True)
        if op == "int":
            return _Code(_literal(min(max(args[0], INT64[0]), INT64[1])), False)
        if op == "var":
            return _Code(args[0], False)
        if _is_number(expr):
            word = f"c.word({self.writer.source.numbers.index(expr)})"
            is_bool = expr.kind == "bool"
            return self.named(f"{word} != 0" if is_bool else word, is_bool)
        if self.variable == "kv" and "kv" not in expr.variables and self.makes_checks:
            self.writer.rows.value(expr)  # a check that does not depend on the key is made there
        return None

    def named(self, text: str, is_bool: bool) -> _Code:
        name = f"v{len(self.lines)}"
        self.lines.append(f"const {'bool' if is_bool else 'Int'} {name} = {text};")
        return _Code(name, is_bool)

    def pointwise(self, op: str, values: Sequence[_Code]) -> _Code:
        return self.named(*_pointwise(op, values))

    def place(self, key: str) -> _Code:
        return self.named(key, False)

    def checks(self, expr: Expr) -> bool:
        """True if a check of `expr` is made here."""
        return self.makes_checks and (self.variable == "q" or "kv" in expr.variables)

    def want_truth(self, expr: Expr, value: _Code) -> None:
        if not value.is_bool:
            text = self.writer.program.describe(expr)
            raise TypeError(f"`{text}` must be bool where it is a truth value, got integers")

    def divisor(self, quotient: Expr, value: _Code) -> _Code:
        expr = quotient.args[1]
        if _is_number(expr):
            self.writer.source.divisors.append(expr)
        if _is_number(expr) or expr.op == "int":
            return value
        if self.checks(quotient):
            self.require(self.check(preconditions.is_not_zero, expr), f"{value.text} != 0")
        return self.named(f"{value.text} == 0 ? 1 : {value.text}", False)

    def load(self, look_up: Expr, places: list[str] | None) -> _Code:
        table, *indices = look_up.args
        if places is None:
            places = [index.args[0] for index in indices]
        first, dtype = self.writer.first_word(table), self.writer.dtypes[table]
        terms = [f"{place} * c.word({first + 2 + 2 * dim})" for dim, place in enumerate(places)]
        load = f"load<{ELEMENTS[dtype]}>(c.word({first}), {' + '.join(terms) or '0'})"
        return self.named(load, dtype == torch.bool)

    def index(self, look_up: Expr, dim: int) -> str:
        writer, table, wanted = self.writer, look_up.args[0], look_up.args[1 + dim]
        size = f"c.word({writer.first_word(table) + 1 + 2 * dim})"
        place = self.named(f"wrapped({self.value(wanted).text}, {size})", False).text
        if self.checks(look_up):
            text = writer.program.describe(look_up)
            check = writer.check(
                lambda shapes: preconditions.is_entry(text, shapes[table][dim]),
                "seqlen_q" if self.variable == "q" else "seqlen_k",
                sought=wanted,
            )
            self.require(check, f"is_inside({place}, {size})")
        return self.named(f"clamped({place}, {size})", False).text

    def along_kv(self, keys: Expr) -> int:
        return self.writer.index(keys)

    def group(self, keys: Expr, wanted: Expr) -> _Searched:
        place = ("group", keys, wanted)
        if place not in self.known:
            index = self.writer.index(keys, is_searched=True)
            value = self.value(wanted).text
            name = f"v{len(self.lines)}"
            self.lines.append(f"const Group {name} = c.group({index}, entry, {value});")
            self.known[place] = _Searched(name, index)
        return self.known[place]  # type: ignore[no-any-return]

    def group_edge(self, group: _Searched, edge: str) -> _Code:
        return _Code(f"{group.name}.{edge}", False)


class _Searched(NamedTuple):
    """The keys that a row wants, in C++, and the number of the index that they are found by."""

    name: str
    number: int


def _pointwise(op: str, values: Sequence[_Code]) -> _Code:
    texts = [value.text for value in values]
    if op == "not":
        return _Code(f"!{texts[0]}", True)
    if op == "where":
        is_bool = values[1].is_bool and values[2].is_bool
        cast = "" if is_bool else "(Int)"
        return _Code(f"{texts[0]} ? {cast}{texts[1]} : {cast}{texts[2]}", is_bool)
    if op in _COMMUTATIVE:
        texts = sorted(texts)
    if op in _CALLS:
        return _Code(f"ffa::{op}({', '.join(texts)})", False)
    return _Code(f"{texts[0]} {_SIGNS[op]} {texts[1]}", True)


def _function(result: str, name: str, parameters: str, lines: list[str]) -> list[str]:
    head = f"template <class Context>\nstatic __device__ {result} {name}({parameters}) {{"
    return [head, *(f"    {line}" for line in lines), "}"]


def _is_number(expr: Expr) -> bool:
    """True if it consists of captured ints (and constants) alone."""
    nodes = list(expr.walk())
    return any(node.op == "symbol" for node in nodes) and not any(
        node.op in ("var", "table", "group_begin", "group_end", "upper_bound") for node in nodes
    )


def _outermost(expr: Expr, holds: Callable[[Expr], bool]) -> Iterator[Expr]:
    """The nodes for which `holds`, without those inside them."""
    if holds(expr):
        yield expr
    else:
        for child in expr.children:
            yield from _outermost(child, holds)


def _literal(value: int) -> str:
    if value == INT64[0]:  # C++ has no such literal
        return f"({value + 1}ll - 1)"
    return f"({value}ll)"


def _bits(numbers: Iterable[int]) -> str:
    return f"{sum(1 << number for number in numbers)}ull"
