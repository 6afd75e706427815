"""How a custom op of ours is made: a schema, what computes it on every device, its fake, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.ops.dtensors import are_distributed


def define(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Adds the op `schema` to `library`, which has to outlive it."""
    name = schema.split("(")[0]
    # Exact strides: those of outputs follow from those of q, and Inductor may lay out what it computes in another way.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define(schema, tags=tags)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


def define_differentiable(
    library: torch.library.Library,
    schema: str,
    values: Callable[..., Any],
    differentiable: type[torch.autograd.Function],
    register_rules: Callable[[], None],
    *,
    takes_tables: bool = False,
) -> None:
    """Adds the op `schema`, which becomes, where it is called, the op `values` of the same arguments, or `differentiable`, which takes
    `values` in front of them, where a gradient of the first three, q, k and v, is wanted. `register_rules` says how those are
    sharded, for DTensors. With `takes_tables` the fourth argument is a list of tensors, whose gradients may be wanted too:
    `differentiable` takes how many these are and each of them in its place."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        refuse_tangents(q, k, v)
        if are_distributed(q, k, v):
            register_rules()
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return differentiable.apply(values, q, k, v, *rest)
        return values(q, k, v, *rest)

    def attention_with_tables(
        q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor] | None, *rest: Any
    ) -> Any:
        tables = tables or []  # AOTInductor passes None for an empty list
        refuse_tangents(q, k, v, *tables)
        if are_distributed(q, k, v):
            register_rules()
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tables)):
            return differentiable.apply(values, q, k, v, len(tables), *tables, *rest)
        return values(q, k, v, tables, *rest)

    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    implementation = attention_with_tables if takes_tables else attention
    library.impl(schema.split("(")[0], implementation, "CompositeImplicitAutograd")


def refuse_tangents(*tensors: Tensor) -> None:
    """Raises in forward-mode differentiation by one of `tensors`: an op without a formula would drop its tangent."""
    if _compat.has_tangents(tensors):
        raise NotImplementedError(
            "attention has no forward-mode derivatives (torch.func.jvp, jacfwd, linearize, torch.autograd.forward_ad); use backward, or "
            "torch.autograd.grad"
        )


def gradients(op: Callable[..., Any], *arguments: Any) -> Any:
    """What the op of a backward pass computes; it refuses where somebody asks for gradients of its own."""
    return _Gradients.apply(op, *arguments) if torch.is_grad_enabled() else op(*arguments)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], *arguments: Any) -> Any:
        return op(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError("gradients of attention cannot be differentiated again")
