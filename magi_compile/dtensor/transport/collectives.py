"""Group collectives, the contract: rows go exactly where they are needed, and partial results come home.

    cast      home rows -> buffers    every rank gets the rows its route names, each once
    reduce    buffers -> home rows    the same way back; what arrives for one row adds up in fp32

Implementations of `Collective` are listed in `COLLECTIVES` and found by `select`.

Ranks call in the same order with the same number of routes, also those that neither send nor receive. Nothing makes
the host wait for the device: a call enqueues work behind what the current stream holds, `PendingCast.wait` and
`PendingReduce.write_sums` make the current stream wait for it. Meanwhile the caller computes on the current stream, and
may start a reduce while a cast is under way. The tensors of a cast are neither written nor freed before the iterator
is exhausted, which happens right after the last `wait`; those of a reduce not before its `write_sums`. Buffers belong
to the caller.

Sums add up in a fixed order, so that equal inputs give equal bits: what the rank itself has, what others of its host
have by rank, and then host by host what all ranks of that host have together, added up by rank in fp32 and rounded to
the dtype that travels. That order is the same whether a host adds up its part (`hierarchical`) or the rank whose rows
they are does. Where all ranks are on one host, it is the rank itself and then the others by rank.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.on_device import to_device

logger = logging.getLogger("magi_compile")

_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's share of a collective: ranges of rows, in the columns `peer, row, peer_row, count`.

    Between two ranks, ranges come in the same order on both sides. Home rows may go to several ranks; no row goes to
    one rank twice. The rows of the buffer are `0 .. num_received - 1`, each filled once.

    Legs are the same rows by way of relays (`planning/relays.py`): home rows to buffers, and then rows of buffers to
    others of the same host. The two together fill each row of the buffer once, and the first one rows behind it, which
    are there to be handed on.
    """

    # int32 `[num, 4]` on the device of the data, ordered by peer, which may be the rank itself: home rows from `row` on
    # go to the rows from `peer_row` on in the buffer of `peer`; rows of the buffer are home rows of `peer` likewise.
    sends: Tensor
    recvs: Tensor
    host_sends: Tensor  # the same on the CPU
    host_recvs: Tensor
    send_counts: list[int]  # rows sent to each rank
    recv_counts: list[int]  # rows received from each rank
    peak_received: int  # the largest `num_received` of any rank
    num_received: int  # rows of the buffer
    # That of each rank; None where all are on one, or nobody knows
    hosts: tuple[int, ...] | None = None
    legs: tuple[Route, Route] | None = None  # if they are planned
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        on_host: Tensor,
        on_device: Tensor,
        num_sends: int,
        send_counts: list[int],
        recv_counts: list[int],
        peak_received: int,
        hosts: tuple[int, ...] | None = None,
    ) -> Route:
        """A route of its sends and, behind them, its recvs, int32 `[num, 4]`."""
        halves = ((x[:num_sends], x[num_sends:]) for x in (on_device, on_host))
        (sends, recvs), (host_sends, host_recvs) = halves
        numbers = (send_counts, recv_counts, peak_received, sum(recv_counts))
        return Route(sends, recvs, host_sends, host_recvs, *numbers, hosts)

    def part(
        self, received: tuple[int, int], held: tuple[int, int], firsts: list[int], peak: int
    ) -> Route:
        """The route of a part of the rows, without legs: the rows `received` of the buffer, which are all those of the
        home rows `held` of any rank. Both are numbered from 0 on; in the buffer of rank r from `firsts[r]` on."""
        firsts_of = torch.tensor(firsts, dtype=torch.int32, device="cpu")

        def clipped(ranges: Tensor, begin: int, end: int) -> Tensor:
            """The ranges of these rows, which are numbered from 0 on."""
            peer, row, peer_row, count = ranges.unbind(1)
            low, high = row.clamp(min=begin), (row + count).clamp(max=end)
            found = torch.stack([peer, low - begin, peer_row + low - row, high - low], 1)
            return found[low < high]

        sends, recvs = clipped(self.host_sends, *held), clipped(self.host_recvs, *received)
        sends[:, 2] -= firsts_of[sends[:, 0].long()]
        recvs[:, 2] -= held[0]
        none = torch.zeros(len(firsts), dtype=torch.int32, device="cpu")
        sent, arriving = (
            none.index_add(0, x[:, 0].long(), x[:, 3]).tolist() for x in (sends, recvs)
        )
        ranges = torch.cat([sends, recvs])
        on_device = to_device(ranges, self.sends.device)
        return Route.of(ranges, on_device, len(sends), sent, arriving, peak, self.hosts)

    @staticmethod
    def of_peers(
        rank: int, peers: Sequence[Sequence[int]], rows: int, device: torch.device
    ) -> Route:
        """That of `rank` where each rank sends its first `rows` rows to each of its `peers`, whose peer it is."""
        mine = peers[rank]
        sends = [[peer, 0, peers[peer].index(rank) * rows, rows] for peer in mine]
        recvs = [[peer, i * rows, 0, rows] for i, peer in enumerate(mine)]
        ranges = torch.tensor(sends + recvs, dtype=torch.int32, device="cpu").view(-1, 4)
        counts = [rows if peer in mine else 0 for peer in range(len(peers))]
        peak = rows * max(map(len, peers))
        return Route.of(ranges, ranges.to(device), len(mine), counts, counts, peak)

    def derive(self, make: Callable[..., _Made], *arguments: int) -> _Made:
        """`make(self, *arguments)`, made once: what an implementation needs of the route, kept under that function
        alone, with the same arguments in each call. Raises RuntimeError if it would have to be made while a graph is
        being captured."""
        if make not in self._derived:
            refuse_to_be_recorded(self.sends)
            with _compat.outside_of_modes():
                self._derived[make] = make(self, *arguments)
        return self._derived[make]


