"""Names: of the indices that a function takes, and properties of PyTorch's operations that follow from their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from types import FunctionType
from typing import Any

from torch.fx import Graph, Node

INDICES = ("b", "h", "q", "kv")
# Of Python's operators between two operands.
SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "truediv": "/",
    "mod": "%",
    "pow": "**",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "and": "&",
    "or": "|",
    "xor": "^",
    "rshift": ">>",
    "lshift": "<<",
}


def name_of(target: Any) -> str:
    """One spelling for `operator.eq`, `Tensor.__eq__`, `torch.eq`, "eq" and `aten.eq.Scalar`."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.split(".")[0].strip("_")


def first_line(error: Exception) -> str:
    """The first line of the text of an error, or its repr where it has no text."""
    return str(error).splitlines()[0] if str(error) else repr(error)


def result_of(graph: Graph) -> Any:
    """The nodes that a graph returns, or the only one of them."""
    result: Any = graph.output_node().args[0]
    is_one = isinstance(result, (tuple, list)) and len(result) == 1
    return result[0] if is_one else result


def is_numpy_scalar(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0


def is_in_place(node: Node) -> bool:
    """True if it may write to what it is given."""
    is_call = node.op in ("call_function", "call_method")
    return is_call and writes(node.target, node.kwargs, node.args)


def writes(target: Any, kwargs: Mapping[str, Any], args: Sequence[Any] = ()) -> bool:
    """True if a call of `target`, a function or the name of a method, may write to what it is given."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    schema = getattr(target, "_schema", None)
    if (schema is not None and schema.is_mutable) or "out" in kwargs or kwargs.get("inplace"):
        return True
    place = _place_of_inplace(target) if isinstance(target, FunctionType) else None
    if place is not None and any(args[place : place + 1]):  # `F.relu(x, True)`
        return True
    if name.startswith("__") and name.endswith("__"):  # `Tensor.__iadd__`
        return name[2:-2] in _IN_PLACE
    is_named_so = name.endswith("_") and not name.endswith("__")
    return name in _IN_PLACE or (is_named_so and name not in ("and_", "or_", "not_"))


@lru_cache
def _place_of_inplace(function: FunctionType) -> int | None:
    """The place of the parameter `inplace` of a function of Python's; None without one."""
    names = list(signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


_IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    *("ilshift", "irshift", "setitem", "delitem"),
)


def is_random(name: str) -> bool:
    """True if the operation called `name` draws numbers."""
    return name.startswith(_RANDOM)


_RANDOM = (
    *("rand", "bernoulli", "dropout", "multinomial", "normal", "poisson", "exponential"),
    *("uniform", "geometric", "cauchy", "log_normal"),
)
