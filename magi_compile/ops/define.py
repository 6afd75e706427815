"""How a custom op of ours is made: a schema, what computes it on every device, its fake, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from magi_compile.ops.dtensors import are_distributed
from magi_compile.ops.layout import by_entries, packed_like
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
    *,
    takes_tables: bool = False,
) -> None:
    """Adds the op `schema`, which becomes, where it is called, the op `values` of the same arguments, or `differentiable`, which takes
    `values` in front of them, where a gradient of the first three, q, k and v, is wanted. `register_rules` says how those are
    sharded, for DTensors. With `takes_tables` the fourth argument is a list of tensors, whose gradients may be wanted too:
    `differentiable` takes how many these are and each of them in its place.

    Adds `..._of_entries` as well, with an output `[batch, nheads, seqlen_q, head_dim_v]`."""

    def made_of(values: Callable[..., Any]) -> Callable[..., Any]:
        def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
            refuse_transforms(q, k, v)
            if are_distributed(q, k, v):
                register_rules()
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                return differentiable.apply(values, q, k, v, *rest)
            return values(q, k, v, *rest)

        def attention_with_tables(
            q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor] | None, *rest: Any
        ) -> Any:
            tables = tables or []  # AOTInductor passes None for an empty list
            refuse_transforms(q, k, v, *tables)
            if are_distributed(q, k, v):
                register_rules()
            if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tables)):
                return differentiable.apply(values, q, k, v, len(tables), *tables, *rest)
            return values(q, k, v, tables, *rest)

        return attention_with_tables if takes_tables else attention

    tags = (torch.Tag.pt2_compliant_tag,)
    name, _, rest = schema.partition("(")
    library.define(schema, tags=tags)
    library.impl(name, made_of(values), "CompositeImplicitAutograd")

    # An output that is a view of what a backward needs, as it is of a graph that unpacks its rows, hides from autograd that somebody
    # writes to it: AOTAutograd cuts the connection. So these ops unpack them inside.
    entries = f"({rest.replace(')', ', SymInt batch, SymInt seqlen_q, int nheads)', 1)}"
    of_values = f"{values.name().split('::')[1]}_of_entries"

    def unpacked(*arguments: Any) -> tuple[Tensor, ...]:
        *given, batch, seqlen, nheads = arguments
        out, *rows = values(*given)
        return by_entries(out, batch, seqlen, nheads), *rows

    def unpacked_fake(*arguments: Any) -> tuple[Tensor, ...]:
        out, *rows = unpacked(*arguments)
        return out.new_empty_strided(out.shape, out.stride()), *rows

    define(library, f"{of_values}{entries}", unpacked, unpacked_fake)
    values_of_entries = getattr(getattr(torch.ops, library.ns), of_values).default

    def attention_of_entries(*arguments: Any) -> Any:
        *given, batch, seqlen, nheads = arguments
        return made_of(lambda *x: values_of_entries(*x, batch, seqlen, nheads))(*given)

    library.define(f"{name}_of_entries{entries}", tags=tags)
    library.impl(f"{name}_of_entries", attention_of_entries, "CompositeImplicitAutograd")


def define_of_entries(library: torch.library.Library, schema: str, gradients_of: Any) -> None:
    """Adds the op `schema` of a backward pass, which is `gradients_of` a forward of the `..._of_entries`: it takes dout and out as those
    give them. They are packed inside, because a graph would save what it packed."""

    def packed(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> Any:
        out, *others = rest
        return gradients_of(packed_like(q, dout), dlse, q, k, v, packed_like(q, out), *others)

    define(library, schema, packed, packed)


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
