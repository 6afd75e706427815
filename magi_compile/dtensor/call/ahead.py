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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.call.asked import Asked
from magi_compile.dtensor.call.entries import Packing
from magi_compile.dtensor.planning.cover import Entries
from magi_compile.score.program import ScoreCall, ScoreProgram

MOST_KINDS = 16  # of calls, and of plans, that are remembered


class Staged(Protocol):
    """A plan, on the host or on a device: its stages have `slices`."""

    @property
    def forward(self) -> Sequence[Any]: ...

    @property
    def backward(self) -> Sequence[Any]: ...

    @property
    def bits(self) -> Tensor | None: ...

    @property
    def entries(self) -> Entries: ...


class Walked(NamedTuple):
    """The sizes of the slices that one call of a kernel walks."""

    num_slices: int
    total_q: int
    total_k: int

    def packed(self, packing: Packing) -> list[Walked]:
        """The same of packed rows: as many slices as there may be, and as few."""
        totals = packing.queries * self.total_q, packing.keys * self.total_k
        most = self.num_slices * (packing.batch if packing.entries.batch == 1 else 1)
        # How many slices an entry has that has its own, nobody has counted.
        numbers = (most,) if packing.entries.number == 1 else (most, 1)
        return [Walked(number, *totals) for number in numbers]


class PlanKind(NamedTuple):
    """The kind of a plan, from which follows which kernels it takes.

    Attributes:
        device: where it is.
        has_bits: whether it has blocks of bits.
        entries: those of its masks.
        forward: the stages of a forward that see something, or all of it where it is one call.
        backward: the stages of a backward that see something.
        early: the forward, where it may begin with local keys, a column in front of remote ones; else None.
    """

    device: torch.device
    has_bits: bool
    entries: Entries
    forward: tuple[Walked, ...]
    backward: tuple[Walked, ...]
    early: Walked | None

    @classmethod
    def of(cls, plan: Staged, rows: int, device: torch.device, *, is_early: bool) -> PlanKind:
        forward, backward = (
            tuple(Walked(len(x.slices), rows, x.slices.seqlen_k) for x in stages if len(x.slices))
            for stages in (plan.forward, plan.backward)
        )
        early = None
        if is_early and len(forward) == 2:
            local, remote = forward
            together = local.num_slices + remote.num_slices, rows, local.total_k + remote.total_k
            forward = (Walked(*together),)
            early = forward[0]._replace(total_k=forward[0].total_k + 1)
        has_bits = plan.bits is not None
        return cls(device, has_bits, plan.entries, forward, backward, early)


class CallKind(NamedTuple):
    """A pass that was traced or has run.

    Attributes:
        asked: what it is asked for.
        is_backward: whether it is a backward.
        wanted: the numbers of the captured tensors whose gradients that makes.
    """

    asked: Asked
    is_backward: bool = False
    wanted: tuple[int, ...] = ()


class _Seen:
    """The calls and the plans of this process, newest last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._calls: OrderedDict[CallKind, None] = OrderedDict()
        self._plans: OrderedDict[PlanKind, None] = OrderedDict()

    def add_call(self, call: CallKind) -> None:
        with self._lock:
            if not _is_new(call, self._calls):
                return
            plans = list(self._plans)
        _begin_all((call, plan) for plan in plans)

    def add_plan(self, plan: PlanKind) -> None:
        with self._lock:
            if not _is_new(plan, self._plans):
                return
            calls = list(self._calls)
        _begin_all((call, plan) for call in calls)


@_compat.outside_of_modes()
def _begin_all(pairs: Iterable[tuple[CallKind, PlanKind]]) -> None:
    # Kernels ask whether algorithms have to be deterministic now, and what they say is kept for the call.
    now = torch.are_deterministic_algorithms_enabled()
    for call, plan in pairs:
        if plan.device == call.asked.device and call.asked.deterministic == now:
            with suppress(Exception):  # whatever speaks against it, the call will say
                _begin(call, plan)


def _is_new(kind: CallKind | PlanKind, known: OrderedDict) -> bool:
    """Remembers a kind; False if it was known."""
    is_new = kind not in known
    known[kind] = None
    known.move_to_end(kind)
    if len(known) > MOST_KINDS:
        known.popitem(last=False)
    return is_new


_known = _Seen()


def forget() -> None:
    """Forgets all calls and plans; also in a forked process, where another thread may have held the lock."""
    global _known
    _known = _Seen()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=forget)


def begin_call(asked: Asked, *, is_backward: bool = False, wanted: Sequence[int] = ()) -> None:
    """Begins to compile what such a pass needs over the plans that were made lately, and over those to come.

    Args:
        asked: what is asked for.
        is_backward: whether it is a backward.
        wanted: the numbers of the captured tensors whose gradients that makes.
    """
    if _compat.is_in_use(asked.device):
        _known.add_call(CallKind(asked, is_backward, tuple(wanted)))


def begin_plan(plan: Staged, rows: int, device: torch.device, *, is_early: bool) -> None:
    """Begins to compile what the passes that were seen before need over a plan, and those to come.

    Args:
        plan: of this rank.
        rows: of the rank.
        device: where it is put.
        is_early: whether the stages of the forward, if they are two, are one call.
    """
    if _compat.is_in_use(device):
        _known.add_plan(PlanKind.of(plan, rows, device, is_early=is_early))


def _begin(call: CallKind, plan: PlanKind) -> None:
    asked, is_backward, wanted = call
    _, problem, packing, kernel, is_early = asked.choice(plan.entries, has_bits=plan.has_bits)
    if kernel is None:
        return
    tables = [torch.empty((1,) * dim, dtype=dtype, device="meta") for dtype, dim in asked.tables]
    early = plan.early if is_early and not is_backward else None
    walked = plan.backward if is_backward else plan.forward if early is None else (early,)
    for sizes in (x for stage in walked for x in stage.packed(packing)):
        made = kernel.plan_of_sizes(*sizes, problem, plan.device)
        kernel.begin_plan(made, problem)
        score = _score_of(asked, tables, packing, sizes)
        if is_backward:
            deterministic = asked.deterministic
            kernel.begin_backward(problem, score, wanted=wanted, deterministic=deterministic)
            continue
        if len(walked) > 1:  # a pass that is merged with others stays whole
            made = made._replace(splits=None)
        kernel.begin_forward(made, problem, score, is_early=early is not None)


def _score_of(
    asked: Asked, tables: list[Tensor], packing: Packing, sizes: Walked
) -> ScoreCall | None:
    if not asked.score:
        return None
    seqlens = sizes.total_q // packing.queries, sizes.total_k // packing.keys
    nheads = packing.nheads if packing.by_head else 1
    return ScoreCall(ScoreProgram.parse(asked.score), tables, (), *seqlens, nheads)
