"""A mask_mod as a graph of PyTorch's operators, in two parts: what is the same for all pairs of a query and a key, which PyTorch
computes in front of the kernel, and what differs between them.

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
from magi_compile.kernels.sm90.masks.pointwise import UnknownOperation
from magi_compile.masks.program.source import INDICES, in_ops, parameters


class MaskGraph(NamedTuple):
    """The graph of a mask_mod.

    Attributes:
        result: the node of the mask.
        indices: which of b, h, q and kv a node is.
        tables: which captured tensor a node is.
        constants: nodes that are the same for all pairs and no captured tensors, of which others are made.
        compute: gives their values, from the captured tensors and ints.
    """

    result: Node
    indices: dict[Node, str]
    tables: dict[Node, int]
    constants: list[Node]
    compute: Callable[..., Sequence[Any]]

    def is_constant(self, node: Node) -> bool:
        return node in self.tables or node in self.constants


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
    found = dict(zip(captured, of_tables, strict=False))
    constants = [
        node
        for node in nodes[:-1]
        if node not in moving
        and node not in found
        and (node is result or any(user in moving for user in node.users))
    ]
    compute = _constants_of(module, captured, captures, of_tables, constants)
    return MaskGraph(result, indices, found, constants, compute)


def _constants_of(
    module: GraphModule,
    captured: Sequence[Node],
    names: Sequence[str],
    of_tables: Sequence[int],
    constants: Sequence[Node],
) -> Callable[..., Sequence[Any]]:
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in captured}
    needed, waiting = set(), list(constants)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in constants))
    compiled = GraphModule(module, graph)
    symbols = [int(name[1:]) for name in names if name[0] == "s"]

    def compute(tables: Sequence[Tensor], numbers: Sequence[int]) -> Sequence[Any]:
        if not constants:
            return ()
        given = [tables[i] for i in of_tables]
        with torch.no_grad():
            return compiled(*given, *(numbers[i] for i in symbols))

    return compute
