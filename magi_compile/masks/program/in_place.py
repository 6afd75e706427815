"""Operations that write to what they are given, as ones that do not.

    x = q ^ kv;  x += 1;  (x > 3) & (q < x)      ->      x = q ^ kv;  y = (x + 1).type_as(x);  (y > 3) & (q < y)

What reads the value later reads the new one, so a node of a graph is one value. A mask_mod that writes to q itself changes no tensor
of ours.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from magi_compile.masks.program.names import is_in_place, name_of

# What may give memory of its first argument.
_VIEWS = frozenset(
    [
        *("to", "type", "type_as", "int", "long", "short", "char", "byte", "bool", "float", "double", "half"),
        *("bfloat16", "cpu", "cuda", "contiguous", "detach", "alias", "positive", "pos", "view", "view_as"),
        *("reshape", "reshape_as", "expand", "expand_as", "broadcast_to", "squeeze", "unsqueeze", "flatten"),
        *("ravel", "permute", "transpose", "swapaxes", "movedim", "t", "T", "getitem", "getattr", "select"),
        *("narrow", "diagonal", "unfold", "chunk", "split", "unbind", "as_strided", "data", "atleast_1d"),
    ]
)  # fmt: skip


def without_writes(graph: Graph, result: Any, indices: Collection[Node]) -> Any:
    """Rewrites `graph` where nothing but the value itself shares its memory with what else is read; leaves the rest as it is.

    Args:
        graph: of a mask_mod, without an output.
        result: what it returns, nodes of `graph` inside any nesting.
        indices: its placeholders of b, h, q and kv: others are not written to.

    Returns:
        What `result` is then.
    """
    output = graph.output(result)
    for node in list(graph.nodes):
        target = _pure(node) if is_in_place(node) and node.args else None
        value = node.args[0] if target is not None else None
        if not isinstance(value, Node):
            continue
        shared = _sharing(value)
        inputs = {x for x in shared if x.op in ("placeholder", "get_attr")}
        others = {user for x in shared - {value} for user in x.users} - shared - {node}
        if others or not inputs <= set(indices):
            continue
        node.target = target
        with graph.inserting_after(node):
            new = graph.call_method("type_as", (node, value))
        new.meta["is_written"] = True
        behind = _behind(new)
        node.replace_all_uses_with(new, delete_user_cb=behind.__contains__)
        value.replace_all_uses_with(new, delete_user_cb=behind.__contains__)
    result = output.args[0]
    graph.erase_node(output)
    return result


def _pure(node: Node) -> Any:
    """What computes the same as an operation that writes, and does not write; None where there is no such thing."""
    if "out" in node.kwargs:
        return None
    if isinstance(node.target, OpOverload):
        name = node.target._schema.name.removeprefix("aten::").removesuffix("_")
        return getattr(getattr(torch.ops.aten, name, None), node.target._overloadname, None)
    if isinstance(node.target, str):
        name = node.target.removesuffix("_")
        return name if hasattr(torch.Tensor, name) else None
    name = getattr(node.target, "__name__", "")
    if name in _OPERATORS:
        return _OPERATORS[name]
    return getattr(torch, name.removesuffix("_"), None) if name.endswith("_") else None


_OPERATORS: dict[str, Callable[..., Any]] = {
    "iadd": operator.add,
    "isub": operator.sub,
    "imul": operator.mul,
    "itruediv": operator.truediv,
    "ifloordiv": operator.floordiv,
    "imod": operator.mod,
    "ipow": operator.pow,
    "iand": operator.and_,
    "ior": operator.or_,
    "ixor": operator.xor,
    "ilshift": operator.lshift,
    "irshift": operator.rshift,
}


def _sharing(value: Node) -> set[Node]:
    """The nodes that may share memory with `value`, itself among them."""
    found, waiting = set(), [value]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if _is_view(node) and isinstance(node.args[0], Node):
            waiting.append(node.args[0])
        waiting += [user for user in node.users if _is_view(user) and user.args[0] is node]
    return found


def _is_view(node: Node) -> bool:
    name = name_of(node.target)
    if node.op not in ("call_function", "call_method") or name not in _VIEWS or not node.args:
        return False
    return name != "getitem" or len(node.all_input_nodes) == 1  # a look-up by a tensor copies


def _behind(node: Node) -> set[Node]:
    """The nodes behind `node`."""
    found, node = set(), node.next
    while node.op != "root":
        found.add(node)
        node = node.next
    return found
