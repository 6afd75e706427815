"""From the graph of a mask_mod to a MaskProgram.

Every node is one of three. An **expression**, where expressions can say what PyTorch computes in its dtypes. A
**column**, a table with a value for each row or each key, where a node depends on one of these alone: the graph
computes it, whatever it is. And **unsupported**, with a reason, which is nothing that could be compared or cancelled.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from magi_compile import _compat
from magi_compile.functions.functional import functional
from magi_compile.functions.names import (
    INDICES,
    first_line,
    is_in_place,
    is_numpy_scalar,
    is_random,
    name_of,
    result_of,
)
from magi_compile.functions.operators import OPERATORS, Kind
from magi_compile.functions.text import (
    SourceError,
    at_points,
    function_text,
    functions,
    may_be_truth,
    names_of_captures,
    run,
    sortable,
    title_of,
)
from magi_compile.masks.expr.expr import (
    Expr,
    ExprError,
    const,
    symbol,
    table,
    unsupported,
    var,
)
from magi_compile.masks.expr.integers import INT64
from magi_compile.masks.program.operators import (
    INTEGERS,
    MaskOperand,
    Typing,
    Wraps,
    call,
    is_number,
    marked,
)
from magi_compile.masks.program.program import MaskProgram

_CLAMPS = ("clamp", "clip", "clamp_min", "clamp_max")
_OF_ROW, _OF_KEY = frozenset(("b", "h", "q")), frozenset(("b", "h", "kv"))
_ENDS = (-(2**63) + 2, 2**63 - 2)  # beyond the keys of all floats, with room for a sum with 1


def read_graph(
    graph: GraphModule | Graph, captures: Sequence[Any], names: Sequence[str] = ()
) -> MaskProgram:
    """Reads the graph that Dynamo or torch.export made of a mask_mod, whose placeholders are b, h, q, kv, then the
    captured values `captures`: tensors (real or fake) and ints, which are numbered separately. `names` are the user's
    of the tensors.

    `refusals` of the program says why intervals cannot express it, `is_verifiable` whether it can be evaluated as it
    is.
    """
    graph = graph.graph if isinstance(graph, GraphModule) else graph
    return read_with_care(graph, captures, names)[0]


def read_with_care(
    graph: Graph, captures: Sequence[Any], names: Sequence[str] = ()
) -> tuple[MaskProgram, bool]:
    """`read_graph`, and whether something that was tried with these captured values failed.

    A mask_mod that has neither intervals nor a text, or that writes to what it computes, is read again, of the
    operators that it consists of.
    """
    tracer = Tracer(graph, captures, list(names))
    program = tracer.program().ways[0]
    if program.is_verifiable or not program.refusals:
        return program, tracer.has_failed
    plain = tracer.functional()
    if plain is not None:
        again = Tracer(plain, captures, list(names))
        found = again.program().ways[0]
        if found.is_verifiable or not found.refusals:
            return found, again.has_failed
    return program, tracer.has_failed


@dataclass(frozen=True)
class _Value:
    """A node as it was understood.

    Attributes:
        node: of the tracer's own copy of the graph; None for a constant.
        example: a tensor of its shape and dtype, or the value itself where that is no tensor.
        variables: of which of b, h, q and kv it is a function.
        expr: what it is, where expressions can say it.
        reasons: why they cannot.
    """

    node: Node | None
    example: Any
    variables: frozenset[str] = frozenset()
    expr: Expr | None = None
    reasons: tuple[str, ...] = ()

    @property
    def is_column(self) -> bool:
        """True if a table can hold it for every row, or for every key."""
        return self.variables <= _OF_ROW or self.variables <= _OF_KEY


class Tracer:
    """Reads one graph; the arguments are those of `read_graph`."""

    def __init__(self, graph: Graph, captures: Sequence[Any], names: list[str]):
        self.graph = Graph()
        copies: dict[Node, Node] = {}
        self.result = self.graph.graph_copy(graph, copies)
        self.original = graph, captures
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        if len(placeholders) != len(INDICES) + len(captures):
            raise ValueError(
                f"`captures` must have {len(placeholders) - 4} entries, one for each captured value, "
                f"got {len(captures)}"
            )
        for node in filter(_compat.is_exported_lookup, list(self.graph.nodes)):
            captured, *indices = node.args[_compat.EXPORTED_LOOKUP_ARGUMENTS :]
            with self.graph.inserting_before(node):
                look_up = self.graph.call_function(operator.getitem, (captured, tuple(indices)))
            node.replace_all_uses_with(look_up)
            self.graph.erase_node(node)
        # Sizes that are dynamic in Dynamo's graph must not be guarded on: what is tried here has sizes of its own.
        is_compiled = any(not isinstance(x, Tensor) or _compat.is_fake(x) for x in captures)
        self.mode = _compat.static_fake_mode() if is_compiled else None
        self.has_dynamic_sizes = any(
            isinstance(x, Tensor) and any(isinstance(size, torch.SymInt) for size in x.shape)
            for x in captures
        )
        if is_compiled:
            captures = [_compat.without_symbols(capture, self.mode) for capture in captures]
        self.tables = [value for value in captures if isinstance(value, Tensor)]
        self.symbols = [value for value in captures if not isinstance(value, Tensor)]
        self.names = names
        self.columns: dict[Node, int] = {}
        self.numbers: dict[str, int] = {}  # of columns, by what computes them
        self.titles: dict[int, str] = {}
        self.has_failed = False  # something that was tried with these captured values
        self.values: dict[Node, _Value] = {}
        self.begin([copies[node] for node in placeholders], captures)

    def begin(self, placeholders: list[Node], captures: Sequence[Any]) -> None:
        with self.fake():
            index = torch.empty((), dtype=torch.int64, device="cpu" if self.mode else "meta")
        for node, name in zip(placeholders, INDICES, strict=False):
            node.name = name
            self.values[node] = _Value(node, index, frozenset([name]), var(name))
        counts = {"t": 0, "s": 0}
        for node, capture in zip(placeholders[len(INDICES) :], captures, strict=True):
            kind = "t" if isinstance(capture, Tensor) else "s"
            number = counts[kind]
            counts[kind] += 1
            node.name = f"{kind}{number}"
            node.target = node.name
            expr = table(number) if kind == "t" else symbol(number)
            self.values[node] = _Value(node, self.example(capture), frozenset(), expr)
        for node, name in zip(placeholders, INDICES, strict=False):
            node.target = name

    def example(self, capture: Any) -> Any:
        is_real = isinstance(capture, Tensor) and not _compat.is_fake(capture)
        return torch.empty_like(capture, device="meta") if is_real and not self.mode else capture

    def fake(self) -> Any:
        return self.mode or torch.no_grad()

    # Nodes

    def program(self) -> MaskProgram:
        left = next(filter(is_in_place, self.graph.nodes), None)
        if left is not None:
            reason = f"`{name_of(left.target)}` changes a value that is used again"
            return MaskProgram(unsupported(reason), self.all_names())
        for node in list(self.graph.nodes):
            if node not in self.values:
                self.values[node] = self.value(node)
        result = self.result
        if isinstance(result, (tuple, list)) and len(result) == 1:
            (result,) = result
        value = self.of(result)
        expr = self.mask_of(value)
        if expr.reasons:
            text = None
            if value.node is not None and self.is_mask(value):
                text = self.text_of("mask", value.node)
            return MaskProgram(expr, self.all_names(), text or "")
        return self.with_text(expr, value)

    def functional(self) -> Graph | None:
        """The graph of ATen's operators, which write to nothing, that computes the same for all values of captured ints
        and for all symbolic sizes; None where there is none."""
        graph, captures = self.original
        result = result_of(graph)
        return functional(graph, result, captures) if isinstance(result, Node) else None

    def is_mask(self, value: _Value) -> bool:
        """True if a value that expressions cannot say is a truth value, or an integer, which is true where it is not 0,
        the same in each run."""
        is_truth = isinstance(value.example, Tensor) and may_be_truth(value.example)
        needed = [node for node in self.graph.nodes if node.op != "placeholder"]
        is_sure = not any(is_random(name_of(node.target)) for node in needed)
        return is_truth and not value.example.shape and is_sure

    def of(self, argument: Any) -> _Value:
        return self.values[argument] if isinstance(argument, Node) else _Value(None, argument)

    def mask_of(self, value: _Value) -> Expr:
        if isinstance(value.example, Tensor) and not may_be_truth(value.example):
            return unsupported(f"a mask must be a truth value, got one of {value.example.dtype}")
        try:
            operand = self.operand(value)
        except ExprError as error:
            return unsupported(f"the mask_mod returns something else than a truth value: {error}")
        if not isinstance(operand, MaskOperand):
            return unsupported(
                f"the mask_mod returns something else than a truth value: `{operand!r}`"
            )
        if operand.expr.reasons:
            return operand.expr
        is_truth = (
            operand.expr.kind == "bool" if operand.dtype is None else operand.dtype == torch.bool
        )
        if operand.shape:
            return unsupported(
                f"the mask_mod returns `{operand.expr}` of shape {list(operand.shape)}"
            )
        if not is_truth:
            return unsupported(f"a mask must be a truth value, got the integer `{operand.expr}`")
        return operand.expr

    def value(self, node: Node) -> _Value:
        """Understands a node, of whose arguments all are understood."""
        arguments: list[_Value] = [self.values[argument] for argument in node.all_input_nodes]
        variables = frozenset().union(*(value.variables for value in arguments))
        if node.op not in ("call_function", "call_method"):
            return self.refused(
                node, None, variables, f"`{node.op} {node.target}` in the graph of the mask_mod"
            )
        name = name_of(node.target)
        if is_random(name):
            return self.refused(node, None, variables, f"`{name}` is random")
        tensors = [value.example for value in arguments if isinstance(value.example, Tensor)]
        if name in _CLAMPS and len({x.dtype for x in tensors}) > 1:
            reason = f"`{name}` of tensors of several dtypes, whose result PyTorch has in one or in another"
            return self.refused(node, None, variables, reason)
        examples = torch.fx.map_arg(
            (node.args, node.kwargs), lambda argument: self.values[argument].example
        )
        try:
            with self.fake():
                example = run(node, *examples)
                if self.mode is None and isinstance(example, Tensor) and not example.is_meta:
                    example = torch.empty_like(example, device="meta")  # made inside the mask_mod
        except Exception as error:
            reason = f"`{name}` cannot be followed: {first_line(error)}"
            return self.refused(node, None, variables, reason, arguments)
        if isinstance(example, (bool, int)) and self.is_constant(arguments):
            return _Value(node, example, variables, const(example))
        try:
            expr = self.expression(name, node, example)
        except ExprError as error:
            return self.refused(node, example, variables, str(error), arguments, error)
        return _Value(node, example, variables, expr, expr.reasons)

    def refused(
        self,
        node: Node,
        example: Any,
        variables: frozenset[str],
        reason: str,
        arguments: Sequence[_Value] = (),
        error: ExprError | None = None,
    ) -> _Value:
        """A node that is no expression: left to columns, or unsupported."""
        reasons = tuple(
            r for argument in arguments if argument.expr is not None for r in argument.expr.reasons
        )
        value = _Value(node, example, variables, None, (reason,))
        if isinstance(error, Wraps) and not reasons:
            dtype = example.dtype
            is_wide = dtype == torch.int64 and any(n.op == "table" for n in error.expr.walk())
            mark = marked(error.expr, dtype)
            if mark is not None and (is_wide or not value.is_column):
                return _Value(node, example, variables, mark)
            hint = "; convert the captured tensor to torch.int32 before"
            value = _Value(node, example, variables, None, (reason + hint,))
        is_fit = example is not None and not reasons
        if is_fit and value.is_column:
            return value
        return _Value(
            node, example, variables, unsupported(*dict.fromkeys(reasons or value.reasons))
        )

    def expression(self, name: str, node: Node, example: Any) -> Expr:
        if isinstance(example, Tensor):
            typing = Typing(example.dtype, self.range_of)
        elif isinstance(example, (bool, int)):  # of Python numbers
            typing = Typing(torch.bool if isinstance(example, bool) else torch.int64, self.range_of)
        else:
            raise ExprError(f"`{name}` gives no tensor")
        arguments: Any = (node.args, node.kwargs)
        lookup: Any = self.values.__getitem__
        args, kwargs = torch.fx.map_arg(arguments, lookup)
        is_comparison = name in OPERATORS and OPERATORS[name].kind is Kind.COMPARISON
        if is_comparison and not kwargs and len(args) == 2:
            found = self.float_comparison(name, node, [self.of_any(arg) for arg in args])
            if found is not None:
                return found
        args, kwargs = self.operands(args), self.operands(kwargs)
        return call(name, args, kwargs, typing)

    def is_constant(self, arguments: Sequence[_Value]) -> bool:
        """True if a number that is computed from them is the same in every run."""
        return all(
            not self.has_dynamic_sizes
            if isinstance(argument.example, Tensor)
            else argument.expr is not None and argument.expr.op in ("int", "bool")
            for argument in arguments
        )

    def of_any(self, argument: Any) -> _Value:
        return argument if isinstance(argument, _Value) else _Value(None, argument)

    def operands(self, value: Any) -> Any:
        """Values and numbers as operands, inside any nesting."""
        if isinstance(value, _Value) or is_number(value):
            return self.operand(self.of_any(value))
        if isinstance(value, (tuple, list)):
            return tuple(self.operands(item) for item in value)
        if isinstance(value, dict):
            return {key: self.operands(item) for key, item in value.items()}
        return value

    def operand(self, value: _Value) -> Any:
        example = value.example.item() if is_numpy_scalar(value.example) else value.example
        if value.expr is not None:
            if isinstance(example, Tensor):
                return MaskOperand(value.expr, example.dtype, tuple(example.shape))
            return MaskOperand(value.expr, None)
        if value.node is None:
            return (
                MaskOperand(const(example), None) if isinstance(example, (bool, int)) else example
            )
        if isinstance(example, Tensor):
            if example.dim() and value.variables:
                raise ExprError(f"`{self.title(value.node)}` has shape {list(example.shape)}")
            if example.dtype != torch.bool and example.dtype not in INTEGERS:
                raise ExprError(
                    f"`{self.title(value.node)}` is {example.dtype}; masks are computed with integers"
                )
            return MaskOperand(self.column(value), example.dtype, tuple(example.shape))
        if isinstance(example, (bool, int)):
            return MaskOperand(self.column(value), None)
        return example

    def float_comparison(self, name: str, node: Node, sides: list[_Value]) -> Expr | None:
        """The comparison of a row's float and a key's: as one of integers that have the same order."""
        examples = [side.example for side in sides]
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in examples):
            return None
        if not all(isinstance(x, Tensor) and not x.dim() for x in examples):
            return None
        if not all(side.is_column for side in sides) or any(
            side.expr and side.expr.reasons for side in sides
        ):
            return None
        variables = frozenset().union(*(side.variables for side in sides))
        if variables <= _OF_ROW or variables <= _OF_KEY:
            return None  # one column
        dtype = torch.result_type(*examples)
        ends = _ENDS if name.startswith("g") else _ENDS[::-1]
        keys = []
        for side, nan in zip(sides, ends, strict=True):
            assert side.node is not None
            with self.graph.inserting_after(node):
                key = self.graph.call_function(sortable, (side.node, nan))
            with self.graph.inserting_before(key):
                cast = self.graph.call_method("to", (side.node, dtype))
            key.args = (cast, nan)
            with self.fake():
                example = torch.empty_like(side.example, dtype=torch.int64)
            self.values[cast] = _Value(cast, side.example, side.variables)
            value = self.values[key] = _Value(key, example, side.variables)
            keys.append(MaskOperand(self.column(value), torch.int64))
        return call(name, keys, {}, Typing(torch.bool, self.range_of))

    # Columns

    def column(self, value: _Value) -> Expr:
        """A table of the value for each row or key, looked up at its own."""
        node = value.node
        assert node is not None
        if node not in self.columns:
            text = self.text_of("column", node)
            if text is None:
                raise ExprError(
                    f"`{self.title(node)}` cannot be computed for all rows or keys at a time"
                )
            number = self.numbers.setdefault(text, len(self.tables) + len(self.numbers))
            self.columns[node] = number
            self.titles[number] = self.title(node)
        indices = [name for name in INDICES if name in value.variables]
        return table(self.columns[node], *map(var, indices))

    def text_of(self, name: str, node: Node) -> str | None:
        """A function that computes `node`, which has been tried; None where there is none."""
        try:
            text = function_text(name, node)
        except SourceError:
            return None
        devices = [tensor.device for tensor in self.tables if tensor.dim()]
        try:
            with self.fake():
                point = torch.zeros(2, dtype=torch.int64, device=devices[0] if devices else "cpu")
                named = names_of_captures(self.tables, self.symbols)
                at_points(functions(text)[name], dict.fromkeys(INDICES, point), named)
        except Exception:  # whatever an operation says of vmap
            self.has_failed = True
            return None
        return text

    def title(self, node: Node) -> str:
        """The description of a node for messages."""
        return title_of(node, dict(enumerate(self.names)))

    # Dtypes

    def range_of(self, number: int) -> tuple[int, int]:
        if number < len(self.tables):
            dtype = self.tables[number].dtype
        else:
            node = next(n for n, known in self.columns.items() if known == number)
            example = self.values[node].example
            dtype = example.dtype if isinstance(example, Tensor) else torch.int64
        if dtype == torch.bool:
            return 0, 1
        if dtype not in INTEGERS:
            return INT64
        return torch.iinfo(dtype).min, torch.iinfo(dtype).max

    # The program

    def all_names(self) -> tuple[str, ...]:
        if not self.names and not self.titles:
            return ()
        names = [self.names[i] if i < len(self.names) else f"t{i}" for i in range(len(self.tables))]
        return (*names, *self.titles.values())

    def with_text(self, expr: Expr, value: _Value) -> MaskProgram:
        """The program of `expr`, with the columns that it looks up, numbered in order, and the mask_mod's own text."""
        used = sorted(
            {n.args[0] for n in expr.walk() if n.op == "table" and n.args[0] >= len(self.tables)}
        )
        numbers = {old: len(self.tables) + new for new, old in enumerate(used)}
        nodes = {number: node for node, number in self.columns.items()}
        texts = [function_text(f"t{numbers[old]}", nodes[old]) for old in used]
        if value.node is not None:
            texts.append(self.text_of("mask", value.node) or "")
        self.titles = {numbers[old]: self.titles[old] for old in used}
        return MaskProgram(
            _renumbered(expr, numbers), self.all_names(), "\n".join(filter(None, texts))
        )


def _renumbered(expr: Expr, numbers: dict[int, int]) -> Expr:
    args: list[Any] = [
        _renumbered(arg, numbers) if isinstance(arg, Expr) else arg for arg in expr.args
    ]
    if expr.op == "table":
        args[0] = numbers.get(args[0], args[0])
    return Expr(expr.op, tuple(args))
