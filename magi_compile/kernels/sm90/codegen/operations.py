"""PyTorch's operators on the tensors of a pair of a query and a key: what each node of a graph is, in C++.

A writer of a source says what the leaves of its graph are (`tensor`, `scalar`) and how it divides (`divisor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile.kernels.sm90.codegen.lazy import Lazy, Number, once, pointwise_of
from magi_compile.kernels.sm90.codegen.pointwise import (
    COMPARISONS,
    CONVERSIONS,
    DIVISIONS,
    IN_RESULT,
    QUESTIONS,
    TRUTHS,
    UnknownOperation,
    cast,
    is_float,
    promoted,
)

# Attributes of results that no value depends on.
_IGNORED = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}


class Operations:
    """Pointwise operators, each as a `Lazy` of its operands."""

    def tensor(self, node: Node) -> Lazy:
        """The value of a node."""
        raise NotImplementedError

    def scalar(self, value: Any, dtype: torch.dtype) -> Number:
        """A number of Python, or a node that is one, in `dtype`."""
        raise NotImplementedError

    def divisor(self, argument: Any, dtype: torch.dtype) -> Lazy:
        """A divisor in `dtype`; of integers, one that is not zero."""
        raise NotImplementedError

    def cast(self, text: str, source: torch.dtype, target: torch.dtype) -> str:
        """A number of one dtype in another, in C++."""
        return cast(text, source, target)

    def converted(self, tensor: Lazy, dtype: torch.dtype) -> Lazy:
        if tensor.dtype == dtype:
            return tensor

        def at(place: Sequence[Number]) -> Number:
            inner = tensor.at(place)
            return Number(
                dtype, inner.variables, lambda body: self.cast(body.text(inner), inner.dtype, dtype)
            )

        return Lazy(dtype, tensor.shape, tensor.sizes, once(at))

    def pointwise(self, name: str, node: Node) -> Lazy:
        args: list[Any] = list(node.args)
        dtype = node.meta["val"].dtype
        known = _IGNORED | {"alpha"} if name in ("add", "sub") else _IGNORED
        if set(node.kwargs) - known and name not in ("clamp", "div"):
            raise UnknownOperation(f"`{name}` with {', '.join(map(str, node.kwargs))}")
        if name in CONVERSIONS:
            return self.converted(self.tensor(args[0]), dtype)
        if name == "where":
            return self.where(node, dtype)
        if name == "clamp":
            return self.clamp(node, dtype)
        if name == "pow":
            return self.power(node, dtype)
        if name == "div":
            mode = node.kwargs.get("rounding_mode")
            name = f"div_{mode}" if mode else name
            if name == "div":
                return self.combined(node, args, dtype, dtype, lambda x: f"({x[0]} / {x[1]})")
        if name in DIVISIONS:
            args[1] = self.divisor(args[1], dtype)
            return self.combined(node, args, dtype, dtype, DIVISIONS[name])
        if name in COMPARISONS:
            within = promoted(*map(self.kind, args))
            return self.combined(node, args, within, torch.bool, COMPARISONS[name])
        if name in TRUTHS:
            return self.combined(node, args, torch.bool, torch.bool, TRUTHS[name])
        if name in QUESTIONS:
            within = self.tensor(args[0]).dtype
            return self.combined(node, args, within, torch.bool, QUESTIONS[name])
        if name in ("floor", "ceil", "trunc", "round") and not is_float(dtype):
            return self.tensor(args[0])
        if "alpha" in node.kwargs:
            factors = (args[1], node.kwargs["alpha"])
            args[1] = self.combined(node, factors, dtype, dtype, IN_RESULT["mul"])
        if name in IN_RESULT and (name not in ("sqrt", "reciprocal") or is_float(dtype)):
            return self.combined(node, args, dtype, dtype, IN_RESULT[name])
        raise UnknownOperation(f"`{name}`")

    def kind(self, argument: Any) -> tuple[torch.dtype | type, int]:
        """The dtype of an argument and its number of dimensions."""
        if not isinstance(argument, Node):
            return type(argument), 0
        value = argument.meta["val"]
        return (value.dtype, value.dim()) if isinstance(value, Tensor) else (int, 0)

    def operand(self, argument: Any, within: torch.dtype) -> Lazy:
        """An argument in the dtype that is computed in."""
        if isinstance(argument, Node) and isinstance(argument.meta["val"], Tensor):
            argument = self.tensor(argument)
        if isinstance(argument, Lazy):
            return self.converted(argument, within)
        number = self.scalar(argument, within)
        return Lazy(within, (), (), lambda _: number)

    def combined(
        self,
        node: Node,
        args: Sequence[Any],
        within: torch.dtype,
        dtype: torch.dtype,
        make: Callable[[Sequence[str]], str],
    ) -> Lazy:
        """An operation on operands in the dtype `within`, which broadcast to the shape of `node`."""
        operands = [self.operand(argument, within) for argument in args]
        return pointwise_of(node.meta["val"].shape, operands, dtype, make)

    def where(self, node: Node, dtype: torch.dtype) -> Lazy:
        condition, *arms = node.args
        operands = [self.operand(condition, torch.bool), *(self.operand(x, dtype) for x in arms)]
        shape = node.meta["val"].shape
        return pointwise_of(shape, operands, dtype, lambda x: f"({x[0]} ? {x[1]} : {x[2]})")

    def clamp(self, node: Node, dtype: torch.dtype) -> Lazy:
        least, most = (
            node.args[i] if i < len(node.args) else node.kwargs.get(name)
            for i, name in ((1, "min"), (2, "max"))
        )
        found = self.operand(node.args[0], dtype)
        for limit, name in ((least, "clamp_min"), (most, "clamp_max")):
            if limit is not None:
                found = self.combined(node, (found, limit), dtype, dtype, IN_RESULT[name])
        return found

    def power(self, node: Node, dtype: torch.dtype) -> Lazy:
        args: Any = node.args
        base, exponent = args
        most = 3 if is_float(dtype) else 64
        if type(exponent) is not int or not 1 <= exponent <= most or dtype == torch.bool:
            raise UnknownOperation(f"`pow` with the exponent {exponent}")
        base = found = self.operand(base, dtype)
        for _ in range(exponent - 1):
            found = self.combined(node, (found, base), dtype, dtype, IN_RESULT["mul"])
        return found
