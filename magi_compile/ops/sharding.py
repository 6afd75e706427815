"""Sharding rules for the ops of attention when they are called on DTensors themselves: everything replicated, or heads.

The public functions do not need this: they run on local tensors (`dtensors.py`). Here are the rules for code that knows
the ops alone. Where inputs are placed in another way, DTensor redistributes them first, as for any op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, combinations
from math import prod
from typing import Any

import torch

from magi_compile.ops.arguments import AttentionOptions


@cache
def register_rules() -> None:
    """Once a process, before the first op on a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    replicated: Any = Replicate()
    first: Any = Shard(0)
    heads: Any = Shard(1)

    def forward(q: Any, k: Any, v: Any, *rest: Any) -> list[Any]:
        options = AttentionOptions(*rest)
        others = of_options(options)
        max_scores = first if options.return_max_scores else replicated
        rules = [([replicated] * 3, [*[replicated] * 3, *others])]
        if may_divide(k, options.numbering):
            rules.append(([heads, first, max_scores], [*[heads] * 3, *others]))
        return rules

    def backward(
        dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any
    ) -> list[Any]:
        options = AttentionOptions.of_backward(*rest)
        others = of_options(options)
        rules = [([replicated] * 4, of_backward(dlse, replicated, replicated) + others)]
        if may_divide(k, options.numbering):
            rules.append(([*[heads] * 3, replicated], of_backward(dlse, heads, first) + others))
        return rules

    def of_options(options: AttentionOptions) -> list[Any]:
        """The placements of the tensors among them."""
        number = len(options.slices) + len(options.plan) + len(options.tables or ())
        return [replicated] * (number + (options.bits is not None))

    def may_divide(k: Any, numbering: Sequence[int]) -> bool:
        # A score_mod tells heads apart, and tensors by entries say how many there are: a shard of them would have other
        # numbers. Both have a numbering, and whether there is one is a part of the key by which DTensor keeps a rule.
        return not numbering and heads_divide(k)

    def checked(*arguments: Any) -> list[Any]:
        return [([replicated] * 3, [*[replicated] * 3, *[None] * (len(arguments) - 3)])]

    ops: Any = torch.ops.magi
    rules: dict[Any, Callable[..., Sequence[Any]]] = {
        ops.ffa_fwd.default: forward,
        ops.ffa_bwd.default: backward,
        ops.checked_slices.default: checked,
    }
    for op, rule in rules.items():
        register_sharding(op)(rule)


def heads_divide(k: Any) -> bool:
    """True if heads have equal shards however DTensor shards them over dimensions of this mesh: it takes any
    dimensions of which the ranks are at most as many as the heads."""
    sizes, nheads = k.mesh.shape, k.shape[1]
    some = chain.from_iterable(combinations(sizes, n + 1) for n in range(len(sizes)))
    return all(nheads % prod(sizes) == 0 for sizes in some if prod(sizes) <= nheads)


def of_backward(dlse: Any, rows: Any, lse: Any) -> list[Any]:
    """The placements of dout, dlse, q, k, v, out and lse; some calls have no dlse."""
    return [rows, None if dlse is None else lse, *[rows] * 4, lse]
