"""Kernels of attention across ranks, compiled ahead.

Which kernels a run takes follows from what a call asks for and from the kind of its plan, and a graph knows only the
former: its plans are inputs. So both are remembered, and whatever comes last begins to compile for the other:

    a graph is traced, or a kind of call runs for the first time   for plans that were made lately
    a plan is put on a device                                      for calls that were seen before

A plan is put on its device when it is made, which is before the step that needs it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import torch

from magi_compile import _compat
from magi_compile.dtensor.call.asked import Asked
from magi_compile.dtensor.call.entries import Packing
from magi_compile.dtensor.planning.cover import Entries
from magi_compile.kernels.base import CompiledKernel
from magi_compile.kernels.overlap import EarlyKernel
from magi_compile.score.program import ScoreCall, ScoreProgram

if TYPE_CHECKING:
    from magi_compile.dtensor.call.execution import DevicePlan
    from magi_compile.dtensor.planning.rank_plan import RankPlan

MOST_KINDS = 16  # of calls, and of plans, that are remembered

Staged: TypeAlias = Union["RankPlan", "DevicePlan"]


class Walked(NamedTuple):
    """The sizes of the slices that one call of a kernel walks."""

    num_slices: int
    total_q: int
    total_k: int

    def packed(self, packing: Packing) -> list[Walked]:
        """The same of packed rows: as many slices as there may be, and as few."""
        # Of batch entries with masks of their own, the rows of all are counted already, and a rank may have a share.
        rows = self.total_q // packing.entries.batch
        totals = packing.queries * rows, packing.keys_together * self.total_k
        most = self.num_slices * (packing.batch if packing.entries.batch == 1 else 1)
        # How many slices an entry has that has its own, nobody has counted.
        numbers = (most,) if packing.entries.number == 1 else (most, 1)
        return [Walked(number, *totals) for number in numbers]


class PlanKind(NamedTuple):
    """The kind of a plan, from which follows which kernels it takes."""

    device: torch.device
    has_bits: bool
    entries: Entries  # of its masks
    forward: tuple[Walked, ...]  # the stages that see something, or all of it where it is one call
    backward: tuple[Walked, ...]  # the stages that see something
    # The forward, if it may begin with local keys, a column in front of remote ones.
    early: Walked | None

    @classmethod
    def of(cls, plan: Staged, device: torch.device) -> PlanKind:
        forward, backward = (
            tuple(
                Walked(len(x.slices), x.slices.seqlen_q, x.slices.seqlen_k)
                for x in stages
                if len(x.slices)
            )
            for stages in (plan.forward, plan.backward)
        )
        early = None
        if plan.forward_is_early and len(forward) == 2:
            local, remote = forward
            together = (
                local.num_slices + remote.num_slices,
                local.total_q,
                local.total_k + remote.total_k,
            )
            forward = (Walked(*together),)
            early = forward[0]._replace(total_k=forward[0].total_k + 1)
        return cls(device, plan.bits is not None, plan.entries, forward, backward, early)


class _Seen:
    """The calls and the plans of this process, newest last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._calls: OrderedDict[Any, None] = OrderedDict()
        self._plans: OrderedDict[Any, None] = OrderedDict()

    @_compat.outside_of_modes()
    def add(self, kind: Asked | PlanKind) -> None:
        """Remembers a call or a plan; a new one begins with all of the others."""
        is_call = isinstance(kind, Asked)
        alike, others = (self._calls, self._plans) if is_call else (self._plans, self._calls)
        with self._lock:
            is_new = kind not in alike
            alike[kind] = None
            alike.move_to_end(kind)
            if len(alike) > MOST_KINDS:
                alike.popitem(last=False)
            found = list(others) if is_new else []
        # Kernels ask whether algorithms have to be deterministic now, and what they say is kept for the call.
        now = torch.are_deterministic_algorithms_enabled()
        for other in found:
            pair: Any = (kind, other) if is_call else (other, kind)
            call, plan = pair
            if plan.device == call.device and call.deterministic == now:
                with suppress(Exception):  # whatever speaks against it, the call will say
                    _begin(call, plan)


_known = _Seen()


def forget() -> None:
    """Forgets all calls and plans; also in a forked process, where another thread may have held the lock."""
    global _known
    _known = _Seen()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=forget)


def begin_call(asked: Asked) -> None:
    """Begins to compile what such a pass needs over the plans that were made lately, and over those to come."""
    if _compat.is_in_use(asked.device):
        _known.add(asked)


def begin_plan(plan: Staged, device: torch.device) -> None:
    """Begins to compile what the passes that were seen before need over a plan on `device`, and those to come."""
    if _compat.is_in_use(device):
        _known.add(PlanKind.of(plan, device))


def _begin(asked: Asked, plan: PlanKind) -> None:
    kernel, problem, packing = asked.choice(plan.entries, plan.has_bits)
    if not isinstance(kernel, CompiledKernel):
        return
    tables = [torch.empty((1,) * dim, dtype=dtype, device="meta") for dtype, dim in asked.tables]
    is_early = isinstance(kernel, EarlyKernel) and not asked.score and not asked.is_backward
    early = plan.early if is_early else None
    walked = plan.backward if asked.is_backward else plan.forward if early is None else (early,)
    for sizes in (x for stage in walked for x in stage.packed(packing)):
        made = kernel.plan_of_sizes(*sizes, problem, plan.device)
        kernel.begin_plan(made, problem)
        score = None
        if asked.score:
            seqlens = sizes.total_q // packing.queries, sizes.total_k // packing.keys_together
            nheads = packing.nheads if packing.by_head else 1
            score = ScoreCall(ScoreProgram.parse(asked.score), tables, (), *seqlens, nheads)
        if asked.is_backward:
            deterministic = asked.deterministic
            kernel.begin_backward(problem, score, wanted=asked.wanted, deterministic=deterministic)
            continue
        if len(walked) > 1:  # a pass that is merged with others stays whole
            made = made._replace(splits=None)
        kernel.begin_forward(made, problem, score, is_early=early is not None)
