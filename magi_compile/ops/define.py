"""Definition of our custom ops: a schema, what computes it on every device, its fake, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from magi_compile.ops.dtensors import are_distributed
from magi_compile.ops.validation import refuse_transforms


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
    values: Any,
    differentiable: type[torch.autograd.Function],
    register_rules: Callable[[], None],
    tables_at: int,
) -> None:
    """Registers the op `schema`: calls `differentiable` if q, k, v or a captured tensor needs a gradient,
    else the op `values`.

    `differentiable` takes the arguments behind q, k and v first, as a tuple, and then these and the captured tensors,
    which are argument `tables_at` behind v, if given. `register_rules` registers how DTensors q, k and v are sharded.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        tables = (rest[tables_at] if len(rest) > tables_at else None) or ()
        refuse_transforms(q, k, v, *tables)
        if are_distributed(q, k, v):
            register_rules()
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tables)):
            return differentiable.apply(rest, q, k, v, *tables)
        return values(q, k, v, *rest)

    name = schema.split("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, attention, "CompositeImplicitAutograd")


def gradients(op: Callable[..., Any], *arguments: Any) -> Any:
    """Computes the op of a backward pass, and refuses to be differentiated again."""
    return _Gradients.apply(op, *arguments) if torch.is_grad_enabled() else op(*arguments)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], *arguments: Any) -> Any:
        return op(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError("gradients of attention cannot be differentiated again")
