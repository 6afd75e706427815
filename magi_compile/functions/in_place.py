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

from magi_compile.functions.names import is_in_place, name_of

# What gives memory of its own, whatever it is given. All else may give memory of an argument.
_FRESH = frozenset(
    [
        *("add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "true_divide", "floordiv", "floor_divide"),
        *("mod", "remainder", "fmod", "pow", "neg", "abs", "sign", "square", "minimum", "maximum"),
        *("eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "not_equal"),
        *("and", "rand", "or", "ror", "xor", "rxor", "invert", "not", "lshift", "rshift"),
        *("logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor"),
        *("bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "where"),
    ]
)  # fmt: skip


def without_writes(graph: Graph, result: Any, indices: Collection[Node]) -> Any:
    """Rewrites `graph` where only operations with memory of their own read what is written to; leaves the rest as it is.

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
        if not (value in indices or _is_own(value)) or not all(
            _only_reads(user, value) for user in value.users
        ):
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
    """The operation that computes the same as one that writes, without writing; None where there is none."""
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


def _is_fresh(node: Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    return is_call and name_of(node.target) in _FRESH and not is_in_place(node)


def _is_own(node: Node) -> bool:
    """True if nothing else holds the memory of what `node` gives."""
    if _is_fresh(node) or "is_written" in node.meta:
        return True
    # The same memory, where the dtype stays.
    is_conversion = node.op == "call_method" and node.target in _CONVERSIONS
    source = node.args[0] if is_conversion else None
    return isinstance(source, Node) and len(source.users) == 1 and _is_own(source)


_CONVERSIONS = ("to", "bool", "int", "long", "float", "double")


def _only_reads(user: Node, value: Node) -> bool:
    """True if nothing of `value` is left in what `user` gives, unless it writes to it, too."""
    if user.op == "output" or _is_fresh(user) or (is_in_place(user) and user.args[:1] == (value,)):
        return True
    name = name_of(user.target)
    return (name == "getitem" and user.args[0] is not value) or _is_type_of(user, value)


def _is_type_of(user: Node, value: Node) -> bool:
    """True if `value` only says to which dtype `user` converts."""
    return "is_written" in user.meta and user.args[0] is not value


def _behind(node: Node) -> set[Node]:
    """The nodes behind `node`."""
    found, node = set(), node.next
    while node.op != "root":
        found.add(node)
        node = node.next
    return found
