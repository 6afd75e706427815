"""From a score_mod to a ScoreProgram: from the graph that Dynamo made of it, or from calling it once with symbols.

What is computed of captured tensors alone stays outside: the program takes it as a tensor of its own, and PyTorch has
its gradient. All else must be numbers for each pair of a query and a key (`derive.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from magi_compile import _compat
from magi_compile.functions.names import (
    INDICES,
    first_line,
    is_in_place,
    is_random,
    name_of,
    result_of,
)
from magi_compile.functions.record import UnreadableError, record
from magi_compile.functions.text import needed_for, run, title_of
from magi_compile.score.derive import derive, refuse
from magi_compile.score.program import ScoreProgram, UnsupportedScoreModError

ARGUMENTS = ("score", *INDICES)
MAX_TITLE = 300  # characters
_MOST_KEPT = 256


class ScoreRead(NamedTuple):
    """A score_mod that was read.

    Attributes:
        program: what it computes.
        tables: what gives its tensors, in the order of their numbers: nodes of the graph that was read.
        symbols: the same of its ints.
        dtypes: of the tensors.
        ranks: how many dimensions these have.
    """

    program: ScoreProgram
    tables: list[Node]
    symbols: list[Node]
    dtypes: list[torch.dtype]
    ranks: list[int]


class _Found(NamedTuple):
    """The same, with the numbers of captured values and nodes in place of nodes."""

    program: ScoreProgram
    tables: list[int]
    symbols: list[int]
    dtypes: list[torch.dtype]
    ranks: list[int]


_known: OrderedDict[Any, _Found] = OrderedDict()  # by what they were made of


class TracedScore(NamedTuple):
    """A score_mod that was called with symbols: its program, and the tensors that this takes."""

    program: ScoreProgram
    tables: list[Tensor]


def trace_score_program(score_mod: Callable[..., Any], device: torch.device) -> TracedScore:
    """Calls `score_mod(score, b, h, q_idx, kv_idx)` once, with symbols that stand for tensors on `device`: the program
    and its tensors. Raises UnsupportedScoreModError where it is no pointwise function; the message says what it does.
    """
    arguments = {
        name: torch.empty((), dtype=dtype, device="meta") for name, dtype in _dtypes().items()
    }
    try:
        recording = record(score_mod, arguments, device, "score_mod")
    except UnreadableError as error:
        raise UnsupportedScoreModError(f"score_mod cannot be read: {error}") from error
    names = [name or f"t{i}" for i, name in enumerate(recording.names)]
    read = read_score_graph(recording.graph, recording.captures, names, device)
    return TracedScore(read.program, [recording.values[node] for node in read.tables])


def _dtypes() -> dict[str, torch.dtype]:
    return {"score": torch.float32, **dict.fromkeys(INDICES, torch.int32)}


def read_score_graph(
    graph: GraphModule | Graph, captures: Sequence[Any], names: Sequence[str], device: torch.device
) -> ScoreRead:
    """Reads the graph of a score_mod, whose placeholders are score, b, h, q_idx, kv_idx, then the captured values
    `captures`: tensors (real or fake) and ints. `names` are the user's of the captured tensors, `device` is that of
    the attention. Raises UnsupportedScoreModError where it is no pointwise function; the message says what it does."""
    graph = graph.graph if isinstance(graph, GraphModule) else graph
    return _Reader(graph, captures, names, device).read()


class _Reader:
    def __init__(
        self, graph: Graph, captures: Sequence[Any], names: Sequence[str], device: torch.device
    ):
        self.device = device
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.arguments = self.placeholders[: len(ARGUMENTS)]
        captured = self.placeholders[len(ARGUMENTS) :]
        if len(captured) != len(captures):
            raise ValueError(
                f"`captures` must have {len(captured)} entries, one for each captured value, got {len(captures)}"
            )
        self.result = result_of(graph)
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.captured = dict(zip(captured, captures, strict=True))
        tensors = [node for node in captured if isinstance(self.captured[node], Tensor)]
        self.user_names = dict(zip(tensors, names, strict=False))

    def read(self) -> ScoreRead:
        if not isinstance(self.result, Node):
            refuse(f"it returns {type(self.result).__name__}, not a score")
        needed = needed_for(self.result)
        nodes = [node for node in self.nodes if node in needed]
        for node in self.nodes:  # also those whose result nobody reads
            if is_in_place(node):
                refuse(f"`{name_of(node.target)}` changes a value in place")
        for node in nodes:
            if node.op not in ("call_function", "call_method"):
                refuse(f"`{node.op} {node.target}` in its graph")
            if is_random(name_of(node.target)):
                refuse(f"`{name_of(node.target)}` is random")
        key = self._key(nodes)
        if key not in _known:
            _known[key] = self._found(nodes)
            if len(_known) > _MOST_KEPT:
                _known.popitem(last=False)
        program, tables, symbols, dtypes, ranks = _known[key]
        given = [*self.captured, *nodes]
        of_tables, of_symbols = ([given[i] for i in numbers] for numbers in (tables, symbols))
        return ScoreRead(program, of_tables, of_symbols, dtypes, ranks)

    def _key(self, nodes: list[Node]) -> Any:
        """The key of a program: all its inputs."""
        values = (
            (x.dtype, tuple(map(str, x.shape))) if isinstance(x, Tensor) else type(x)
            for x in self.captured.values()
        )
        lines = "\n".join(f"{node.format_node()}" for node in (*self.placeholders, *nodes))
        return (lines, str(self.result), *self.user_names.values(), *values, str(self.device))

    def _found(self, nodes: list[Node]) -> _Found:
        with _compat.outside_of_modes(), _compat.without_fake_tensors():
            mode = _compat.symbolic_fake_mode()
            examples = self._examples(nodes, mode)
            tables, symbols = self._split(nodes, examples)
            body = self._body(nodes, tables, symbols)
            given = [examples[node] for node in (*self.arguments, *tables)]
            program = ScoreProgram(
                self._title(nodes, symbols), derive(body, given, len(symbols), mode)
            )
        order = [*self.captured, *nodes]
        return _Found(
            program,
            [order.index(x) for x in tables],
            [order.index(x) for x in symbols],
            [examples[x].dtype for x in tables],
            [examples[x].dim() for x in tables],
        )

    def _examples(self, nodes: list[Node], mode: Any) -> dict[Node, Any]:
        """A tensor without values for each node, with the sizes that are at hand."""
        examples: dict[Node, Any] = {}
        with mode:
            for node, dtype in zip(self.arguments, _dtypes().values(), strict=True):
                examples[node] = torch.empty((), dtype=dtype, device=self.device)
        for node, value in self.captured.items():
            if isinstance(value, (float, torch.SymFloat)):
                refuse("it captures a float whose value is not known; make it a tensor")
            examples[node] = _compat.without_symbols(value, mode)
        for node in nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), examples.__getitem__)
            try:
                with mode:
                    examples[node] = run(node, args, kwargs)
            except Exception as error:
                refuse(f"`{name_of(node.target)}` cannot be followed: {first_line(error)}")
        return examples

    def _split(self, nodes: list[Node], examples: dict[Node, Any]) -> tuple[list[Node], list[Node]]:
        """The tensors and ints that the program takes: captured, or computed of nothing else."""
        moving = set(self.arguments)
        for node in nodes:
            if any(x in moving for x in node.all_input_nodes):
                moving.add(node)
        if self.result not in moving:
            refuse("it returns the same for all scores and positions")
        taken: dict[Node, None] = {}
        numbers = set()  # computed of captured ints: the program does it itself
        for node in (*self.captured, *nodes):
            if node not in moving and not isinstance(examples[node], Tensor):
                numbers.add(node)
                inputs = node.all_input_nodes
                if any(isinstance(examples[x], Tensor) for x in inputs):
                    refuse(f"`{name_of(node.target)}` needs the value of a captured tensor")
        for node in nodes:
            if node in moving or node in numbers:
                taken.update((x, None) for x in node.all_input_nodes if x not in moving)
        tables = [x for x in taken if isinstance(examples[x], Tensor)]
        symbols = [x for x in taken if x in self.captured and x not in tables]
        for x in symbols:
            if isinstance(examples[x], bool) or not isinstance(examples[x], int):
                refuse(f"it captures {type(examples[x]).__name__}, neither a tensor nor an int")
        return tables, symbols

    def _body(self, nodes: list[Node], tables: list[Node], symbols: list[Node]) -> GraphModule:
        """The rest of the graph: a function of the arguments, the tensors and the ints."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node, name in self._names(tables, symbols).items():
            copies[node] = graph.placeholder(name)
        for node in nodes:
            if node not in copies and all(x in copies for x in node.all_input_nodes):
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].name = f"x{len(copies)}"
        graph.output(copies[self.result])
        return GraphModule({}, graph)

    def _names(self, tables: list[Node], symbols: list[Node]) -> dict[Node, str]:
        return {
            **dict(zip(self.arguments, ARGUMENTS, strict=True)),
            **{node: f"t{i}" for i, node in enumerate(tables)},
            **{node: f"s{i}" for i, node in enumerate(symbols)},
        }

    def _title(self, nodes: list[Node], symbols: list[Node]) -> str:
        """The score_mod as an expression; what it uses several times has a name of its own."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        parts: list[str] = []
        for node, name in zip(self.arguments, ARGUMENTS, strict=True):
            copies[node] = graph.create_node("placeholder", name, name=name)
        for i, node in enumerate(self.captured):
            name = self.user_names.get(node) or (
                f"s{symbols.index(node)}" if node in symbols else f"c{i}"
            )
            copies[node] = graph.create_node("placeholder", name, name=name)
            copies[node].name = name  # as it is, not as Python wants it
        uses = Counter(x for node in nodes for x in _arguments(node))
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node is not self.result and uses[node] > 1:
                title = title_of(copies[node], {})
                copies[node] = graph.placeholder(f"x{len(parts) + 1}")
                parts.append(f"{copies[node].name} = {title}")
        title = title_of(copies[self.result], {})
        if title.startswith("("):  # an operator's
            title = title[1:-1]
        title = f"{title} with {', '.join(parts)}" if parts else title
        return title if len(title) <= MAX_TITLE else f"{title[:MAX_TITLE]} ..."


def _arguments(node: Node) -> list[Node]:
    """Each as often as it is one."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found
