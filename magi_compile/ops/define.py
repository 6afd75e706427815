"""How a custom op of ours is made: a schema, what computes it on every device, and its fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Adds the op `schema` to `library`, which has to outlive it."""
    name = schema.split("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


def define_composite(
    library: torch.library.Library, schema: str, implementation: Callable[..., Any]
) -> None:
    """Adds the op `schema`, which is what its implementation calls: values, fakes and gradients are theirs."""
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(schema.split("(")[0], implementation, "CompositeImplicitAutograd")
