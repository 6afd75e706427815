"""A mask_mod as CUDA: the `Mask` that `csrc/sm90/masks/mask_bits.cuh` evaluates for all pairs of a query and a key.

    (t0[q] & t0[kv]) != 0      ->      struct Row, Key                     what depends on a query, or on a key, alone
                                       static __device__ Row row(...)      t0[q], and whether there is such an entry
                                       static __device__ Key key(...)      t0[kv]
                                       static __device__ bool pair(...)    the rest

It computes what PyTorch does in the mask_mod's own graph (`mask_graph.py`), in its dtypes (`pointwise.py`). Sizes, captured ints and
values of tensors come in as words: they change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile.kernels.sm90.masks.mask_graph import MaskGraph
from magi_compile.kernels.sm90.masks.pointwise import (
    COMPARISONS,
    CONVERSIONS,
    DIVISIONS,
    FILLS,
    IN_RESULT,
    QUESTIONS,
    TRUTHS,
    UnknownOperation,
    cast,
    element,
    is_float,
    literal,
    promoted,
)
from magi_compile.masks.program.look_ups import Divisor, Index
from magi_compile.masks.program.names import name_of

_INTEGERS = (torch.int32, torch.int64)  # of indices
_OF_ROW, _OF_KEY = frozenset("bhq"), frozenset(("b", "h", "kv"))


class TableWords(NamedTuple):
    """Where a tensor lies among the words: `first` is its address, then the size and the stride of each of its dimensions."""

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
    words: list[TableWords | NumberWord] = field(default_factory=list)
    num_words: int = 0


@dataclass(frozen=True, eq=False)
class _Number:
    """A number of a pair.

    Attributes:
        dtype: of it.
        variables: of which of b, h, q and kv it is a function.
        text: it in C++, from the values of others.
        is_short: whether it needs no name.
    """

    dtype: torch.dtype
    variables: frozenset[str]
    text: Callable[[_Body], str]
    is_short: bool = False


class _Lazy(NamedTuple):
    """A tensor of a pair: what it is at a place. `sizes` are those of its dimensions in C++."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sizes: tuple[str, ...]
    at: Callable[[Sequence[_Number]], _Number]
    name: str = "a captured tensor"


class _Body:
    """Statements that compute numbers, each once."""

    def __init__(self, writer: _Writer, kind: str):
        self.writer = writer
        self.kind = kind
        self.lines: list[str] = []
        self.known: dict[_Number, str] = {}
        self.fields: dict[str, str] = {}  # C++ types by names

    def text(self, number: _Number) -> str:
        """The number, where it stands; what depends on queries or on keys alone is computed with these."""
        if number.is_short:
            return number.text(self)
        if number not in self.known:
            home = self.writer.home(number)
            if self.kind == "pair" and home.kind != "pair":
                name = home.text(number)
                home.fields[name] = element(number.dtype)
                self.known[number] = f"{home.kind}.{name}"
            else:
                text = number.text(self)
                name = f"v{len(self.lines)}"
                self.lines.append(f"const {element(number.dtype)} {name} = {text};")
                self.known[number] = name
        return self.known[number]

    def require(self, check: int, holds: str, found: str) -> None:
        self.lines.append(f"c.require({check}, {holds}, {found});")

    def result(self, name: str) -> list[str]:
        """The struct of this body, and the function that makes it."""
        fields = [f"    {kind} {name};" for name, kind in self.fields.items()]
        variable = "q" if self.kind == "row" else "kv"
        head = (
            f"static __device__ {name} {self.kind}(const Context& c, Int b, Int h, Int {variable})"
        )
        lines = [*self.lines, f"return {{{', '.join(self.fields)}}};"]
        return [f"struct {name} {{", *fields, "};", *_function(head, lines)]


def bits_source(graph: MaskGraph, names: Sequence[str]) -> BitsSource:
    """The source of a mask.

    Args:
        graph: of its mask_mod.
        names: what the user calls the captured tensors.

    Raises:
        UnknownOperation: naming an operation that is not generated.
    """
    return _Writer(graph, names).write()