def is_recorded(device: torch.device) -> bool:
    """True if a graph is being captured of what is called on `device`."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


def refuse_to_be_recorded(x: _OnDevice) -> None:
    """Called where something is computed from a plan on the device of `x`, to be kept: raises RuntimeError while a
    graph is being captured, which would record it, so that what is kept would hold nothing before the first replay."""
    if is_recorded(x.device):
        raise RuntimeError(
            "the first use of a plan allocates tables on the device, which a CUDA graph cannot capture: "
            "run one warm-up step before the capture"
        )


class derived(cached_property[_Made]):
    """A cached property that is computed from a plan, whatever the caller's modes are. Its object has a `device`.

    Raises RuntimeError if it is asked for first while a graph is being captured.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or self.attrname in vars(instance):
            return super().__get__(instance, owner)
        refuse_to_be_recorded(instance)
        with _compat.outside_of_modes():
            return super().__get__(instance, owner)


class PendingCast(Protocol):
    """A cast under way."""

    sms: int  # that it may still be waiting for, so that attention beside it had better leave them free

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The result of `wait`, before the rows are there."""
        ...

    def wait(self) -> Sequence[Tensor]:
        """The buffers `[num_received, ...]`, in the order of the tensors that were cast."""
        ...


class PendingReduce(Protocol):
    """A reduce under way."""

    def write_sums(self, outs: Sequence[Tensor], prior: Sequence[Tensor] | None = None) -> None:
        """Writes the contiguous `outs [rows, ...]`, of one dtype, in the order of the reduced tensors: what arrives, on
        top of the contiguous `prior` of the same shapes if there is one. Added up in fp32 or wider, rounded once."""
        ...


class Collective(Protocol):
    """One implementation. Instances hold no state but caches."""

    name: str

    def refusals(self, group: dist.ProcessGroup, device: torch.device) -> list[str]:
        """Every reason why this cannot serve; empty when it can. The same on every rank of `group`."""
        ...

    def casts(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
    ) -> Iterator[PendingCast]:
        """Casts of `tensors [rows, ...]`, of one dtype, one for each route; the next starts at each `next`."""
        ...

    def outbox(
        self, like: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> Sequence[Tensor]:
        """Contiguous buffers `[num_received, ...]` with rows like those of the tensors `like`, which the next
        `start_reduce` on `route` sends from where they are, without another copy.

        Not while a reduce is under way: the current stream may wait for its end before it may write to them.
        """
        ...

    def start_reduce(
        self, tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup
    ) -> PendingReduce:
        """Starts to send the rows of the buffers `tensors [num_received, ...]`, of one dtype, home."""
        ...

    def release(self, group: dist.ProcessGroup) -> None:
        """Lets go what waits on this process's devices for ranks of `group` that do not come: once more each time,
        since streams may wait again. For an error: what they go on with is wrong. Called on another thread."""
        ...


#: As a caller may ask for a collective: "auto" takes the first of `COLLECTIVES` that serves.
CollectiveName: TypeAlias = Literal["auto", "native", "hierarchical", "all_to_all"]

HIERARCHICAL = "hierarchical"  # takes routes that have legs, and no others

# "module:Class" by name, in order of preference; resolved at first use.
COLLECTIVES: dict[str, str] = {
    HIERARCHICAL: "magi_compile.dtensor.transport.hierarchical:Hierarchical",
    "native": "magi_compile.dtensor.transport.native:NativeCollective",
    "all_to_all": "magi_compile.dtensor.transport.all_to_all:AllToAll",
}


def select(
    name: str, group: dist.ProcessGroup, device: torch.device, *, has_legs: bool = False
) -> Collective:
    """The implementation called `name`, or for "auto" the first of `COLLECTIVES` that refuses nothing, of which there
    is one instance; why the others do is logged. `has_legs` says if all routes of the plan have legs.

    Raises ValueError if there is none of that name, and NotImplementedError, with all reasons, if every considered one
    refuses.
    """
    chosen, key = _chosen.setdefault(group, {}), (name, device, has_legs)
    if key not in chosen:
        chosen[key] = _select(name, group, device, has_legs=has_legs)
    return chosen[key]


def release(group: dist.ProcessGroup) -> None:
    """`Collective.release` of all that move rows in this process."""
    for collective in list(_loaded.values()):
        collective.release(group)


_chosen: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Collective]] = WeakKeyDictionary()


def check_collective(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"`collective` must be a name, got {name!r}")
    if name != "auto" and name not in COLLECTIVES:
        raise ValueError(
            f"`collective` must be one of auto, {', '.join(COLLECTIVES)}, got {name!r}"
        )


def _select(
    name: str, group: dist.ProcessGroup, device: torch.device, *, has_legs: bool
) -> Collective:
    check_collective(name)
    if name == HIERARCHICAL and not has_legs:
        raise NotImplementedError(
            "`collective` 'hierarchical' needs a plan of several hosts that was made for it: "
            "ContextParallelOptions(hosts=..., hierarchical=True)"
        )
    reasons: list[str] = []
    for considered in COLLECTIVES if name == "auto" else (name,):
        if considered == HIERARCHICAL and not has_legs:
            continue
        try:
            collective = _load(considered)
        except ImportError as error:
            refusals = [f"cannot be imported: {error}"]
        else:
            refusals = collective.refusals(group, device)
        if not refusals:
            if reasons and group.rank() == 0:
                listed = "\n".join(reasons)
                logger.info("the collective for %s is %s, because\n%s", device, considered, listed)
            return _load(considered)
        reasons += [f"  {considered}: {why}" for why in refusals]
    listed = "\n".join(reasons)
    raise NotImplementedError(f"no collective can move rows on {device}:\n{listed}")


_loaded: dict[str, Collective] = {}


def _load(name: str) -> Collective:
    if name not in _loaded:
        module_name, _, class_name = COLLECTIVES[name].partition(":")
        _loaded[name] = getattr(importlib.import_module(module_name), class_name)()
    return _loaded[name]
