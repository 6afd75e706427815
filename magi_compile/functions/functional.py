"""A mask_mod's graph as compiled FlexAttention has it: of ATen's operators, none of which writes to what it is given.

    x = table[q];  y = x.view(());  x += 1;  y > kv      ->      index(table, [q]) + 1 > kv

PyTorch's own functionalization knows which values share memory. What is left of NumPy in a graph of Dynamo's becomes
ATen's as well.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from magi_compile import _compat
from magi_compile.functions.names import INDICES, is_in_place, is_random, name_of
from magi_compile.functions.text import in_ops, run

MAX_CONSTANT = 1024  # numbers in a tensor of the mask_mod's own: they stand in its text


def functional(graph: Graph, result: Any, captures: Sequence[Any]) -> Graph | None:
    """A graph that computes the same, with the same placeholders: b, h, q, kv, then the captured values, tensors of
    static sizes, real or fake, and ints. None where there is none for all values of the captured ints, or where it
    writes to a captured tensor or draws random numbers. `result` is the node that the graph returns."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if any(node.op == "get_attr" or is_random(name_of(node.target)) for node in graph.nodes):
        return None
    has_writes = any(map(is_in_place, graph.nodes))
    captured = placeholders[len(INDICES) :]
    is_tensor = [isinstance(x, Tensor) for x in captures]
    tensors = [x for x in captures if isinstance(x, Tensor)]
    given = [
        *placeholders[: len(INDICES)],
        *(node for node, kind in zip(captured, is_tensor, strict=True) if kind),
        *(node for node, kind in zip(captured, is_tensor, strict=True) if not kind),
    ]

    def compute(*values: Any) -> Any:
        known = dict(zip(given, values, strict=True))
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = _run(node, args, kwargs)
                # FlexAttention looks up `x[0]` as a value of its own, which does not see what is written to x later.
                if has_writes and isinstance(known[node], Tensor) and _has_number_as_index(node):
                    known[node] = known[node].clone()
        return known[result]

    devices = [x.device for x in tensors if x.dim()]
    points = (len(INDICES), devices[0] if devices else torch.device("cpu"))
    count = len(captures) - len(tensors)
    try:
        with in_ops():
            module = _compat.graph_of(compute, tensors, count, points, functional=True)
    except Exception:  # whatever an operation says of its arguments: reasons name the user's own
        return None
    found = [node for node in module.graph.nodes if node.op == "placeholder"]
    order = [found[given.index(node)] for node in placeholders]
    return _tidy(module, order)


def _has_number_as_index(node: Node) -> bool:
    """True if it is `x[0]`, or has a number among its indices."""
    if name_of(node.target) != "getitem" or len(node.args) != 2:
        return False
    index = node.args[1]
    return any(isinstance(x, int) for x in (index if isinstance(index, tuple) else (index,)))


def _run(node: Node, args: Any, kwargs: Any) -> Any:
    """Computes a node; functionalization has no rule for writes by Python's `&=` and its like."""
    method = _BITWISE.get(node.target)
    if method is not None and isinstance(args[0], Tensor):
        return getattr(args[0], method)(*args[1:])
    return run(node, args, kwargs)


_BITWISE: dict[Any, str] = {
    function: method
    for functions, method in (
        ((operator.iand, "__iand__"), "bitwise_and_"),
        ((operator.ior, "__ior__"), "bitwise_or_"),
        ((operator.ixor, "__ixor__"), "bitwise_xor_"),
        ((operator.ilshift, "__ilshift__"), "bitwise_left_shift_"),
        ((operator.irshift, "__irshift__"), "bitwise_right_shift_"),
    )
    for function in functions
}


def _tidy(module: torch.fx.GraphModule, placeholders: Sequence[Node]) -> Graph | None:
    """The graph with these placeholders in this order, without what it writes to indices at its end, and with its
    constants as calls; None where it writes to anything else, or makes a large tensor of numbers."""
    graph = Graph()
    copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in placeholders}
    indices = set(placeholders[: len(INDICES)])
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if not isinstance(value, Tensor) or value.numel() > MAX_CONSTANT or value.is_complex():
                return None
            kwargs: Any = {"dtype": value.dtype, "device": value.device}
            with _compat.without_fake_tensors():
                numbers = value.tolist()
            copies[node] = graph.call_function(torch.tensor, (numbers,), kwargs)
        elif node.op == "call_function" and is_in_place(node):
            # What a mask_mod writes to b, h, q or kv is what later nodes read, and changes no tensor of ours.
            if name_of(node.target) != "copy" or node.args[0] not in indices or node.users:
                return None
        elif node.op == "call_function" and node.target is torch.ops.aten.lift_fresh_copy.default:
            copies[node] = copies[node.args[0]]  # type: ignore[index]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.eliminate_dead_code()
    return graph
