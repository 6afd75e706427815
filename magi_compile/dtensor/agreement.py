"""Whether the ranks of a group hold plans of one mask, each its own: asked before the first rows travel by a plan.

Once for each of the first plans of a group, because the answer takes a small all-gather and the host waits for it: who plans
anew in every step waits in the first steps alone. What is agreed upon is kept by group: the ranks of one call in the same order,
so they keep the same and ask together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from magi_compile import _compat
from magi_compile.dtensor.execution import DevicePlan
from magi_compile.dtensor.planning.rank_plan import recent
from magi_compile.dtensor.transport.collectives import refuse_to_be_recorded

FIRST_PLANS = 16  # of a group that are compared

_asked: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_agreed: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[Hashable, None]] = WeakKeyDictionary()


def require_agreement(
    plan: DevicePlan,
    group: dist.ProcessGroup,
    reduce_group_name: str,
    device: torch.device,
) -> None:
    """All ranks of `group` call it together before they move rows of `device` by a plan.

    Args:
        plan: this rank's, on `device`.
        group: the ranks that plan together.
        reduce_group_name: name of the process group that moves gradients.
        device: of q, k and v.

    Raises:
        ValueError: on every rank alike, naming the ranks whose plan does not fit the group or differs from that of rank 0.
        RuntimeError: if it would have to ask while a graph is being captured.
    """
    agreed = _agreed.setdefault(group, OrderedDict())
    key = (plan.digest, plan.rank, reduce_group_name)
    asked = _asked.get(group, 0)
    if key not in agreed:
        if asked >= FIRST_PLANS:
            return
        _asked[group] = asked + 1
        mine = torch.tensor([plan.digest, plan.cp_size, plan.rank], device=device)
        refuse_to_be_recorded(mine)
        _require_equal_ranks(group, _compat.resolve_process_group(reduce_group_name))
        every = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(every, mine, group)
        _compare(torch.stack(every).tolist())
        agreed[key] = None
    recent(agreed, key)


def _require_equal_ranks(group: dist.ProcessGroup, reduce_group: dist.ProcessGroup) -> None:
    ranks, others = (dist.get_process_group_ranks(x) for x in (group, reduce_group))
    if others != ranks:
        raise ValueError(
            f"`reduce_group` must hold the ranks of `group` in the same order, {ranks}, got {others}"
        )


def _compare(every: list[list[int]]) -> None:
    """`every`: digest, cp_size and rank of the plan of each rank."""
    digests, sizes, ranks = zip(*every, strict=True)
    size = len(every)
    misfits = [rank for rank, planned in enumerate(sizes) if planned != size]
    if misfits:
        planned = sorted({sizes[rank] for rank in misfits})
        raise ValueError(
            f"`plan` must be made for the {size} ranks of `group`, but ranks {misfits} have a plan for "
            f"{', '.join(map(str, planned))}; call plan_rank with cp_size=group.size()"
        )
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise ValueError(
            "every rank must plan the same mask with the same options, but the plans of ranks "
            f"{different} differ from that of rank 0; give every rank the same mask and the same "
            "ContextParallelOptions"
        )
    strangers = {rank: planned for rank, planned in enumerate(ranks) if planned != rank}
    if strangers:
        listed = ", ".join(
            f"rank {rank} has the plan of rank {whose}" for rank, whose in strangers.items()
        )
        raise ValueError(
            f"`plan` must be each rank's own, but {listed}; call plan_rank with rank=group.rank()"
        )
