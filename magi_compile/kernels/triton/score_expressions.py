"""ATen operations of numbers as expressions of Triton, in the dtypes in which PyTorch computes them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile.functions.names import name_of
from magi_compile.functions.operators import OPERATORS, Kind, num_operands

_DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}

_SYMBOLIC = {operator.add: "+", operator.sub: "-", operator.mul: "*"}


class NoTritonCode(NotImplementedError):
    """An operation of a score program that is not written in Triton."""


class Operand:
    """An argument of a node: another node, or a number."""

    def __init__(self, value: Any, known: dict[Node, str]):
        self.value, self.known = value, known

    def in_dtype(self, dtype: torch.dtype | None) -> str:
        """Its text, converted to `dtype`, or as it is."""
        if not isinstance(self.value, Node):
            return _number(self.value, dtype)
        text = self.known[self.value]
        example = self.value.meta["val"]
        if not isinstance(example, Tensor) or dtype in (None, example.dtype):
            return text
        if dtype == torch.bool:
            return f"({text} != 0)"
        return f"{text}.to({_DTYPES[dtype]})"  # type: ignore[index]


def _number(value: Any, dtype: torch.dtype | None) -> str:
    if isinstance(value, bool):
        return repr(value)
    if isinstance(value, (int, float)):
        if dtype is not None and dtype.is_floating_point:
            value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        return f"({value!r})"
    raise NoTritonCode(f"the constant {value!r} is not written in Triton")


def expression(node: Node, known: dict[Node, str]) -> str:
    """One ATen operation of numbers, in Triton, of the dtype that PyTorch gives; `known` are the names of the nodes in
    front of it. Raises NoTritonCode where it is not written in Triton."""
    name, example = name_of(node.target), node.meta["val"]
    arguments = [Operand(x, known) for x in node.args]
    if node.target in _SYMBOLIC:
        left, right = (x.in_dtype(None) for x in arguments)
        return f"({left} {_SYMBOLIC[node.target]} {right})"  # type: ignore[index]
    if not isinstance(example, Tensor):
        raise NoTritonCode(f"`{name}` of captured ints is not written in Triton")
    if example.dtype not in _DTYPES:
        raise NoTritonCode(f"`{name}` in {example.dtype} is not written in Triton")
    operator_ = OPERATORS.get(name)
    spelling = "" if operator_ is None else operator_.triton
    if spelling in _RULES:
        return _RULES[spelling](node, arguments)
    tensors = [x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta["val"], Tensor)]
    if node.kwargs:
        raise NoTritonCode(f"`{name}` with {', '.join(node.kwargs)} is not written in Triton")
    if operator_ is None or num_operands(spelling) != len(arguments) or not tensors:
        raise NoTritonCode(f"`{name}` is not written in Triton")
    if operator_.kind in (Kind.COMPARISON, Kind.TRUTH):
        dtype = torch.bool if operator_.kind is Kind.TRUTH else _compared_in(node)
        return spelling.format(*(x.in_dtype(dtype) for x in arguments))
    if operator_.kind is Kind.ROUNDING and not example.dtype.is_floating_point:
        return arguments[0].in_dtype(example.dtype)
    if name == "add" and example.dtype == torch.bool:
        spelling = OPERATORS["bitwise_or"].triton
    # In 16 bits PyTorch computes in fp32 and rounds the result.
    dtype = torch.float32 if _is_short(example.dtype) else example.dtype
    text = spelling.format(*(x.in_dtype(dtype) for x in arguments))
    return f"{text}.to({_DTYPES[example.dtype]})"


def _is_short(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _compared_in(node: Node) -> torch.dtype:
    values: list[Any] = [x.meta["val"] if isinstance(x, Node) else x for x in node.args]
    values = [x if isinstance(x, (Tensor, bool, int, float)) else 8 for x in values]
    dtype = torch.result_type(*values)
    return torch.float32 if _is_short(dtype) else dtype


def _where(node: Node, arguments: list[Operand]) -> str:
    condition, left, right = arguments
    dtype = node.meta["val"].dtype
    cond = condition.in_dtype(torch.bool)
    # Of blocks, so that numbers have a dtype.
    return f"tl.where({cond}, {left.in_dtype(dtype)}, {right.in_dtype(dtype)}).to({_DTYPES[dtype]})"


def _clamp(node: Node, arguments: list[Operand]) -> str:
    dtype = node.meta["val"].dtype
    text, *ends = arguments
    result = text.in_dtype(dtype)
    for end, function in zip(ends, ("maximum", "minimum"), strict=False):
        if end.value is not None:
            result = (
                f"tl.{function}({result}, {end.in_dtype(dtype)}, propagate_nan=tl.PropagateNan.ALL)"
            )
    return f"({result}).to({_DTYPES[dtype]})"


def _converted(node: Node, arguments: list[Operand]) -> str:
    return arguments[0].in_dtype(node.meta["val"].dtype)


def _constant(node: Node, arguments: list[Operand]) -> str:
    dtype = node.meta["val"].dtype
    value = {"zeros_like": 0, "ones_like": 1, "zeros": 0, "ones": 1}.get(name_of(node.target))
    if value is None:
        value = arguments[-1].value
    if isinstance(value, Node):
        raise NoTritonCode("a constant of a captured int is not written in Triton")
    return f"tl.full([1, 1], {_number(value, dtype)}, {_DTYPES[dtype]})"


def _not(node: Node, arguments: list[Operand]) -> str:
    if node.meta["val"].dtype == torch.bool:
        return f"({arguments[0].in_dtype(torch.bool)} == 0)"
    return f"(~{arguments[0].in_dtype(None)})"


def _relu(node: Node, arguments: list[Operand]) -> str:
    text = arguments[0].in_dtype(None)
    return f"tl.where({text} < 0, {text} * 0, {text})"


def _sign(node: Node, arguments: list[Operand]) -> str:
    text = arguments[0].in_dtype(None)
    return f"(({text} > 0).to({_DTYPES[node.meta['val'].dtype]}) - ({text} < 0).to({_DTYPES[node.meta['val'].dtype]}))"


def _remainder(node: Node, arguments: list[Operand]) -> str:
    """The sign is that of the divisor."""
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point:
        raise NoTritonCode("`remainder` of floats is not written in Triton")
    x, y = (argument.in_dtype(dtype) for argument in arguments)
    return f"((({x} % {y}) + {y}) % {y}).to({_DTYPES[dtype]})"


def _divided(node: Node, arguments: list[Operand]) -> str:
    """Quotients; of ints rounded down where that is asked for."""
    dtype, mode = node.meta["val"].dtype, node.kwargs.get("rounding_mode")
    x, y = (
        argument.in_dtype(torch.float32 if _is_short(dtype) else dtype) for argument in arguments
    )
    if mode is None and name_of(node.target) == "div":
        return f"({x} / {y}).to({_DTYPES[dtype]})"
    if dtype.is_floating_point:
        return f"tl.floor({x} / {y}).to({_DTYPES[dtype]})" if mode != "trunc" else _refuse_trunc()
    if mode == "trunc":
        return f"({x} // {y}).to({_DTYPES[dtype]})"
    rest = f"((({x} % {y}) + {y}) % {y})"
    return f"(({x} - {rest}) // {y}).to({_DTYPES[dtype]})"


def _refuse_trunc() -> str:
    raise NoTritonCode("`div` of floats with rounding_mode='trunc' is not written in Triton")


def _power(node: Node, arguments: list[Operand]) -> str:
    base, exponent = arguments
    dtype = node.meta["val"].dtype
    if exponent.value not in (1, 2, 3, 4):
        raise NoTritonCode(f"`pow` with the exponent {exponent.value} is not written in Triton")
    text = base.in_dtype(torch.float32 if _is_short(dtype) else dtype)
    return f"({' * '.join([text] * int(exponent.value))}).to({_DTYPES[dtype]})"


# What the table of operators says of Triton where a spelling does not say all.
_RULES: dict[str, Callable[[Node, list[Operand]], str]] = {
    "where": _where,
    "clamp": _clamp,
    "converted": _converted,
    "constant": _constant,
    "not": _not,
    "relu": _relu,
    "sign": _sign,
    "remainder": _remainder,
    "divided": _divided,
    "power": _power,
}
