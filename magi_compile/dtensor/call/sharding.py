"""Sharding rules for the ops of attention across ranks when they are called on DTensors themselves.

Tokens on the dimension of the mesh that the group of the op is; on others everything replicated, or heads. A rule of
DTensor's holds for each dimension of a mesh alike: what is sharded on a wrong one has another number of rows than the
plan, which the op refuses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from magi_compile import _compat
from magi_compile.dtensor.call.arguments import Options
from magi_compile.ops.sharding import heads_divide, of_backward

# Of arguments behind meta and data.
_GROUP, _TABLES, _MAX_SCORES = (
    Options._fields.index(x) - 2 for x in ("group_name", "tables", "return_max_scores")
)


@cache
def register_rules() -> None:
    """Once a process, before the first op on a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    replicated: Any = Replicate()
    first: Any = Shard(0)
    second: Any = Shard(1)

    def of_rows(k: Any, options: Any, score: str) -> list[Any]:
        """Placements of rows and of lse: tokens, or heads, or all of them."""
        # Equal meshes may have groups of other names.
        ranks = dist.get_process_group_ranks(_compat.resolve_process_group(options[_GROUP]))
        others = [dist.get_process_group_ranks(k.mesh.get_group(dim)) for dim in range(k.mesh.ndim)]
        found = [(first, second)] if ranks in others else []
        if others != [ranks]:
            found.append((replicated, replicated))
            # A score_mod tells heads apart: a shard of them would have other numbers.
            if heads_divide(k) and not score:
                found.append((second, first))
        return found

    def scored(options: Any) -> tuple[Any, str]:
        """The captured tensors, and the text of the score program; DTensor leaves out what has its default."""
        tables, _, score = (*options[_TABLES : _TABLES + 3], None, None, None)[:3]
        return tables or (), score or ""

    def forward(q: Any, k: Any, v: Any, meta: Any, data: Any, *options: Any) -> list[Any]:
        tables, score = scored(options)
        rest = [replicated] * (2 + len(tables))
        has_max_scores = len(options) > _MAX_SCORES and options[_MAX_SCORES]
        return [
            ([rows, lse, lse if has_max_scores else replicated], [rows, rows, rows, *rest])
            for rows, lse in of_rows(k, options, score)
        ]

    def backward(
        dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any
    ) -> list[Any]:
        _, _, *options = others
        tables, score = scored(options)
        rest = [replicated] * (2 + len(tables))
        return [
            ([*[rows] * 3, replicated], of_backward(dlse, rows, of_lse) + rest)
            for rows, of_lse in of_rows(k, options, score)
        ]

    ops: Any = torch.ops.magi
    register_sharding(ops.cp_ffa_fwd.default)(forward)
    register_sharding(ops.cp_ffa_bwd.default)(backward)
