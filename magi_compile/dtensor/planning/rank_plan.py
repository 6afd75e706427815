"""The plan of one rank: a mask's plan for attention across ranks, made on the host and shipped as tensors.

A plan is two int tensors, so that a compiled graph takes it as a value: a new mask is new numbers, never a new
graph. `meta` (int64, CPU) holds digest, rank and the bytes of all that the host reads; `data` (int32, the device of q)
the blocks of bits, and then for each stage its slices, their entries, and the rows that it sends and receives, by each
of its ways.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from threading import Lock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.call.ahead import begin_plan
from magi_compile.dtensor.on_device import Streams, to_device
from magi_compile.dtensor.planning.chunks import Placement
from magi_compile.dtensor.planning.comm_plan import (
    RankRows,
    Stage,
    StageLoads,
    Transfer,
    plan_communication,
)
from magi_compile.dtensor.planning.cost import DEFAULT_COST, CostModel
from magi_compile.dtensor.planning.cover import ONE_ENTRY, Cover, Entries, bytes_of
from magi_compile.dtensor.planning.dispatch import (
    Dispatch,
    StrategyName,
    check_masks,
    check_strategy,
    dispatch_as,
    dispatch_packed,
    dispatch_together,
)
from magi_compile.dtensor.planning.hosts import check_hosts, hosts_of
from magi_compile.dtensor.planning.local_cover import cover_of_rank
from magi_compile.dtensor.planning.one_thread import one_thread
from magi_compile.dtensor.planning.stages import choose_pass
from magi_compile.masks.arguments import check_count, check_device, check_flag
from magi_compile.masks.slices import AttnSlices
from magi_compile.ops.validation import check_number

CACHE_SIZE = 64
MOST_BITS = 1 << 30  # bytes of blocks of bits in all plans that are kept, but for the newest


@dataclass(frozen=True, kw_only=True)
class ContextParallelOptions:
    """Options for spreading a sequence over ranks.

    Attributes:
        strategy: who holds what: "local", "sequential", "zigzag" or "min_heap".
        chunk_size: tokens that stay together; None chooses by the mask.
        slack: by what share the heaviest rank may exceed the mean in favour of less communication.
        degree: remote stages of the forward pass, 0 for a single call; None asks the cost model.
        backward_degree: the same for the backward pass.
        early: whether a forward pass with degree 0 may begin before remote keys arrive, where the kernel can and `cost`
            says that it pays.
        cost: the rates of computation and communication, of all heads that a call has on a rank.
        hosts: which ranks reach each other by fast links: the host of each rank, (0, 0, 1, 1), or how many neighbours
            share one. None: `plan` takes what torchrun says, `plan_rank` takes all to be on one. Where ranks share
            heads, those of all ranks for `plan`, and of groups for `plan_rank`.
        hierarchical: whether rows cross hosts once for each host that needs them, and are handed on there. None asks
            the cost model.
        head_ranks: how many neighbouring ranks share the heads of their tokens. `plan` divides its ranks into groups
            of so many; for `plan_rank` a rank is such a group, and a row has a rank's share of the heads. None: `plan`
            asks the cost model where it knows the hosts and `cost` says of how many heads it is, and 1 otherwise.
    """

    strategy: StrategyName = "local"
    chunk_size: int | None = None
    slack: float = 0.01
    degree: int | None = None
    backward_degree: int | None = None
    early: bool = True
    cost: CostModel = DEFAULT_COST
    hosts: int | Sequence[int] | None = None
    hierarchical: bool | None = None
    head_ranks: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("chunk_size", 1), ("degree", 0), ("backward_degree", 0)):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value, least)
        if self.head_ranks is not None:
            check_count("head_ranks", self.head_ranks, 1)
        check_strategy(self.strategy)
        check_number("slack", self.slack)
        check_flag("early", self.early)
        if self.hierarchical is not None:
            check_flag("hierarchical", self.hierarchical)
        check_hosts(self.hosts)
        if isinstance(self.hosts, Sequence):  # for a hash and a digest
            object.__setattr__(self, "hosts", tuple(self.hosts))
        if not isinstance(self.cost, CostModel):
            raise TypeError(f"`cost` must be a CostModel, got {type(self.cost).__name__}")


class PlanTensors(NamedTuple):
    """A plan as the ops take it."""

    meta: Tensor  # int64, on the CPU
    data: Tensor  # int32, on the device of q, k, v


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's plan. `digest` is the same on all ranks if and only if they plan the same mask alike.

    Where `forward_is_early`, the two forward stages are one: its local keys and its remote ones. Where
    `forward_may_be_early`, they are so under some masks with such options. `bits` are the blocks of bits of all stages,
    if the mask has some, and `entries` the batch entries and heads with masks of their own. `moving` is the dispatch of
    the rows that move: `dispatch` itself, or, where batch entries have masks of their own, that of the rows of all of
    them, one entry behind the other, which stages are over. `hosts` is the host of each rank, None where all are on
    one; `relayed` says of the forward and the backward whether all of its transfers have legs. Where `head_ranks` ranks
    share heads, a rank of the plan is a group of so many.
    """

    dispatch: Dispatch
    moving: Dispatch
    rank: int
    digest: int
    forward: list[Stage]
    backward: list[Stage]
    forward_is_early: bool = False
    forward_may_be_early: bool = False
    bits: Tensor | None = None
    entries: Entries = ONE_ENTRY
    hosts: tuple[int, ...] | None = None
    relayed: tuple[bool, bool] = (False, False)
    head_ranks: int = 1
    _packed: dict[torch.device, PlanTensors] = field(default_factory=dict, repr=False)
    _streams: Streams = field(default_factory=Streams, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without the tensors on devices, which other processes do not have."""
        return {**vars(self), "_packed": {}, "_streams": Streams()}

    @property
    def rows(self) -> int:
        """Rows of a rank."""
        return self.dispatch.seqlen_local

    @property
    def key_rows(self) -> int:
        """Keys of a rank."""
        return self.dispatch.keys.seqlen_local

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return self.dispatch.cp_size

    def tensors(self, device: torch.device | str) -> PlanTensors:
        """The plan for the ops; made once per device. It is there in the order of the current stream."""
        device = check_device(device)
        if device not in self._packed:
            packed = self._packed[device] = self._pack(device)
            begin_plan(self, packed.data.device)
        tensors = self._packed[device]
        self._streams.enter(device, tensors.data)
        return tensors

    @_compat.outside_of_modes()
    def _pack(self, device: torch.device) -> PlanTensors:
        where = self.dispatch
        data: list[Tensor] = []

        def laid(x: Tensor) -> tuple[int, ...]:
            data.append(x.flatten().int())
            return tuple(x.shape)

        def way(x: Transfer) -> tuple[Any, ...]:
            table = torch.cat([x.sends, x.recvs])
            numbers = (len(x.sends), x.send_counts, x.recv_counts, x.peak_received)
            return table.flatten().tolist(), laid(table), numbers

        def stage(x: Stage) -> tuple[Any, ...]:
            lists = [laid(x.slices.q_ranges), laid(x.slices.k_ranges), laid(x.slices.mask_types)]
            entry = laid(x.entry) if x.entry is not None and self.entries.heads > 1 else None
            ways = [] if x.transfer is None else [x.transfer, *(x.transfer.legs or ())]
            return lists, entry, x.slices.seqlen_k, [way(x) for x in ways], x.rows_before

        sizes = (self.cp_size, self.rows, self.key_rows)
        of_mask = (None if self.bits is None else tuple(self.bits.shape), tuple(self.entries))
        placements = [
            None if x is None else (x.total, x.chunk_size, x.chunks.tolist())
            for x in (where, where.other_keys)
        ]
        passes = [[stage(x) for x in stages] for stages in (self.forward, self.backward)]
        early = (self.forward_is_early, self.forward_may_be_early)
        rest = (*early, self.hosts, self.relayed, self.head_ranks)
        text = pickle.dumps((sizes, of_mask, placements, passes, rest), pickle.HIGHEST_PROTOCOL)
        words = array("q", [self.digest, self.rank])
        words.frombytes(text.ljust(-(-len(text) // 8) * 8, b"\0"))
        # Never fewer than two entries, which Dynamo would take for a constant size: the next plan would compile again.
        flat = torch.cat([*data, torch.zeros(2, dtype=torch.int32, device="cpu")])
        flat = to_device(flat, device)
        if self.bits is not None:  # in front, where their rows are aligned as kernels read them
            flat = torch.cat([to_device(self.bits, device).flatten(), flat])
        return PlanTensors(torch.frombuffer(words, dtype=torch.int64), flat)


def plan_rank(
    slices: AttnSlices,
    cp_size: int,
    rank: int,
    options: ContextParallelOptions = ContextParallelOptions(),
) -> RankPlan:
    """The plan of one rank, without communication; recent plans are kept.

    Args:
        slices: the mask over the whole sequence, the same on every rank.
        cp_size: number of ranks.
        rank: this rank.
        options: the same on every rank.

    Returns:
        The plan.

    Raises:
        ValueError: if an argument is out of range.
    """
    return plan_rank_together([slices], cp_size, rank, options)[0]


@one_thread()
@_compat.outside_of_modes()
@_compat.without_autograd()
def plan_rank_together(
    masks: Sequence[AttnSlices],
    cp_size: int,
    rank: int,
    options: ContextParallelOptions = ContextParallelOptions(),
    *,
    weights: Sequence[int] | None = None,
    permutation: Tensor | Placement | None = None,
    keys: Sequence[Placement | None] | None = None,
) -> list[RankPlan]:
    """The plans of one rank for several masks of one sequence, whose tokens have one placement. As `plan_rank`;
    `weights` and `keys` as in `dispatch_together`. `permutation` says where tokens lie already, as in `dispatch_as`;
    `options` then have no say in it."""
    weights = [1] * len(masks) if weights is None else list(weights)
    check_masks(masks, weights)
    check_count("cp_size", cp_size, 1)
    check_count("rank", rank, 0)
    if not isinstance(options, ContextParallelOptions):
        raise TypeError(f"`options` must be ContextParallelOptions, got {type(options).__name__}")
    if rank >= cp_size:
        raise ValueError(f"`rank` must be in [0, cp_size = {cp_size}), got {rank}")
    if options.head_ranks is None:
        options = replace(options, head_ranks=1)
    contents = [_content_of(mask, cp_size) for mask in masks]
    # One plan is the same whatever its weight.
    others = [] if len(masks) == 1 else [_bytes_of(-1, *weights), *contents]
    if isinstance(permutation, Placement):
        others += [_bytes_of(-4), _content_of_placement(permutation)]
    elif permutation is not None:
        others += [_bytes_of(-2), bytes_of(permutation)]
    for placement in keys or []:
        others += [_bytes_of(-3), b"" if placement is None else _content_of_placement(placement)]
    rest = b"".join([*others, _text_of(options)])
    digests = [_digest(content + rest) for content in contents]

    share = options.head_ranks
    assert share is not None
    options = replace(options, cost=options.cost.of_share(share)) if share > 1 else options

    def make() -> list[RankPlan]:
        if permutation is not None:
            wheres = dispatch_as(masks, cp_size, permutation, keys)
        else:
            names = ("chunk_size", "strategy", "slack", "cost")
            chosen = {name: getattr(options, name) for name in names}
            chosen["hosts"] = hosts_of(options.hosts, cp_size)
            chosen["multiple"] = share
            wheres = dispatch_together(masks, weights, cp_size, **chosen, keys=keys)
        if share > 1:
            _check_share(wheres, share)
        return [
            _plan(where, rank, options, digest, mask)
            for where, digest, mask in zip(wheres, digests, masks, strict=True)
        ]

    return _plans.get([(digest, rank) for digest in digests], make)


def _check_share(wheres: Sequence[Dispatch], head_ranks: int) -> None:
    """Raises where ranks that share heads cannot hold equal parts of the rows or keys of their group."""
    for where in wheres:
        for rows, what in ((where.seqlen_local, "tokens"), (where.keys.seqlen_local, "keys")):
            if rows % head_ranks:
                raise ValueError(
                    f"`head_ranks` of ContextParallelOptions must divide the {rows} {what} of each of "
                    f"{where.cp_size} groups of ranks, got {head_ranks}; give a `chunk_size` that it divides, or "
                    "tokens that lie so"
                )


def plan_rank_ahead(
    slices: AttnSlices,
    cp_size: int,
    rank: int,
    options: ContextParallelOptions = ContextParallelOptions(),
    device: torch.device | str | None = None,
) -> Future[RankPlan]:
    """`plan_rank` on a thread of its own, with the same arguments, for the next batch while this one is computed; plans
    queue up. See `plan_ahead` for `plan`.

    Once done, `plan_rank` finds the plan too. The future belongs to this process: in a fork, for example a worker of a
    DataLoader, ask again.

    Args:
        slices: the mask of the whole sequence, on the host.
        cp_size: ranks.
        rank: of the plan, in `[0, cp_size)`.
        options: of the plan.
        device: on which the plan's tensors are put; None leaves that to `RankPlan.tensors`.

    Returns:
        A future whose `result()` gives the plan, or raises as `plan_rank` does.

    Raises:
        TypeError: `device` is no device.
        ValueError: it is one that this machine lacks.
    """
    where = None if device is None else check_device(device)

    def run() -> Callable[[], RankPlan]:
        plan = plan_rank(slices, cp_size, rank, options)

        def placed() -> RankPlan:
            if where is not None:
                plan.tensors(where)
            return plan

        return placed

    return Ahead(planner().submit(run), where)


class Ahead(Future[Any]):
    """Gives what a thread has planned, on the device: in the order of the stream of who asks, because on a stream of
    the thread's own the host would have to wait until the plan has arrived, behind all that the GPU does. `planned`
    gives the function that puts the plan on `device`, which is None if it stays on the host."""

    def __init__(self, planned: Future[Callable[[], Any]], device: torch.device | None = None):
        super().__init__()
        self._planned, self._lock, self._device = planned, Lock(), device
        self._streams = Streams()
        self._made: list[Any] = []
        planned.add_done_callback(self._pass_on)

    def _pass_on(self, planned: Future[Callable[[], Any]]) -> None:
        if planned.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif self.set_running_or_notify_cancel():
            error = planned.exception()
            if error is None:
                self.set_result(planned.result())
            else:
                self.set_exception(error)

    def cancel(self) -> bool:
        return self._planned.cancel()

    def running(self) -> bool:
        return self._planned.running()

    def result(self, timeout: float | None = None) -> Any:
        placed = super().result(timeout)
        with self._lock:
            if not self._made:
                self._made.append(placed())
            if self._device is not None:
                self._streams.enter(self._device)
            return self._made[0]


@cache
def planner() -> ThreadPoolExecutor:
    """The thread that plans ahead, of this process."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="magi-plan")


class Planned(Protocol):
    """A plan that is kept."""

    @property
    def bits(self) -> Tensor | None: ...


_Kept = TypeVar("_Kept", bound=Planned)


class Recent(Generic[_Kept]):
    """Recent plans by key, for several threads: no more than `CACHE_SIZE`, nor, but for the newest `least`, more than
    `MOST_BITS` of blocks of bits. Those of one request are kept together."""

    def __init__(self, least: int = 1):
        self.plans: OrderedDict[Hashable, _Kept] = OrderedDict()
        self.lock, self._least = Lock(), least
        _all_recent.append(self)

    def get(self, keys: Sequence[Hashable], make: Callable[[], Sequence[_Kept]]) -> list[_Kept]:
        """The plans of `keys`, which are the newest from now on; `make` makes all of them if one is missing."""
        found: list[_Kept] = []
        with self.lock:
            for key in keys:
                if (plan := self.plans.get(key)) is not None:
                    self.plans.move_to_end(key)
                    found.append(plan)
        if len(found) == len(keys):
            return found
        made = make()
        with self.lock:
            kept = [self.plans.setdefault(key, x) for key, x in zip(keys, made, strict=True)]
            for key in keys:
                self.plans.move_to_end(key)
            while len(self.plans) > max(CACHE_SIZE, len(keys)):
                self.plans.popitem(last=False)
            if any(x.bits is not None for x in kept):
                least = max(self._least, len(keys))
                while len(self.plans) > least and self._num_bytes() > MOST_BITS:
                    self.plans.popitem(last=False)
        return kept

    def _num_bytes(self) -> int:
        return sum(0 if x.bits is None else x.bits.nbytes for x in self.plans.values())

    def clear(self) -> None:
        with self.lock:
            self.plans.clear()


_all_recent: list[Recent[Any]] = []
_plans: Recent[RankPlan] = Recent()
forget = _plans.clear


def _begin_anew() -> None:
    """In a forked process, which has neither the planner's thread nor whoever may hold a lock."""
    for recent in _all_recent:
        recent.lock = Lock()
    planner.cache_clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_anew)


