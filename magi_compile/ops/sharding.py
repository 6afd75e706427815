"""Sharding rules for the ops of attention when they are called on DTensors themselves: everything replicated, or heads.

The public functions do not need this: they run on local tensors (`dtensors.py`). Here are the rules for code that knows the ops alone.
Where inputs are placed in another way, DTensor redistributes them first, as for any op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, combinations
from math import prod
from typing import Any

import torch


@cache
def register_rules() -> None:
    """Once a process, before the first op on a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    replicated: Any = Replicate()
    first: Any = Shard(0)
    heads: Any = Shard(1)

    def forward(q: Any, k: Any, v: Any, slices: Any, plan: Any, *options: Any) -> list[Any]:
        return of_forward([heads, first], k, slices, plan, *options)

    def forward_with_max_scores(
        q: Any, k: Any, v: Any, slices: Any, plan: Any, *options: Any
    ) -> list[Any]:
        return of_forward([heads, first, first], k, slices, plan, *options)

    def of_forward(by_head: list[Any], k: Any, slices: Any, plan: Any, *options: Any) -> list[Any]:
        lists = [replicated] * (len(slices) + len(plan))
        rest = [None] * len(options)
        rules = [([replicated] * len(by_head), [*[replicated] * 3, *lists, *rest])]
        if heads_divide(k):
            rules.append((by_head, [*[heads] * 3, *lists, *rest]))
        return rules

    def backward(
        dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any
    ) -> list[Any]:
        slices, plan, *options = others
        lists = [replicated] * (len(slices) + len(plan))
        rest = [None] * len(options)
        rules = [([replicated] * 3, of_backward(dlse, replicated, replicated) + lists + rest)]
        if heads_divide(k):
            rules.append(([heads] * 3, of_backward(dlse, heads, first) + lists + rest))
        return rules

    def checked(*arguments: Any) -> list[Any]:
        return [([replicated] * 3, [*[replicated] * 3, *[None] * (len(arguments) - 3)])]

    def scored(q: Any, k: Any, v: Any, tables: Any, slices: Any, plan: Any, *options: Any) -> Any:
        lists = [replicated] * (len(tables) + len(slices) + len(plan))
        # A score_mod tells heads apart: a shard of them would have other numbers.
        return [([replicated] * 2, [*[replicated] * 3, *lists, *[None] * len(options)])]

    def scored_with_max_scores(*arguments: Any) -> Any:
        ((_, of_arguments),) = scored(*arguments)
        return [([replicated] * 3, of_arguments)]

    ops: Any = torch.ops.magi
    rules: dict[Any, Callable[..., Sequence[Any]]] = {
        ops.ffa_fwd.default: forward,
        ops.ffa_fwd_with_max_scores.default: forward_with_max_scores,
        ops.ffa_bwd.default: backward,
        ops.checked_slices.default: checked,
        ops.scored_fwd.default: scored,
        ops.scored_fwd_with_max_scores.default: scored_with_max_scores,
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