class _Writer:
    def __init__(self, graph: MaskGraph, names: Sequence[str]):
        self.graph = graph
        self.names = names
        self.source = BitsSource()
        self.bodies = {kind: _Body(self, kind) for kind in ("row", "key", "pair")}
        self.values: dict[Node, _Lazy] = {}
        self.numbers: dict[NumberWord, _Number] = {}
        self.places: dict[
            tuple[str, _Number], _Number
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
                '#include "masks/pointwise.cuh"',
                "namespace ffa {",
                "struct Mask {",
                f"static constexpr int kNumChecks = {len(self.source.checks)};",
                f"static constexpr int kNumWords = {self.source.num_words};",
                *self.bodies["row"].result("Row"),
                *self.bodies["key"].result("Key"),
                *_function(head, [*pair.lines, f"return {shown};"]),
                "};",
                "}  // namespace ffa",
                "",
            ]
        )
        return self.source

    def home(self, number: _Number) -> _Body:
        """Where a number is computed."""
        if number.variables <= _OF_ROW:
            return self.bodies["row"]
        return self.bodies["key" if number.variables <= _OF_KEY else "pair"]

    def check(self, what: Index | Divisor, place: _Number, holds: str, found: str) -> None:
        """Checks a number where it is computed; `holds` and `found` are texts with `{}` for it."""
        body = self.home(place)
        name = body.text(place)
        self.source.checks.append(what)
        body.require(len(self.source.checks) - 1, holds.format(name), found.format(name))

    # Tensors

    def index(self, name: str) -> _Lazy:
        number = _Number(torch.int64, frozenset((name,)), lambda _: name, is_short=True)
        return _Lazy(torch.int64, (), (), lambda _: number)

    def tensor(self, node: Node) -> _Lazy:
        """What a node is; of constants, where the words say."""
        if node not in self.values:
            fill = self.fill(node) if node.op == "call_function" else None
            self.values[node] = fill or self.table(node)
        return self.values[node]

    def table(self, node: Node) -> _Lazy:
        example: Tensor = node.meta["val"]
        first, kind = self.source.num_words, element(example.dtype)
        self.source.words.append(TableWords(node, first, example.dim()))
        self.source.num_words += 1 + 2 * example.dim()

        def at(place: Sequence[_Number]) -> _Number:
            def text(body: _Body) -> str:
                terms = [
                    f"{body.text(x)} * c.word({first + 2 + 2 * dim})" for dim, x in enumerate(place)
                ]
                return f"load<{kind}>(c.word({first}), {' + '.join(terms) or '0'})"

            return _Number(example.dtype, _variables(place), text)

        sizes = tuple(f"c.word({first + 1 + 2 * dim})" for dim in range(example.dim()))
        number = self.graph.tables.get(node)
        name = "a captured tensor"
        if number is not None:
            name = self.names[number] if number < len(self.names) else f"t{number}"
        return _Lazy(example.dtype, tuple(example.shape), sizes, _once(at), name)

    def fill(self, node: Node) -> _Lazy | None:
        """A tensor of one number, if the call says so."""
        how = FILLS.get(name_of(node.target))
        if how is None:
            return None
        example: Tensor = node.meta["val"]
        place, value = how
        number = self.scalar(node.args[place] if place is not None else value, example.dtype)
        sizes = tuple(f"Int({size}ll)" for size in example.shape)
        return _Lazy(example.dtype, tuple(example.shape), sizes, lambda _: number)

    def scalar(self, value: Any, dtype: torch.dtype) -> _Number:
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
                self.numbers[word] = _Number(dtype, frozenset(), lambda _: text, is_short=True)
            return self.numbers[word]
        if not isinstance(value, (bool, int, float)):
            raise UnknownOperation(f"`{value}` in place of a number")
        text = literal(value, dtype)
        return _Number(dtype, frozenset(), lambda _: text, is_short=True)

    def converted(self, tensor: _Lazy, dtype: torch.dtype) -> _Lazy:
        if tensor.dtype == dtype:
            return tensor

        def at(place: Sequence[_Number]) -> _Number:
            inner = tensor.at(place)
            return _Number(
                dtype, inner.variables, lambda body: cast(body.text(inner), inner.dtype, dtype)
            )

        return _Lazy(dtype, tensor.shape, tensor.sizes, _once(at))

    # Operations

    def value(self, node: Node) -> _Lazy:
        """What a call that depends on the pair gives."""
        name = name_of(node.target)
        if not isinstance(node.meta.get("val"), Tensor):
            raise UnknownOperation(f"`{name}`, which gives no tensor")
        fill = self.fill(node)
        if fill is not None:
            return fill
        if name == "index":
            return self.look_up(node)
        if name in _VIEWS:
            (tensor,) = node.all_input_nodes[:1]
            return _VIEWS[name](self.tensor(tensor), node)
        return self.pointwise(name, node)

    def pointwise(self, name: str, node: Node) -> _Lazy:
        args: list[Any] = list(node.args)
        dtype = node.meta["val"].dtype
        known = _IGNORED | {"alpha"} if name in ("add", "sub") else _IGNORED
        if set(node.kwargs) - known and name not in ("clamp", "div"):
            raise UnknownOperation(f"`{name}` with {', '.join(map(str, node.kwargs))}")
        if name in CONVERSIONS:
            return self.converted(self.tensor(args[0]), dtype)
        if name == "where":
            return self.where(node, dtype)
        if name == "clamp":
            return self.clamp(node, dtype)
        if name == "pow":
            return self.power(node, dtype)
        if name == "div":
            mode = node.kwargs.get("rounding_mode")
            name = f"div_{mode}" if mode else name
            if name == "div":
                return self.combined(node, args, dtype, dtype, lambda x: f"({x[0]} / {x[1]})")
        if name in DIVISIONS:
            args[1] = self.divisor(args[1], dtype)
            return self.combined(node, args, dtype, dtype, DIVISIONS[name])
        if name in COMPARISONS:
            within = promoted(*map(self.kind, args))
            return self.combined(node, args, within, torch.bool, COMPARISONS[name])
        if name in TRUTHS:
            return self.combined(node, args, torch.bool, torch.bool, TRUTHS[name])
        if name in QUESTIONS:
            within = self.tensor(args[0]).dtype
            return self.combined(node, args, within, torch.bool, QUESTIONS[name])
        if name in ("floor", "ceil", "trunc", "round") and not is_float(dtype):
            return self.tensor(args[0])
        if "alpha" in node.kwargs:
            factors = (args[1], node.kwargs["alpha"])
            args[1] = self.combined(node, factors, dtype, dtype, IN_RESULT["mul"])
        if name in IN_RESULT and (name not in ("sqrt", "reciprocal") or is_float(dtype)):
            return self.combined(node, args, dtype, dtype, IN_RESULT[name])
        raise UnknownOperation(f"`{name}`")

    def kind(self, argument: Any) -> tuple[torch.dtype | type, int]:
        """The dtype of an argument and its number of dimensions."""
        if not isinstance(argument, Node):
            return type(argument), 0
        value = argument.meta["val"]
        return (value.dtype, value.dim()) if isinstance(value, Tensor) else (int, 0)

    def operand(self, argument: Any, within: torch.dtype) -> _Lazy:
        """An argument in the dtype that is computed in."""
        if isinstance(argument, Node) and isinstance(argument.meta["val"], Tensor):
            argument = self.tensor(argument)
        if isinstance(argument, _Lazy):
            return self.converted(argument, within)
        number = self.scalar(argument, within)
        return _Lazy(within, (), (), lambda _: number)

    def combined(
        self,
        node: Node,
        args: Sequence[Any],
        within: torch.dtype,
        dtype: torch.dtype,
        make: Callable[[Sequence[str]], str],
    ) -> _Lazy:
        """An operation on operands in the dtype `within`, which broadcast to the shape of `node`."""
        operands = [self.operand(argument, within) for argument in args]
        return _pointwise(node.meta["val"].shape, operands, dtype, make)

    def where(self, node: Node, dtype: torch.dtype) -> _Lazy:
        condition = self.operand(node.args[0], torch.bool)
        arms = [self.operand(x, dtype) for x in node.args[1:]]
        return _pointwise(
            node.meta["val"].shape,
            [condition, *arms],
            dtype,
            lambda x: f"({x[0]} ? {x[1]} : {x[2]})",
        )

    def clamp(self, node: Node, dtype: torch.dtype) -> _Lazy:
        least, most = (
            node.args[i] if i < len(node.args) else node.kwargs.get(name)
            for i, name in ((1, "min"), (2, "max"))
        )
        found = self.operand(node.args[0], dtype)
        for limit, function in ((least, "clamp_min"), (most, "clamp_max")):
            if limit is not None:
                found = self.combined(node, (found, limit), dtype, dtype, IN_RESULT[function])
        return found

    def power(self, node: Node, dtype: torch.dtype) -> _Lazy:
        args: Any = node.args
        base, exponent = args
        most = 3 if is_float(dtype) else 64
        if type(exponent) is not int or not 1 <= exponent <= most or dtype == torch.bool:
            raise UnknownOperation(f"`pow` with the exponent {exponent}")
        base = found = self.operand(base, dtype)
        for _ in range(exponent - 1):
            found = self.combined(node, (found, base), dtype, dtype, IN_RESULT["mul"])
        return found

    def divisor(self, argument: Any, dtype: torch.dtype) -> _Lazy:
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
        one = literal(1, dtype)
        return self.combined_number(number, lambda x: f"({x} == 0 ? {one} : {x})")

    def combined_number(self, number: _Number, make: Callable[[str], str]) -> _Lazy:
        made = _Number(number.dtype, number.variables, lambda body: make(body.text(number)))
        return _Lazy(number.dtype, (), (), lambda _: made)

    def look_up(self, node: Node) -> _Lazy:
        """A tensor at indices, each a number; a check that there are such entries."""
        tensor, indices = self.tensor(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
        places: list[_Number | None] = []
        for dim, index in enumerate(indices):
            places.append(None if index is None else self.place(tensor, dim, self.tensor(index)))
        places += [None] * (len(tensor.shape) - len(places))
        kept = [dim for dim, place in enumerate(places) if place is None]

        def at(place: Sequence[_Number]) -> _Number:
            left = iter(place)
            return tensor.at([next(left) if x is None else x for x in places])

        shape, sizes = tuple(tensor.shape[i] for i in kept), tuple(tensor.sizes[i] for i in kept)
        return _Lazy(tensor.dtype, shape, sizes, _once(at))

    def place(self, tensor: _Lazy, dim: int, index: _Lazy) -> _Number:
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
        place = self.places[size, wanted] = _Number(
            torch.int64,
            wanted.variables,
            lambda body: f"clamped(wrapped({body.text(wanted)}, {size}), {size})",
        )
        return place


# Attributes of results that no value depends on.
_IGNORED = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}


