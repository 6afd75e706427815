"""A score program as CUDA: the `Score` that the forward and the backward kernel run on their scores.

    score + t0[h] * (kv - q)  ->  struct Entry, Row, Key               of a batch entry and head, a query, a key
                                  static __device__ Entry entry(...)   t0[h]
                                  static __device__ Row row(...)       q as a float
                                  static __device__ Key key(...)       kv as a float
                                  static __device__ float score(...)   the rest
                                  static __device__ float slope(...)   the derivative of the new score by the old one

It computes what PyTorch does, in its dtypes (`codegen/pointwise.py`); numbers of 16 bits are floats that are rounded.
Integers of 32 bits that positions are made of are floats from the start where they become such: below 2^24 that is the
same number, and saves a conversion for each pair. A look-up out of bounds gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile.functions.names import INDICES, name_of
from magi_compile.functions.operators import OPERATORS
from magi_compile.kernels.sm90.codegen.lazy import (
    Body,
    Lazy,
    Number,
    function,
    pointwise_of,
    variables_of,
)
from magi_compile.kernels.sm90.codegen.operations import MUL, Operations, filled
from magi_compile.kernels.sm90.codegen.pointwise import (
    UnknownOperation,
    element,
    is_float,
    literal,
)
from magi_compile.kernels.sm90.codegen.pointwise import cast as plain_cast
from magi_compile.score.graphs import score_graphs
from magi_compile.score.program import Look, ScoreProgram

# Floats of 16 bits, as C++ calls them; what is computed of them is a float.
_SHORT = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SYMBOLIC = {"add": "+", "sub": "-", "mul": "*"}
# Below this, integers are the same numbers as floats.
MOST_POSITIONS = 2**24


@dataclass(frozen=True)
class ScoreSource:
    """The source, and what has to be handed to it.

    Attributes:
        text: defines `ffa::Score`.
        tables: the numbers of the captured tensors among the words: of each, its address, its sizes and its strides.
            The captured ints follow.
        num_words: how many words there are.
        is_shift: whether the program adds to the score what does not depend on it, and the backward makes use of that.
        sums: of each look-up that has a gradient, the number of its tensor.
    """

    text: str
    tables: tuple[int, ...]
    num_words: int
    is_shift: bool
    sums: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def score_source(
    text: str,
    dtypes: tuple[torch.dtype, ...],
    ranks: tuple[int, ...],
    *,
    has_short_sequences: bool = True,
    may_shift: bool = True,
    wanted: tuple[int, ...] = (),
) -> ScoreSource:
    """The source of a program, for captured tensors of certain kinds.

    Args:
        text: of the program.
        dtypes: of the captured tensors.
        ranks: their numbers of dimensions.
        has_short_sequences: whether all positions are below `MOST_POSITIONS`.
        may_shift: whether the softmax_scale is positive, so that scores may begin with what is added to them.
        wanted: the numbers of the captured tensors whose gradients the source says as well, in another text.

    Returns:
        The source, and what has to be handed to it.

    Raises:
        UnknownOperation: naming an operation that is not generated.
    """
    writer = _ScoreWriter(ScoreProgram.parse(text), dtypes, ranks, has_short_sequences, may_shift)
    return writer.write(wanted)


class _Whole(NamedTuple):
    """An integer as a float, which is the same number: from `low` to `high`."""

    as_float: Number
    low: int
    high: int


# Operations of whole numbers that are the same of floats, and the range of their results.
_Range = Callable[[list[tuple[int, int]]], tuple[int, int]]
_RANGES: dict[str, _Range] = {
    OPERATORS["add"].cuda: lambda x: (x[0][0] + x[1][0], x[0][1] + x[1][1]),
    OPERATORS["sub"].cuda: lambda x: (x[0][0] - x[1][1], x[0][1] - x[1][0]),
    OPERATORS["rsub"].cuda: lambda x: (x[1][0] - x[0][1], x[1][1] - x[0][0]),
    OPERATORS["neg"].cuda: lambda x: (-x[0][1], -x[0][0]),
    OPERATORS["abs"].cuda: lambda x: (0, max(abs(x[0][0]), abs(x[0][1]))),
    MUL: lambda x: _ends([a * b for a in x[0] for b in x[1]]),
    OPERATORS["maximum"].cuda: lambda x: (max(x[0][0], x[1][0]), max(x[0][1], x[1][1])),
    OPERATORS["minimum"].cuda: lambda x: (min(x[0][0], x[1][0]), min(x[0][1], x[1][1])),
}


def _ends(values: list[int]) -> tuple[int, int]:
    return min(values), max(values)


class _ScoreWriter(Operations):
    is_approximate = True

    def __init__(
        self,
        program: ScoreProgram,
        dtypes: Sequence[torch.dtype],
        ranks: Sequence[int],
        has_short_sequences: bool,
        may_shift: bool,
    ):
        self.program, self.dtypes, self.ranks, self.may_shift = program, dtypes, ranks, may_shift
        self.bodies = {
            "entry": Body("entry", self.home, type_of=_type_of),
            "row": Body("row", self.home, ("entry",), _type_of),
            "key": Body("key", self.home, (), _type_of),
        }
        self.pair = self.pair_body()
        self.values: dict[Node, Lazy] = {}
        self.wholes: dict[Number, _Whole] = {}
        self.places: dict[Look, list[Number]] = {}  # the indices of each look-up
        self.num_words = 0
        self.tables = tuple(sorted({look.table for look in program.looks}))
        self.words = {table: self.reserve(1 + 2 * ranks[table]) for table in self.tables}
        first_symbol = self.reserve(program.num_symbols)
        self.graphs = score_graphs(program, tuple(dtypes))
        one = Number(torch.float32, frozenset(), lambda _: "1.f", is_short=True)
        self.inputs = {
            "score": _variable("score", torch.float32, "score"),
            "g": one,
            **{name: self.index(name, has_short_sequences) for name in INDICES},
        }
        for i in range(program.num_symbols):
            self.inputs[f"s{i}"] = _constant(torch.int64, f"c.word({first_symbol + i})")
        for look in program.looks:
            self.inputs[look.name] = self.look_up(look)

    def reserve(self, count: int) -> int:
        first = self.num_words
        self.num_words += count
        return first

    def write(self, wanted: Sequence[int] = ()) -> ScoreSource:
        is_shift = self.may_shift and self.is_shift()
        score, slope = self.of_pairs("score"), self.of_pairs("slope", "d_score")
        place, of_pair = "const Place& {0}", "const Entry& entry, const Row& row, const Key& key"
        arguments = f"const Context& c, {of_pair}, const Place& q, const Place& kv, float score"
        looks = [
            look
            for look in self.program.looks
            if look.table in wanted and look.derivative in self.program.functions
        ]
        gradients = self.of_gradients(arguments, looks) if looks else []
        text = "\n".join(
            [
                '#include "scores/functions.cuh"',
                '#include "scores/places.cuh"',
                "namespace ffa {",
                "struct Score {",
                "static constexpr bool kIsThere = true;",
                f"static constexpr bool kIsShift = {str(is_shift).lower()};",
                f"static constexpr int kNumWords = {self.num_words};",
                *self.bodies["entry"].result("Entry", "const Context& c, int b, int h"),
                *self.bodies["row"].result(
                    "Row", f"const Context& c, const Entry& entry, {place.format('q')}"
                ),
                *self.bodies["key"].result("Key", f"const Context& c, {place.format('kv')}"),
                *function(f"static __device__ __forceinline__ float score({arguments})", score),
                *function(f"static __device__ __forceinline__ float slope({arguments})", slope),
                *gradients,
                "};",
                "}  // namespace ffa",
                "",
            ]
        )
        sums = tuple(look.table for look in looks)
        return ScoreSource(text, self.tables, self.num_words, is_shift, sums)

    def pair_body(self) -> Body:
        return Body("pair", self.home, ("entry", "row", "key"), _type_of)

    def of_pairs(self, name: str, function: str | None = None) -> list[str]:
        """The lines of a function of pairs; one that is not there gives 0."""
        if (function or name) not in self.program.functions:
            return ["return 0.f;"]
        self.pair = self.pair_body()
        number = self.converted(self.result_of(function or name), torch.float32).at(())
        text = self.pair.text(number)
        return [*self.pair.lines, f"return {text};"]

    def of_gradients(self, arguments: str, looks: Sequence[Look]) -> list[str]:
        """The members of `Score` for gradients of captured tensors: for each look-up, its address and the derivative of
        the new score by the value there."""
        self.pair = self.pair_body()
        found, kinds = [], []
        for i, look in enumerate(looks):
            slope = self.converted(self.result_of(look.derivative), torch.float32).at(())
            place = self.place_of(look)
            found.append(f"found[{i}] = {{{self.pair.text(place)}, {self.pair.text(slope)}}};")
            kinds.append(f"i == {i} ? PlaceOf::{_place_of(place.variables)} : ")
        head = "static __device__ __forceinline__ void gradients"
        return [
            f"static constexpr int kNumSums = {len(looks)};",
            "static __device__ constexpr PlaceOf place_of(int i) {",
            f"    return {''.join(kinds)}PlaceOf::kPair;",
            "}",
            *function(f"{head}({arguments}, TableGradient* found)", [*self.pair.lines, *found]),
        ]

    def place_of(self, look: Look) -> Number:
        """The address of a look-up in its tensor, in elements, or -1: parts that depend on an entry, a row or a key are
        computed there."""
        rank, first = self.ranks[look.table], self.words[look.table]
        sizes = [f"c.size({first + 1 + dim})" for dim in range(rank)]
        indices = self.places[look]
        groups: dict[str, list[int]] = {}
        for dim in range(rank):
            groups.setdefault(self.home(indices[dim]).kind, []).append(dim)
        offsets, conditions = [], []
        for group in groups.values():
            variables = variables_of([indices[dim] for dim in group])
            offsets.append(self.offset(look.table, group, indices, variables))
            conditions.append(self.inside(group, indices, sizes, variables))

        def text(body: Body) -> str:
            is_there = " && ".join(body.text(x) for x in conditions) or "true"
            offset = " + ".join(body.text(x) for x in offsets) or "0"
            return f"({is_there} ? {offset} : -1)"

        return Number(torch.int32, variables_of(indices), text)

    def home(self, number: Number) -> Body:
        """The body that computes a number."""
        if number.variables <= {"b", "h"}:
            return self.bodies["entry"]
        if number.variables <= {"b", "h", "q"}:
            return self.bodies["row"]
        return self.bodies["key"] if number.variables <= {"b", "kv"} else self.pair

    # Functions of the program

    def result_of(self, name: str) -> Lazy:
        graph, names = self.graphs.of(name)
        left = iter(names)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = _lazy(self.inputs[next(left)])
            elif node.op == "call_function":
                self.values[node] = self.value(node)
            elif node.op != "output":
                raise UnknownOperation(f"`{node.op} {node.target}`")
        result: Any = graph.output_node().args[0]
        if not isinstance(result, Node):
            return _lazy(self.scalar(result, torch.float32 if "d_" in name else torch.int64))
        return self.values[result]

    def is_shift(self) -> bool:
        """True if the score is a sum of the old one and of what does not depend on it."""
        graph, names = self.graphs.of("score")
        if "score" not in names:
            return False
        placeholders = graph.find_nodes(op="placeholder")
        old = placeholders[names.index("score")]
        depends = {old}
        for each in graph.nodes:
            if any(x in depends for x in each.all_input_nodes):
                depends.add(each)
        node: Any = graph.output_node().args[0]
        while node is not old:
            terms = [x for x in node.args if isinstance(x, Node) and x in depends]
            name = name_of(node.target)
            is_sum = name == "add" or (name == "sub" and node.args[0] in depends)
            is_float = node.meta["val"].dtype == torch.float32
            if not is_sum or not is_float or node.kwargs or len(terms) != 1:
                return False
            (node,) = terms
        return True

    # Leaves

    def index(self, name: str, has_short_sequences: bool) -> Number:
        """b, h, q or kv; they lie in what the bodies call q and kv."""
        member = "at" if name in ("q", "kv") else name

        def text(body: Body) -> str:
            if body.kind == "entry":
                return name
            owner = "kv" if name == "kv" or body.kind == "key" else "q"
            return f"{owner}.{member}"

        number = Number(torch.int32, frozenset((name,)), text, is_short=True)
        if name in ("q", "kv") and has_short_sequences:
            as_float = _variable(name, torch.float32, f"{name}.as_float")
            self.wholes[number] = _Whole(as_float, 0, MOST_POSITIONS - 1)
        return number

    def tensor(self, node: Node) -> Lazy:
        return self.values[node]

    def scalar(self, value: Any, dtype: torch.dtype) -> Number:
        if isinstance(value, Node):
            number = self.values[value].at(())
            return self.converted(_lazy(number), dtype).at(())
        if not isinstance(value, (bool, int, float)):
            raise UnknownOperation(f"`{value}` in place of a number")
        if dtype in _SHORT:
            value = torch.tensor(value, dtype=dtype, device="cpu").item()
        text = literal(value, torch.float32 if dtype in _SHORT else dtype)
        number = _constant(dtype, text)
        if not is_float(dtype) and dtype != torch.bool and abs(value) < MOST_POSITIONS:
            as_float = _constant(torch.float32, literal(float(value), torch.float32))
            self.wholes[number] = _Whole(as_float, int(value), int(value))
        return number

    def divisor(self, argument: Any, dtype: torch.dtype) -> Lazy:
        if dtype == torch.bool or argument == 0:
            raise UnknownOperation("a division by zero or by a truth value")
        found = self.operand(argument, dtype)
        if is_float(dtype) or isinstance(argument, (int, float)):
            return found
        number, one = found.at(()), literal(1, dtype)

        def text(body: Body) -> str:
            return f"({body.text(number)} == 0 ? {one} : {body.text(number)})"

        return _lazy(Number(dtype, number.variables, text))

    def look_up(self, look: Look) -> Number:
        """The entry of a captured tensor: what of its place is known of an entry, a row or a key is computed there."""
        dtype, first = self.dtypes[look.table], self.words[look.table]
        rank = self.ranks[look.table]
        stored = _SHORT.get(dtype) or ("unsigned char" if dtype == torch.bool else element(dtype))
        sizes = [f"c.size({first + 1 + dim})" for dim in range(rank)]
        indices = self.places[look] = [
            self.index_of(name, size) for name, size in zip(look.indices, sizes, strict=True)
        ]
        variables = variables_of(indices)
        home = self.home(Number(dtype, variables, str))
        own = [dim for dim in range(rank) if self.home(indices[dim]) is home]
        others: dict[str, list[int]] = {}
        for dim in range(rank):
            kind = self.home(indices[dim]).kind
            if dim not in own and kind in home.outer:
                others.setdefault(kind, []).append(dim)
            elif dim not in own:
                own.append(dim)
        # The address of the first group is that of its part of the tensor.
        address = _constant(torch.int64, f"c.word({first})")
        offsets: list[Number] = []
        conditions: list[Number] = []
        for group in others.values():
            of_group = variables_of([indices[dim] for dim in group])
            offset = self.offset(look.table, group, indices, of_group)
            inside = self.inside(group, indices, sizes, of_group)
            if address.is_short:
                address = self.part(address, offset, stored, of_group)
            else:
                offsets.append(offset)
            conditions.append(inside)
        if own:
            offsets.append(self.offset(look.table, own, indices, variables))
            if conditions:
                limit = self.limit(conditions.pop(0), sizes[own[0]])
                conditions.append(
                    self.inside(own, indices, [sizes[own[0]], *sizes], variables, limit)
                )
            else:
                conditions.append(self.inside(own, indices, sizes, variables))

        def text(body: Body) -> str:
            is_there = " && ".join(body.text(x) for x in conditions) or "true"
            offset = " + ".join(body.text(x) for x in offsets) or "0"
            loaded = f"load_if<{stored}>({is_there}, {body.text(address)}, {offset})"
            return f"({loaded} != 0)" if dtype == torch.bool else loaded

        return Number(dtype, variables, text)

    def index_of(self, name: str, size: str) -> Number:
        """An index of a dimension, from its beginning on."""
        found = self.result_of(name)
        if found.dtype in (torch.bool, *_SHORT) or is_float(found.dtype):
            raise UnknownOperation(f"an index in {found.dtype}")
        wide = torch.int64 if found.dtype == torch.int64 else torch.int32
        index = self.converted(found, wide).at(())
        return Number(
            torch.int32, index.variables, lambda body: f"index_of({body.text(index)}, {size})"
        )

    def offset(
        self, table: int, dims: list[int], indices: list[Number], variables: frozenset[str]
    ) -> Number:
        """The offset of some indices into a tensor, in elements."""
        rank = self.ranks[table]
        strides = self.words[table] + 1 + rank

        def text(body: Body) -> str:
            terms = []
            for dim in dims:
                index = body.text(indices[dim])
                terms.append(index if dim == rank - 1 else f"{index} * c.size({strides + dim})")
            return " + ".join(terms)

        return Number(torch.int32, variables, text)

    def part(
        self, address: Number, offset: Number, stored: str, variables: frozenset[str]
    ) -> Number:
        def text(body: Body) -> str:
            return f"{body.text(address)} + Int({body.text(offset)}) * Int(sizeof({stored}))"

        return Number(torch.int64, variables, text)

    def inside(
        self,
        dims: list[int],
        indices: list[Number],
        sizes: list[str],
        variables: frozenset[str],
        limit: Number | None = None,
    ) -> Number:
        """True if there are such indices; `limit` is in place of the size of the first one."""

        def text(body: Body) -> str:
            limits = [sizes[dim] for dim in dims]
            if limit is not None:
                limits[0] = body.text(limit)
            checks = [
                f"is_index({body.text(indices[dim])}, {size})"
                for dim, size in zip(dims, limits, strict=True)
            ]
            return " && ".join(checks)

        return Number(torch.bool, variables, text)

    def limit(self, is_there: Number, size: str) -> Number:
        """The size of a dimension, or 0 where nothing is there."""
        return Number(
            torch.int32, is_there.variables, lambda body: f"({body.text(is_there)} ? {size} : 0)"
        )

    # Operations

    def cast(self, text: str, source: torch.dtype, target: torch.dtype) -> str:
        text = plain_cast(text, _computed_in(source), _computed_in(target))
        return f"rounded_to<{_SHORT[target]}>({text})" if target in _SHORT else text

    def converted(self, tensor: Lazy, dtype: torch.dtype) -> Lazy:
        number = tensor.at(())
        whole = self.wholes.get(number)
        if whole is None or number.dtype == dtype:
            return super().converted(tensor, dtype)
        if dtype == torch.float32:
            return _lazy(whole.as_float)
        found = super().converted(tensor, dtype)
        if dtype in (torch.int32, torch.int64):
            self.wholes[found.at(())] = whole
        return found

    def combined(
        self,
        node: Node,
        args: Sequence[Any],
        within: torch.dtype,
        dtype: torch.dtype,
        spelling: str,
    ) -> Lazy:
        operands = [self.operand(argument, within) for argument in args]
        if dtype in _SHORT:
            short = _SHORT[dtype]
            rounded = pointwise_of((), operands, dtype, f"rounded_to<{short}>({spelling})")
            return _lazy(rounded.at(()))
        found = _lazy(pointwise_of((), operands, dtype, spelling).at(()))
        wholes = [self.wholes.get(operand.at(())) for operand in operands]
        known = [whole for whole in wholes if whole is not None]
        if (
            spelling in _RANGES
            and dtype in (torch.int32, torch.int64)
            and len(known) == len(wholes)
        ):
            low, high = _RANGES[spelling]([(whole.low, whole.high) for whole in known])
            if max(-low, high) < MOST_POSITIONS:
                floats = [_lazy(whole.as_float) for whole in known]
                as_float = pointwise_of((), floats, torch.float32, spelling).at(())
                self.wholes[found.at(())] = _Whole(as_float, low, high)
        return found

    def value(self, node: Node) -> Lazy:
        """The result of a call."""
        name, example = name_of(node.target), node.meta["val"]
        if not isinstance(example, Tensor):
            return self.of_symbols(name, node)
        value = filled(name, node)
        if value is not None:
            return _lazy(self.scalar(value, example.dtype))
        if name == "expand":
            return self.tensor(node.args[0])  # type: ignore[arg-type]
        return self.pointwise(name, node)

    def of_symbols(self, name: str, node: Node) -> Lazy:
        if name not in _SYMBOLIC:
            raise UnknownOperation(f"`{name}` of captured ints")
        texts = [
            (self.values[x].at(()) if isinstance(x, Node) else self.scalar(x, torch.int64)).text(
                self.pair
            )
            for x in node.args
        ]
        return _lazy(_constant(torch.int64, f"({texts[0]} {_SYMBOLIC[name]} {texts[1]})"))

    def power(self, node: Node, dtype: torch.dtype) -> Lazy:
        base, exponent = node.args
        if is_float(dtype) and exponent in (0, 1, 2, 3, 4):
            found = self.operand(base if exponent else 1.0, dtype)
            for _ in range(int(exponent) - 1):  # type: ignore[arg-type]
                found = self.combined(node, (found, base), dtype, dtype, MUL)
            return found
        if is_float(dtype) and exponent == 0.5:
            return self.combined(node, (base,), dtype, dtype, OPERATORS["sqrt"].cuda)
        return super().power(node, dtype)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _SHORT else dtype


def _type_of(dtype: torch.dtype) -> str:
    return element(_computed_in(dtype))


def _place_of(variables: frozenset[str]) -> str:
    """The kind of a place with these variables, as csrc/sm90/scores/functions.cuh names it."""
    if "kv" not in variables:
        return "kRow"
    return "kPair" if "q" in variables else "kKey"


def _lazy(number: Number) -> Lazy:
    return Lazy(number.dtype, (), (), lambda _: number)


def _constant(dtype: torch.dtype, text: str) -> Number:
    return Number(dtype, frozenset(), lambda _: text, is_short=True)


def _variable(name: str, dtype: torch.dtype, text: str) -> Number:
    return Number(dtype, frozenset((name,)), lambda _: text, is_short=True)
