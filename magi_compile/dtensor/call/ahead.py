"""Kernels of attention across ranks, compiled ahead.

Which kernels a run takes follows from what a call asks for and from the kind of its plan, and a graph knows only the
former: its plans are inputs. So both are remembered, and whatever comes last begins to compile for the other:

    a graph is traced, or a kind of call runs for the first time   for plans that were made lately
    a plan is put on a device                                      for calls that were seen before

A plan is put on its device when it is made, which is before the step that needs it.

Plans of other masks may take other kernels: a forward begins early or not, and has edges of rows or not. So from the
second mask on, `PlanFamily.siblings` are begun too, behind everything that a plan takes. They add at most three forward
kernels and three small ones to those of a call, 2 to 4 CPU seconds in one thread; a run with a single mask adds none.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, Union

import torch

from magi_compile import _compat
from magi_compile.dtensor.call.asked import Asked
from magi_compile.dtensor.call.entries import Packing
from magi_compile.dtensor.planning.cover import Entries
from magi_compile.kernels.base import CompiledKernel, Kernel
from magi_compile.kernels.overlap import EarlyKernel
from magi_compile.score.program import ScoreCall, ScoreProgram

if TYPE_CHECKING:
    from magi_compile.dtensor.call.execution import DevicePlan
    from magi_compile.dtensor.planning.rank_plan import RankPlan

MOST_KINDS = 16  # of calls, and of plans, that are remembered

_Kind = TypeVar("_Kind")
_Value = TypeVar("_Value")

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


class PlanFamily(NamedTuple):
    """The properties that plans of a run have in common, whatever their masks."""

    device: torch.device
    has_bits: bool
    entries: Entries
    may_be_early: bool  # the forward may begin with local keys
    rows: int  # of a rank, of all batch entries that have masks of their own
    keys: int  # of all ranks, likewise

    @classmethod
    def of(cls, plan: Staged, device: torch.device) -> PlanFamily:
        of_mask = (plan.bits is not None, plan.entries, plan.forward_may_be_early)
        batch = plan.entries.batch
        return cls(device, *of_mask, batch * plan.rows, batch * plan.cp_size * plan.key_rows)

    def siblings(self) -> list[PlanKind]:
        """Kinds of plans that together take every kernel that a plan of the family may take.

        Those are plans of few slices, whose tiles may be cut in splits, and of many, whose rows have edges; each in one
        call and, if it may be, early. Several stages take no other kernels than one call. A backward takes the same
        ones whatever its sizes, so that the first sibling alone has one.
        """
        few, many = (Walked(number, self.rows, self.keys) for number in (1, self.rows))
        walks: list[tuple[Walked, Walked | None]] = [(few, None), (many, None)]
        if self.may_be_early:  # with local slices and remote ones, and the column in between
            walks += [
                (x, Walked(max(x.num_slices, 2), x.total_q, x.total_k + 1)) for x in (few, many)
            ]
        alike = (self.device, self.has_bits, self.entries)
        return [
            PlanKind(*alike, (one_call,), (few,) if i == 0 else (), early)
            for i, (one_call, early) in enumerate(walks)
        ]


class _Seen:
    """The calls and the plans of this process, newest last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._calls: OrderedDict[Asked, None] = OrderedDict()
        self._plans: OrderedDict[PlanKind, None] = OrderedDict()
        self._siblings: OrderedDict[PlanKind, None] = OrderedDict()
        # By what families have in common but for lengths: the first plan, or None once there was another mask.
        self._first: OrderedDict[PlanFamily, tuple[int, PlanFamily] | None] = OrderedDict()

    @_compat.outside_of_modes()
    def add_call(self, asked: Asked) -> None:
        """Remembers a call; a new one begins with all plans, then with their siblings."""
        with self._lock:
            is_new = _remember(self._calls, asked, None)
            plans, siblings = (list(self._plans), list(self._siblings)) if is_new else ([], [])
        for plan in plans:
            _begin_if_alike(asked, plan)
        for sibling in siblings:
            _begin_if_alike(asked, sibling, later=True)

    @_compat.outside_of_modes()
    def add_plan(self, plan: PlanKind, family: PlanFamily, digest: int) -> None:
        """Remembers a plan; one of a new kind begins with all calls, and so do then its siblings unless all masks
        have been the same."""
        with self._lock:
            is_new = _remember(self._plans, plan, None)
            siblings = [
                sibling
                for changing in self._changing(family, digest)
                for sibling in changing.siblings()
                if _remember(self._siblings, sibling, None)
            ]
            calls = list(self._calls)
        for asked in calls if is_new else []:
            _begin_if_alike(asked, plan)
        for sibling in siblings:
            for asked in calls:
                _begin_if_alike(asked, sibling, later=True)

    def _changing(self, family: PlanFamily, digest: int) -> list[PlanFamily]:
        """The families of a run whose masks change: of this plan, and where it is the second mask, of the first."""
        key = family._replace(rows=0, keys=0)
        first = self._first.get(key, (digest, family))
        is_same = first is not None and first[0] == digest
        _remember(self._first, key, first if is_same else None)
        if is_same:
            return []
        return [family] if first is None else [first[1], family]