def _variables(numbers: Sequence[_Number]) -> frozenset[str]:
    return frozenset().union(*(x.variables for x in numbers))


def _once(at: Callable[[Sequence[_Number]], _Number]) -> Callable[[Sequence[_Number]], _Number]:
    """The same number for the same place."""
    known: dict[tuple[_Number, ...], _Number] = {}

    def remembered(place: Sequence[_Number]) -> _Number:
        key = tuple(place)
        if key not in known:
            known[key] = at(key)
        return known[key]

    return remembered


def _pointwise(
    shape: Sequence[int],
    operands: Sequence[_Lazy],
    dtype: torch.dtype,
    make: Callable[[Sequence[str]], str],
) -> _Lazy:
    def at(place: Sequence[_Number]) -> _Number:
        inner = []
        for operand in operands:
            own = place[len(place) - len(operand.shape) :]
            inner.append(
                operand.at(
                    [_whole(0) if n == 1 else x for n, x in zip(operand.shape, own, strict=True)]
                )
            )
        return _Number(
            dtype, _variables(inner), lambda body: make([body.text(number) for number in inner])
        )

    sizes = [f"Int({size}ll)" for size in shape]
    for operand in operands:
        for dim, size in enumerate(reversed(operand.sizes), 1):
            if operand.shape[-dim] == shape[-dim]:
                sizes[-dim] = size
    return _Lazy(dtype, tuple(shape), tuple(sizes), _once(at))