def _plan(
    where: Dispatch, rank: int, options: ContextParallelOptions, digest: int, mask: AttnSlices
) -> RankPlan:
    moving, given, entries = where, mask, ONE_ENTRY
    if isinstance(given, Cover):
        entries = given.entries
        if entries.batch > 1:
            moving, mask = dispatch_packed(where, given)
    rows, hosts = RankRows.of(moving), hosts_of(options.hosts, where.cp_size)
    degree, backward_degree = options.degree, options.backward_degree
    # No kernel begins early with blocks of bits, nor with heads that have masks of their own.
    early = options.early and options.cost.starts_early and not isinstance(mask, Cover)
    may_be_early = early and options.degree in (None, 0) and where.cp_size > 1
    is_early, relayed = False, options.hierarchical if hosts is not None else False
    is_relayed = [bool(relayed)] * 2
    host = None if hosts is None else torch.tensor(hosts, device="cpu")
    if None in (degree, backward_degree, relayed) or (early and degree == 0):
        loads, cost = StageLoads.of(rows, host), options.cost
        way = choose_pass(loads, cost, degree=degree, early=early, relayed=relayed)
        back = choose_pass(loads, cost, degree=backward_degree, backward=True, relayed=relayed)
        is_early, is_relayed = way.is_early, [way.is_relayed, back.is_relayed]
        degree, backward_degree = 1 if is_early else way.degree, back.degree
    assert degree is not None
    assert backward_degree is not None
    degrees = sorted({degree, backward_degree})
    communication = plan_communication(rows, degrees, host if any(is_relayed) else None)
    bits = None
    if isinstance(mask, Cover):
        assert isinstance(given, Cover)
        local = cover_of_rank(mask, given, communication, rank)
        plans = local.stages
        # On every rank of a mask with blocks, also where a rank has none: ranks choose kernels alike.
        bits = local.bits if len(mask.blocks) else None
    else:
        plans = [
            [stage._replace(whole=None) for stage in stages]
            for stages in communication.stages(rank)
        ]
    forward, backward = (
        plans[degrees.index(x)]
        if has_legs
        else [stage.without_legs() for stage in plans[degrees.index(x)]]
        for x, has_legs in zip((degree, backward_degree), is_relayed, strict=True)
    )
    of_mask = (forward, backward, is_early, may_be_early, bits, entries)
    ways = (is_relayed[0], is_relayed[1])
    assert options.head_ranks is not None
    return RankPlan(where, moving, rank, digest, *of_mask, hosts, ways, options.head_ranks)


def _content_of(slices: AttnSlices, cp_size: int) -> bytes:
    sizes = _bytes_of(slices.seqlen_q, slices.seqlen_k, cp_size, len(slices))
    lists = map(bytes_of, slices.lists)
    return b"".join([sizes, *lists, slices.content if isinstance(slices, Cover) else b""])


def _content_of_placement(placement: Placement) -> bytes:
    return _bytes_of(placement.chunk_size, *placement.chunks.shape) + bytes_of(placement.chunks)


@lru_cache
def _text_of(options: ContextParallelOptions) -> bytes:
    return repr(options).encode()


def _bytes_of(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


def _digest(content: bytes) -> int:
    """63 bits that two different plans do not share."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
