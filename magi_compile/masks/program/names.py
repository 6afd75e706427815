"""What the names of PyTorch's operations say about them."""

from __future__ import annotations

from typing import Any

from torch.fx import Node


def name_of(target: Any) -> str:
    """One spelling for `operator.eq`, `Tensor.__eq__`, `torch.eq`, "eq" and `aten.eq.Scalar`."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.split(".")[0].strip("_")


def is_in_place(node: Node) -> bool:
    """Whether it may write to what it is given."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    return is_in_place and name not in ("and_", "or_", "not_")


_IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    *("ilshift", "irshift", "setitem", "delitem"),
)


def is_random(name: str) -> bool:
    """Whether the operation called `name` draws numbers."""
    return name.startswith(_RANDOM)


_RANDOM = (
    *("rand", "bernoulli", "dropout", "multinomial", "normal", "poisson", "exponential"),
    *("uniform", "geometric", "cauchy", "log_normal"),
)
