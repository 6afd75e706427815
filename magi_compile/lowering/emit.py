"""Adding nodes to a graph of Dynamo or of torch.export, each with the fake value that later passes expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from magi_compile import _compat


def value_of(node: Any) -> Any:
    """The fake value of a node (a fake tensor, a SymInt, a tuple of them); anything else is its own value."""
    if not isinstance(node, Node):
        return node
    return node.meta[value_key(node)]


def value_key(node: Node) -> str:
    """The key of fake values in the graph of `node`: Dynamo's has "example_value", torch.export's "val"."""
    return "example_value" if "example_value" in node.meta else "val"


class Emitter:
    """Inserts calls before one node of a graph."""

    def __init__(self, graph: torch.fx.Graph, before: Node):
        self.graph = graph
        self.before = before
        self.value_key = value_key(before)
        self.fake_mode = _compat.fake_mode_of(value_of(before.args[0]))

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Inserts `target(*args, **kwargs)` and computes its fake value from theirs."""
        values = torch.fx.map_arg(args, value_of)
        keyword_values = torch.fx.map_arg(kwargs, value_of)
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        with self.fake_mode:
            node.meta[self.value_key] = target(*values, **keyword_values)
        return node

    def erase_unused(self, node: Node, source: Node) -> None:
        """Takes out `node`, and what it is made of, as far as `source`, where nothing reads it."""
        while node is not source and not node.users:
            (before,) = node.all_input_nodes[:1]
            self.graph.erase_node(node)
            node = before

    def size(self, tensor: Node, dim: int) -> Node | int:
        """The size of `tensor` along `dim`: an int where it is static, else a node."""
        size = value_of(tensor).shape[dim]
        return (
            size if isinstance(size, int) else self.call(torch.ops.aten.sym_size.int, tensor, dim)
        )

    def arithmetic(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` on ints, evaluated now, or as a node where one of them is a node."""
        if any(isinstance(arg, Node) for arg in args):
            return self.call(function, *args)
        return function(*args)