def _whole(value: int) -> _Number:
    return _Number(torch.int64, frozenset(), lambda _: f"Int({value}ll)", is_short=True)


# Views, which change what a place means.


def _select(tensor: _Lazy, node: Node) -> _Lazy:
    dim, index = (int(x) for x in node.args[1:3])  # type: ignore[arg-type]
    dim %= len(tensor.shape)
    size = tensor.sizes[dim]
    fixed = _whole(index)
    if index < 0:
        fixed = _Number(torch.int64, frozenset(), lambda _: f"({size} + {index})", is_short=True)

    def at(place: Sequence[_Number]) -> _Number:
        return tensor.at([*place[:dim], fixed, *place[dim:]])

    kept = [place for place in range(len(tensor.shape)) if place != dim]
    shape, sizes = tuple(tensor.shape[i] for i in kept), tuple(tensor.sizes[i] for i in kept)
    return _Lazy(tensor.dtype, shape, sizes, at)


def _reshape(tensor: _Lazy, node: Node) -> _Lazy:
    """A view that has the same dimensions but for those of one entry."""
    shape = tuple(node.meta["val"].shape)
    if [n for n in shape if n != 1] != [n for n in tensor.shape if n != 1]:
        raise UnknownOperation(f"a view of {list(tensor.shape)} as {list(shape)}")
    kept = [dim for dim, n in enumerate(shape) if n != 1]
    inner = [dim for dim, n in enumerate(tensor.shape) if n != 1]

    def at(place: Sequence[_Number]) -> _Number:
        found = [_whole(0)] * len(tensor.shape)
        for outer, own in zip(kept, inner, strict=True):
            found[own] = place[outer]
        return tensor.at(found)

    sizes = ["Int(1ll)"] * len(shape)
    for outer, own in zip(kept, inner, strict=True):
        sizes[outer] = tensor.sizes[own]
    return _Lazy(tensor.dtype, shape, tuple(sizes), at)


def _expand(tensor: _Lazy, node: Node) -> _Lazy:
    return _pointwise(node.meta["val"].shape, [tensor], tensor.dtype, lambda x: x[0])


_VIEWS: dict[str, Callable[[_Lazy, Node], _Lazy]] = {
    "select": _select,
    "expand": _expand,
    **dict.fromkeys(("view", "unsafe_view", "reshape", "squeeze", "unsqueeze"), _reshape),
}


def _function(head: str, lines: Sequence[str]) -> list[str]:
    return ["template <class Context>", f"{head} {{", *(f"    {line}" for line in lines), "}"]
