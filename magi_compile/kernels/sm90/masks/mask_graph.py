"""A mask_mod as a graph of PyTorch's operators, in two parts: what is the same for all pairs of a query and a key,
which PyTorch computes in front of the kernel, and what differs between them.

    documents.cumsum(0)[kv - 2 * s0] > q      ->      constants: documents.cumsum(0), 2 * s0
                                                      of pairs:  gt(index(_, [sub(kv, _)]), q)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from magi_compile import _compat
from magi_compile.functions.names import INDICES
from magi_compile.functions.text import in_ops, parameters
from magi_compile.kernels.sm90.codegen.pointwise import UnknownOperation

Values = dict[Node, Any]


class MaskGraph(NamedTuple):
    """The graph of a mask_mod.

    Attributes:
        module: the graph, with the tensors that it makes by itself.
        result: the node of the mask.
        indices: which of b, h, q and kv a node is.
        tables: which captured tensor a node is.
        symbols: which captured int a node is.
        constants: nodes that are the same for all pairs and no captured tensors, of which others are made.
    """

    module: GraphModule
    result: Node
    indices: dict[Node, str]
    tables: dict[Node, int]
    symbols: dict[Node, int]
    constants: list[Node]

    def computing(
        self, nodes: Sequence[Node]
    ) -> Callable[[Sequence[Tensor], Sequence[int]], Values]:
        """A function of the captured tensors and ints that gives the values of some constants and captured tensors."""
        captured, computed = (
            (*self.tables, *self.symbols),
            [x for x in nodes if x in self.constants],
        )
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in captured}
        needed, waiting = set(), list(computed)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in self.module.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in computed))
        compiled = GraphModule(self.module, graph)

        def compute(tables: Sequence[Tensor], numbers: Sequence[int]) -> Values:
            found: Values = {node: tables[number] for node, number in self.tables.items()}
            if computed:
                symbols = [numbers[number] for number in self.symbols.values()]
                with torch.no_grad():
                    values = compiled(*found.values(), *symbols)
                found.update(zip(computed, values, strict=True))
            return found

        return compute


def mask_graph(
    function: Callable[..., Any],
    tables: Sequence[Tensor],
    device: torch.device,
) -> MaskGraph:
    """The graph of the function `mask` of a mask program, for captured tensors of these shapes and dtypes.

    Args:
        function: of some of b, h, q, kv, t0, t1, ... and s0, s1, ..., which are ints of any value.
        tables: the captured tensors; their values are not looked at.
        device: where the mask is evaluated.

    Returns:
        The graph, and the nodes of its inputs.

    Raises:
        UnknownOperation: there is none for all values of the captured ints, or its result is no tensor.
    """
    names = parameters(function)
    captures = [name for name in names if name not in INDICES]
    of_tables = [int(name[1:]) for name in captures if name[0] == "t"]
    order = [*INDICES, *(f"t{i}" for i in of_tables), *(n for n in captures if n[0] == "s")]

    def mask(*values: Any) -> Any:
        given = dict(zip(order, values, strict=True))
        return function(*(given[name] for name in names))

    num_ints = len(order) - len(INDICES) - len(of_tables)
    try:
        with in_ops():
            module = _compat.graph_of(
                mask, [tables[i] for i in of_tables], num_ints, (len(INDICES), device)
            )
    except (
        Exception
    ) as error:  # whatever an operation says of its arguments: tensor operations will say it again
        first_line = str(error).strip().partition("\n")[0]
        raise UnknownOperation(f"a graph: {type(error).__name__}: {first_line}") from error
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    result = nodes[-1].args[0]
    if not isinstance(result, Node) or not isinstance(result.meta.get("val"), Tensor):
        raise UnknownOperation(f"the result {result!r}")
    indices = dict(zip(placeholders, INDICES, strict=False))
    captured = placeholders[len(INDICES) :]
    moving = set(indices)
    for node in nodes:
        if any(x in moving for x in node.all_input_nodes):
            moving.add(node)
    of_symbols = [int(name[1:]) for name in captures if name[0] == "s"]
    found = dict(zip(captured, of_tables, strict=False))
    symbols = dict(zip(captured[len(of_tables) :], of_symbols, strict=True))
    constants = [
        node
        for node in nodes[:-1]
        if node not in moving
        and node not in found
        and (node is result or any(user in moving for user in node.users))
    ]
    return MaskGraph(module, result, indices, found, symbols, constants)
