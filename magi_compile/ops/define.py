"""Definition of our custom ops: a schema, what computes it on every device, its fake, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from magi_compile.ops.dtensors import are_distributed
from magi_compile.ops.layout import by_entries, packed
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
    """Registers the op `schema`: calls `differentiable` if q, k or v needs a gradient, else the op `values`.

    `differentiable` takes `values` in front of the arguments. `register_rules` registers how DTensors q, k and v are sharded.
    With `takes_tables` the fourth argument is a list of tensors, which may need gradients too: `differentiable` takes
    their number and each of them in its place.

    Registers `..._of_entries` as well, with an output `[batch, nheads, seqlen_q, head_dim_v]`, which takes q, k and v so or packed."""

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

    # A graph that packs what it is given, or unpacks what it gives, saves views for its backward, and AOTAutograd cuts their connection
    # with the tensors of the user: nobody notices that he writes to these. So such ops pack and unpack inside.
    entries = (
        f"({rest.replace(')', ', SymInt batch, SymInt seqlen_q, int nheads, bool by_head)', 1)}"
    )
    of_values = f"{values.name().split('::')[1]}_of_entries"

    def unpacked(*arguments: Any) -> tuple[Tensor, ...]:
        q, k, v, *given, batch, seqlen, nheads, by_head = arguments
        out, *rows = values(*(packed(x, by_head=by_head) for x in (q, k, v)), *given)
        return by_entries(out, batch, seqlen, nheads), *rows

    def unpacked_fake(*arguments: Any) -> tuple[Tensor, ...]:
        out, *rows = unpacked(*arguments)
        return out.new_empty_strided(out.shape, out.stride()), *rows

    define(library, f"{of_values}{entries}", unpacked, unpacked_fake)
    values_of_entries = getattr(getattr(torch.ops, library.ns), of_values).default

    def attention_of_entries(*arguments: Any) -> Any:
        *given, batch, seqlen, nheads, by_head = arguments
        sizes = (batch, seqlen, nheads, by_head)
        return made_of(lambda *x: values_of_entries(*x, *sizes))(*given)

    library.define(f"{name}_of_entries{entries}", tags=tags)
    library.impl(f"{name}_of_entries", attention_of_entries, "CompositeImplicitAutograd")


def define_of_entries(library: torch.library.Library, schema: str, gradients_of: Any) -> None:
    """Adds the op `schema` of a backward pass, which is `gradients_of` a forward of the `..._of_entries`: it takes and gives tensors as
    those do."""

    def of_entries(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> Any:
        out, lse, *others = rest
        by_head = lse.shape[0] != out.shape[1]
        rows, *qkv, of_out = (packed(x, by_head=by_head) for x in (dout, q, k, v, out))
        found = gradients_of(rows, dlse, *qkv, of_out, lse, *others)
        grads = (
            by_entries(grad, x.shape[0], x.shape[2], x.shape[1]) if x.dim() == 4 else grad
            for grad, x in zip(found, (q, k, v), strict=False)
        )
        return *grads, *found[3:]

    define(library, schema, of_entries, of_entries)


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