def _remember(kinds: OrderedDict[_Kind, _Value], kind: _Kind, value: _Value) -> bool:
    """Keeps `value` as the newest, and forgets the oldest where there are many. True if the kind is a new one."""
    is_new = kind not in kinds
    kinds[kind] = value
    kinds.move_to_end(kind)
    if len(kinds) > MOST_KINDS:
        kinds.popitem(last=False)
    return is_new


def _begin_if_alike(asked: Asked, plan: PlanKind, *, later: bool = False) -> None:
    """Begins with the kernels of a call by a plan, if a call now may be such a one."""
    # Kernels ask whether algorithms have to be deterministic now, and what they say is kept for the call.
    now = torch.are_deterministic_algorithms_enabled()
    if plan.device == asked.device and asked.deterministic == now:
        with suppress(Exception):  # whatever speaks against it, the call will say
            _begin(asked, plan, later=later)


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
        _known.add_call(asked)


def begin_plan(plan: Staged, device: torch.device) -> None:
    """Begins to compile what the passes that were seen before need over a plan on `device`, and those to come."""
    if _compat.is_in_use(device):
        _known.add_plan(PlanKind.of(plan, device), PlanFamily.of(plan, device), plan.digest)


def _begin(asked: Asked, plan: PlanKind, *, later: bool = False) -> None:
    chosen, problem, packing = asked.choice(plan.entries, plan.has_bits)
    kernel, begins_early = _compiled(chosen)  # type: ignore[arg-type]  # hashed by identity
    if kernel is None:
        return
    tables = [torch.empty((1,) * dim, dtype=dtype, device="meta") for dtype, dim in asked.tables]
    early = None if asked.score or asked.is_backward or not begins_early else plan.early
    walked = plan.backward if asked.is_backward else plan.forward if early is None else (early,)
    for sizes in (x for stage in walked for x in stage.packed(packing)):
        made = kernel.plan_of_sizes(*sizes, problem, plan.device)
        kernel.begin_plan(made, problem, later=later)
        score = None
        if asked.score:
            seqlens = sizes.total_q // packing.queries, sizes.total_k // packing.keys_together
            nheads = packing.nheads if packing.by_head else 1
            score = ScoreCall(ScoreProgram.parse(asked.score), tables, (), *seqlens, nheads)
        if asked.is_backward:
            wanted, deterministic = asked.wanted, asked.deterministic
            kernel.begin_backward(
                problem, score, wanted=wanted, deterministic=deterministic, later=later
            )
            continue
        if len(walked) > 1:  # a pass that is merged with others stays whole
            made = made._replace(splits=None)
        kernel.begin_forward(made, problem, score, is_early=early is not None, later=later)


@lru_cache(maxsize=64)
def _compiled(kernel: Kernel) -> tuple[CompiledKernel | None, bool]:
    """The kernel, if it is compiled, and whether its forward can begin early. To ask costs 20 microseconds."""
    compiled = kernel if isinstance(kernel, CompiledKernel) else None
    return compiled, isinstance(kernel, EarlyKernel)
