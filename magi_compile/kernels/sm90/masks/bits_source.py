"""A mask_mod as CUDA: the `Mask` that `csrc/sm90/masks/mask_bits.cuh` evaluates for all pairs of a query and a key.

    (t0[q] & t0[kv]) != 0      ->      struct Row, Key                     what depends on a query, or on a key, alone
                                       static __device__ Row row(...)      t0[q], and whether there is such an entry
                                       static __device__ Key key(...)      t0[kv]
                                       static __device__ bool pair(...)    the rest

It computes what PyTorch does in the mask_mod's own graph (`mask_graph.py`), in its dtypes (`codegen/pointwise.py`).
Sizes, captured ints and values of tensors come in as words: they change nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile.functions.guards import Divisor, Index
from magi_compile.functions.names import name_of
from magi_compile.kernels.sm90.codegen.lazy import (
    VIEWS,
    Body,
    Lazy,
    Number,
    function,
    once,
    variables_of,
)
from magi_compile.kernels.sm90.codegen.operations import Operations, filled
from magi_compile.kernels.sm90.codegen.pointwise import (
    UnknownOperation,
    cast,
    element,
    is_float,
    literal,
)
from magi_compile.kernels.sm90.masks.mask_graph import MaskGraph

_INTEGERS = (torch.int32, torch.int64)  # of indices
_OF_ROW, _OF_KEY = frozenset("bhq"), frozenset(("b", "h", "kv"))


class NodeWords(NamedTuple):
    """The place of a tensor among the words: `first` is its address, then the size and the stride of each of its
    dimensions."""

    node: Node
    first: int
    num_dims: int


class NumberWord(NamedTuple):
    """A number among the words, which has to fit `dtype`."""

    node: Node
    dtype: torch.dtype


@dataclass
class BitsSource:
    """The source, and what has to be handed to it.

    Attributes:
        text: defines `ffa::Mask`.
        checks: what it checks.
        words: what its words are, in order.
        num_words: how many words there are.
    """

    text: str = ""
    checks: list[Index | Divisor] = field(default_factory=list)
    words: list[NodeWords | NumberWord] = field(default_factory=list)
    num_words: int = 0


def bits_source(graph: MaskGraph, names: Sequence[str]) -> BitsSource:
    """The source of a mask.

    Args:
        graph: of its mask_mod.
        names: the user's names of the captured tensors.

    Returns:
        The CUDA source, and the words that it reads.

    Raises:
        UnknownOperation: naming an operation that is not generated.
    """
    return _BitsWriter(graph, names).write()


class _BitsWriter(Operations):
    def __init__(self, graph: MaskGraph, names: Sequence[str]):
        self.graph = graph
        self.names = names
        self.source = BitsSource()
        self.bodies = {kind: Body(kind, self.home) for kind in ("row", "key")}
        self.bodies["pair"] = Body("pair", self.home, outer=("row", "key"))
        self.values: dict[Node, Lazy] = {}
        self.numbers: dict[NumberWord, Number] = {}
        self.places: dict[
            tuple[str, Number], Number
        ] = {}  # by the size of a dimension and an index
        constants = (*graph.tables, *graph.constants)
        for node in graph.result.graph.nodes:
            if node in graph.indices:
                self.values[node] = self.index(graph.indices[node])
            elif node in constants or node.op in ("output", "get_attr"):
                continue
            elif any(x in self.values for x in node.all_input_nodes):
                self.values[node] = self.value(node)

    def write(self) -> BitsSource:
        result = self.tensor(self.graph.result)
        if result.shape:
            raise UnknownOperation(f"a mask of shape {list(result.shape)}")
        pair = self.bodies["pair"]
        shown = pair.text(self.converted(result, torch.bool).at(()))
        arguments = "const Context& c, const Row& row, const Key& key, Int b, Int h, Int q, Int kv"
        head = f"static __device__ bool pair({arguments})"
        self.source.text = "\n".join(
            [
                '#include "functions/pointwise.cuh"',
                "namespace ffa {",
                "struct Mask {",
                f"static constexpr int kNumChecks = {len(self.source.checks)};",
                f"static constexpr int kNumWords = {self.source.num_words};",
                *self.bodies["row"].result("Row", "const Context& c, Int b, Int h, Int q"),
                *self.bodies["key"].result("Key", "const Context& c, Int b, Int h, Int kv"),
                *function(head, [*pair.lines, f"return {shown};"]),
                "};",
                "}  // namespace ffa",
                "",
            ]
        )
        return self.source

    def home(self, number: Number) -> Body:
        """The body that computes a number."""
        if number.variables <= _OF_ROW:
            return self.bodies["row"]
        return self.bodies["key" if number.variables <= _OF_KEY else "pair"]

    def check(self, what: Index | Divisor, place: Number, holds: str, found: str) -> None:
        """Checks a number where it is computed; `holds` and `found` are texts with `{}` for it."""
        body = self.home(place)
        name = body.text(place)
        self.source.checks.append(what)
        body.require(len(self.source.checks) - 1, holds.format(name), found.format(name))

    # Tensors

    def index(self, name: str) -> Lazy:
        number = Number(torch.int64, frozenset((name,)), lambda _: name, is_short=True)
        return Lazy(torch.int64, (), (), lambda _: number)

    def tensor(self, node: Node) -> Lazy:
        """The value of a node; constants are read from the words."""
        if node not in self.values:
            fill = self.fill(node) if node.op == "call_function" else None
            self.values[node] = fill or self.table(node)
        return self.values[node]

    def table(self, node: Node) -> Lazy:
        example: Tensor = node.meta["val"]
        first, kind = self.source.num_words, element(example.dtype)
        self.source.words.append(NodeWords(node, first, example.dim()))
        self.source.num_words += 1 + 2 * example.dim()

        def at(place: Sequence[Number]) -> Number:
            def text(body: Body) -> str:
                terms = [
                    f"{body.text(x)} * c.word({first + 2 + 2 * dim})" for dim, x in enumerate(place)
                ]
                return f"load<{kind}>(c.word({first}), {' + '.join(terms) or '0'})"

            return Number(example.dtype, variables_of(place), text)

        sizes = tuple(f"c.word({first + 1 + 2 * dim})" for dim in range(example.dim()))
        number = self.graph.tables.get(node)
        name = "a captured tensor"
        if number is not None:
            name = self.names[number] if number < len(self.names) else f"t{number}"
        return Lazy(example.dtype, tuple(example.shape), sizes, once(at), name)

    def fill(self, node: Node) -> Lazy | None:
        """A tensor of one number, if the call says so."""
        value = filled(name_of(node.target), node)
        if value is None:
            return None
        example: Tensor = node.meta["val"]
        number = self.scalar(value, example.dtype)
        sizes = tuple(f"Int({size}ll)" for size in example.shape)
        return Lazy(example.dtype, tuple(example.shape), sizes, lambda _: number)

    def scalar(self, value: Any, dtype: torch.dtype) -> Number:
        """A number of Python, or one that is computed from captured ints, in `dtype`."""
        if isinstance(value, Node) and not isinstance(value.meta.get("val"), Tensor):
            if dtype == torch.bool or not isinstance(value.meta.get("val"), torch.SymInt):
                raise UnknownOperation("a captured number as one of another kind")
            word = NumberWord(value, dtype)
            if word not in self.numbers:
                place = self.source.num_words
                self.source.words.append(word)
                self.source.num_words += 1
                text = cast(f"c.word({place})", torch.int64, dtype)
                self.numbers[word] = Number(dtype, frozenset(), lambda _: text, is_short=True)
            return self.numbers[word]
        if not isinstance(value, (bool, int, float)):
            raise UnknownOperation(f"`{value}` in place of a number")
        text = literal(value, dtype)
        return Number(dtype, frozenset(), lambda _: text, is_short=True)

    # Operations

    def value(self, node: Node) -> Lazy:
        """The result of a call that depends on the pair."""
        name = name_of(node.target)
        if not isinstance(node.meta.get("val"), Tensor):
            raise UnknownOperation(f"`{name}`, which gives no tensor")
        fill = self.fill(node)
        if fill is not None:
            return fill
        if name == "index":
            return self.look_up(node)
        if name in VIEWS:
            (tensor,) = node.all_input_nodes[:1]
            return VIEWS[name](self.tensor(tensor), node)
        return self.pointwise(name, node)

    def divisor(self, argument: Any, dtype: torch.dtype) -> Lazy:
        """A divisor; of integers, it is checked not to be zero, and 1 where it is."""
        found = self.operand(argument, dtype)
        if is_float(dtype):
            return found
        if dtype == torch.bool or argument == 0 or found.shape:
            raise UnknownOperation("a division by zero, by a truth value or by several numbers")
        if isinstance(argument, (int, float)):
            return found
        number = found.at(())
        self.check(Divisor(), number, "{} != 0", "0")
        made = Number(
            dtype,
            number.variables,
            lambda body: f"({body.text(number)} == 0 ? {literal(1, dtype)} : {body.text(number)})",
        )
        return Lazy(dtype, (), (), lambda _: made)

    def look_up(self, node: Node) -> Lazy:
        """A tensor at indices, each a number; a check that there are such entries."""
        tensor, indices = self.tensor(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
        places: list[Number | None] = []
        for dim, index in enumerate(indices):
            places.append(None if index is None else self.place(tensor, dim, self.tensor(index)))
        places += [None] * (len(tensor.shape) - len(places))
        kept = [dim for dim, place in enumerate(places) if place is None]

        def at(place: Sequence[Number]) -> Number:
            left = iter(place)
            return tensor.at([next(left) if x is None else x for x in places])

        shape, sizes = tuple(tensor.shape[i] for i in kept), tuple(tensor.sizes[i] for i in kept)
        return Lazy(tensor.dtype, shape, sizes, once(at))

    def place(self, tensor: Lazy, dim: int, index: Lazy) -> Number:
        """A checked index into a dimension."""
        if index.shape or index.dtype not in _INTEGERS:
            raise UnknownOperation(f"an index of shape {list(index.shape)} in {index.dtype}")
        if not tensor.shape[dim]:
            raise UnknownOperation("a tensor without entries")
        size, length = tensor.sizes[dim], tensor.shape[dim]
        wanted = self.converted(index, torch.int64).at(())
        if (size, wanted) in self.places:
            return self.places[size, wanted]
        name = f"dimension {dim} of {tensor.name}" if len(tensor.shape) > 1 else tensor.name
        holds = f"is_inside(wrapped({{}}, {size}), {size})"
        self.check(Index(name, -length, length), wanted, holds, "{}")
        place = self.places[size, wanted] = Number(
            torch.int64,
            wanted.variables,
            lambda body: f"clamped(wrapped({body.text(wanted)}, {size}), {size})",
        )
        return place
