"""Tensors that a mask_mod makes for a pair of a query and a key,
of which nothing is computed but the numbers that it uses.

t0[b].unsqueeze(0)      ->      a Lazy of shape [1, n], whose number at (i, j) is that of t0 at (b, j)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Node

from magi_compile.kernels.sm90.codegen.pointwise import UnknownOperation, element


@dataclass(frozen=True, eq=False)
class Number:
    """A number of a pair.

    Attributes:
        dtype: of it.
        variables: of which of b, h, q and kv it is a function.
        text: it in C++, from the values of others.
        is_short: whether it needs no name.
    """

    dtype: torch.dtype
    variables: frozenset[str]
    text: Callable[[Body], str]
    is_short: bool = False


class Lazy(NamedTuple):
    """A tensor of a pair: what it is at a place. `sizes` are those of its dimensions in C++."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sizes: tuple[str, ...]
    at: Callable[[Sequence[Number]], Number]
    name: str = "a captured tensor"


class Body:
    """Statements that compute numbers, each once. `home` says in which body that is, for queries, keys or pairs;
    `outer` are the kinds of bodies whose results this one is given, `type_of` says how C++ calls the numbers of a
    dtype."""

    def __init__(
        self,
        kind: str,
        home: Callable[[Number], Body],
        outer: Sequence[str] = (),
        type_of: Callable[[torch.dtype], str] = element,
    ):
        self.home = home
        self.kind = kind
        self.outer = outer
        self.type_of = type_of
        self.lines: list[str] = []
        self.known: dict[Number, str] = {}
        self.fields: dict[str, str] = {}  # C++ types by names

    def text(self, number: Number) -> str:
        """The number, where it stands; what depends on queries or on keys alone is computed with these."""
        if number.is_short:
            return number.text(self)
        if number not in self.known:
            home = self.home(number)
            if home.kind in self.outer:
                name = home.text(number)
                home.fields[name] = self.type_of(number.dtype)
                self.known[number] = f"{home.kind}.{name}"
            else:
                text = number.text(self)
                name = f"v{len(self.lines)}"
                self.lines.append(f"const {self.type_of(number.dtype)} {name} = {text};")
                self.known[number] = name
        return self.known[number]

    def require(self, check: int, holds: str, found: str) -> None:
        self.lines.append(f"c.require({check}, {holds}, {found});")

    def result(self, name: str, arguments: str) -> list[str]:
        """The struct of this body, and the function of such arguments that makes it."""
        fields = [f"    {kind} {name};" for name, kind in self.fields.items()]
        head = f"static __device__ {name} {self.kind}({arguments})"
        lines = [*self.lines, f"return {{{', '.join(self.fields)}}};"]
        return [f"struct {name} {{", *fields, "};", *function(head, lines)]


def function(head: str, lines: Sequence[str]) -> list[str]:
    """A function of any context, in C++."""
    return ["template <class Context>", f"{head} {{", *(f"    {line}" for line in lines), "}"]


def variables_of(numbers: Sequence[Number]) -> frozenset[str]:
    return frozenset().union(*(x.variables for x in numbers))


def once(at: Callable[[Sequence[Number]], Number]) -> Callable[[Sequence[Number]], Number]:
    """The same number for the same place."""
    known: dict[tuple[Number, ...], Number] = {}

    def remembered(place: Sequence[Number]) -> Number:
        key = tuple(place)
        if key not in known:
            known[key] = at(key)
        return known[key]

    return remembered


def pointwise_of(
    shape: Sequence[int],
    operands: Sequence[Lazy],
    dtype: torch.dtype,
    spelling: str,
) -> Lazy:
    """An operation of operands that broadcast to `shape`."""

    def at(place: Sequence[Number]) -> Number:
        inner = []
        for operand in operands:
            own = place[len(place) - len(operand.shape) :]
            inner.append(
                operand.at(
                    [whole(0) if n == 1 else x for n, x in zip(operand.shape, own, strict=True)]
                )
            )
        return Number(
            dtype, variables_of(inner), lambda body: spelling.format(*map(body.text, inner))
        )

    sizes = [f"Int({size}ll)" for size in shape]
    for operand in operands:
        for dim, size in enumerate(reversed(operand.sizes), 1):
            if operand.shape[-dim] == shape[-dim]:
                sizes[-dim] = size
    return Lazy(dtype, tuple(shape), tuple(sizes), once(at))


def whole(value: int) -> Number:
    return Number(torch.int64, frozenset(), lambda _: f"Int({value}ll)", is_short=True)


# Views, which change what a place means.


def _select(tensor: Lazy, node: Node) -> Lazy:
    dim, index = (int(x) for x in node.args[1:3])  # type: ignore[arg-type]
    dim %= len(tensor.shape)
    size = tensor.sizes[dim]
    fixed = whole(index)
    if index < 0:
        fixed = Number(torch.int64, frozenset(), lambda _: f"({size} + {index})", is_short=True)

    def at(place: Sequence[Number]) -> Number:
        return tensor.at([*place[:dim], fixed, *place[dim:]])

    kept = [place for place in range(len(tensor.shape)) if place != dim]
    shape, sizes = tuple(tensor.shape[i] for i in kept), tuple(tensor.sizes[i] for i in kept)
    return Lazy(tensor.dtype, shape, sizes, at)


def _reshape(tensor: Lazy, node: Node) -> Lazy:
    """A view that has the same dimensions but for those of one entry."""
    shape = tuple(node.meta["val"].shape)
    if [n for n in shape if n != 1] != [n for n in tensor.shape if n != 1]:
        raise UnknownOperation(f"a view of {list(tensor.shape)} as {list(shape)}")
    kept = [dim for dim, n in enumerate(shape) if n != 1]
    inner = [dim for dim, n in enumerate(tensor.shape) if n != 1]

    def at(place: Sequence[Number]) -> Number:
        found = [whole(0)] * len(tensor.shape)
        for outer, own in zip(kept, inner, strict=True):
            found[own] = place[outer]
        return tensor.at(found)

    sizes = ["Int(1ll)"] * len(shape)
    for outer, own in zip(kept, inner, strict=True):
        sizes[outer] = tensor.sizes[own]
    return Lazy(tensor.dtype, shape, tuple(sizes), at)


def _expand(tensor: Lazy, node: Node) -> Lazy:
    return pointwise_of(node.meta["val"].shape, [tensor], tensor.dtype, "{0}")


VIEWS: dict[str, Callable[[Lazy, Node], Lazy]] = {
    "select": _select,
    "expand": _expand,
    **dict.fromkeys(("view", "unsafe_view", "reshape", "squeeze", "unsqueeze"), _reshape),
}
