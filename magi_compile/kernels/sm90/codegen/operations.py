"""PyTorch's operators on the tensors of a pair of a query and a key: what each node of a graph is, in C++.

A writer of a source says what the leaves of its graph are (`tensor`, `scalar`) and how it divides (`divisor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile.functions.operators import OPERATORS, Kind, num_operands
from magi_compile.kernels.sm90.codegen.lazy import Lazy, Number, once, pointwise_of
from magi_compile.kernels.sm90.codegen.pointwise import (
    UnknownOperation,
    cast,
    is_float,
    promoted,
)

MUL = OPERATORS["mul"].cuda
# Attributes of results that no value depends on.
_IGNORED = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}


def filled(name: str, node: Node) -> Any:
    """The number that stands in a call which makes a tensor of one; None in others."""
    rule, _, place = OPERATORS[name].cuda.partition(" ") if name in OPERATORS else ("", "", "")
    if rule == "argument":
        return node.args[int(place)]
    return int(place) if rule == "number" else None


class Operations:
    """Pointwise operators, each as a `Lazy` of its operands, as the table of operators spells them.

    Attributes:
        is_approximate: whether functions of floats may differ from PyTorch's by rounding.
    """

    is_approximate = False

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
        operator = OPERATORS.get(name)
        if operator is None or not operator.cuda:
            raise UnknownOperation(f"`{name}`")
        if operator.kind is Kind.RULE:
            return getattr(self, operator.cuda.partition(" ")[0])(node, dtype)
        if "alpha" in node.kwargs:
            args[1] = self.combined(node, (args[1], node.kwargs["alpha"]), dtype, dtype, MUL)
        return self.spelled(name, node, args, dtype)

    def spelled(self, name: str, node: Node, args: list[Any], dtype: torch.dtype) -> Lazy:
        """An operator that its spelling says all of."""
        _, kind, _, spelling, _ = OPERATORS[name]
        if kind is Kind.ROUNDING and not is_float(dtype):
            return self.tensor(args[0])
        is_there = is_float(dtype) if kind in (Kind.ROOT, Kind.FLOAT) else True
        if kind is Kind.FLOAT and not self.is_approximate:
            is_there = False
        if not is_there or len(args) != num_operands(spelling):
            raise UnknownOperation(f"`{name}`")
        if kind is Kind.COMPARISON:
            return self.combined(node, args, promoted(*map(self.kind, args)), torch.bool, spelling)
        if kind is Kind.TRUTH:
            return self.combined(node, args, torch.bool, torch.bool, spelling)
        if kind is Kind.QUESTION:
            return self.combined(node, args, self.tensor(args[0]).dtype, torch.bool, spelling)
        if kind is Kind.DIVISION:
            args[1] = self.divisor(args[1], dtype)
        return self.combined(node, args, dtype, dtype, spelling)

    def convert(self, node: Node, dtype: torch.dtype) -> Lazy:
        return self.converted(self.tensor(node.args[0]), dtype)  # type: ignore[arg-type]

    def divide(self, node: Node, dtype: torch.dtype) -> Lazy:
        mode, args = node.kwargs.get("rounding_mode"), list(node.args)
        if mode:
            return self.spelled(f"div_{mode}", node, args, dtype)
        return self.combined(node, args, dtype, dtype, "({0} / {1})")

    def relu(self, node: Node, dtype: torch.dtype) -> Lazy:
        return self.combined(node, (node.args[0], 0), dtype, dtype, OPERATORS["maximum"].cuda)

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
        spelling: str,
    ) -> Lazy:
        """An operation on operands in the dtype `within`, which broadcast to the shape of `node`."""
        operands = [self.operand(argument, within) for argument in args]
        return pointwise_of(node.meta["val"].shape, operands, dtype, spelling)

    def where(self, node: Node, dtype: torch.dtype) -> Lazy:
        condition, *arms = node.args
        operands = [self.operand(condition, torch.bool), *(self.operand(x, dtype) for x in arms)]
        shape = node.meta["val"].shape
        return pointwise_of(shape, operands, dtype, "({0} ? {1} : {2})")

    def clamp(self, node: Node, dtype: torch.dtype) -> Lazy:
        least, most = (
            node.args[i] if i < len(node.args) else node.kwargs.get(name)
            for i, name in ((1, "min"), (2, "max"))
        )
        found = self.operand(node.args[0], dtype)
        for limit, name in ((least, "clamp_min"), (most, "clamp_max")):
            if limit is not None:
                found = self.combined(node, (found, limit), dtype, dtype, OPERATORS[name].cuda)
        return found

    def power(self, node: Node, dtype: torch.dtype) -> Lazy:
        args: Any = node.args
        base, exponent = args
        most = 3 if is_float(dtype) else 64
        if type(exponent) is not int or not 1 <= exponent <= most or dtype == torch.bool:
            raise UnknownOperation(f"`pow` with the exponent {exponent}")
        base = found = self.operand(base, dtype)
        for _ in range(exponent - 1):
            found = self.combined(node, (found, base), dtype, dtype, MUL)
        return found
