"""Moving rows between ranks: point-to-point rings of one level or more, gathers, and the exchange of all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_bench.world import TIMEOUT, World

#: Whether rows stay where they are; those that would come are others of as many bytes.
_stays = False


@contextmanager
def without_moves() -> Iterator[None]:
    """Lets nothing move, in all threads of this process: what is left of a call is its computation."""
    global _stays
    _stays = True
    try:
        yield
    finally:
        _stays = False


# Rings


class Ring(NamedTuple):
    """One level of a ring, seen from one of its ranks."""

    ranks: list[int]  # of the whole group, in the order in which rows pass through them
    place: int  # which of them is this one
    keys: dist.ProcessGroup  # the lane of keys and values
    gradients: dist.ProcessGroup  # the lane of their gradients, which must not wait behind keys

    @property
    def size(self) -> int:
        return len(self.ranks)

    def pass_on(self, held: Sequence[Tensor], num_rows: int, lane: dist.ProcessGroup) -> Coming:
        """Sends all of `held` to the next rank; `num_rows` of each come from the one before."""
        held = [x.contiguous() for x in held]
        if _stays:
            same = len(held[0]) == num_rows
            return Coming([], held if same else [_rows(x, num_rows) for x in held], [])
        coming = [x.new_empty(num_rows, *x.shape[1:]) for x in held]
        ahead, behind = (self.ranks[(self.place + i) % self.size] for i in (1, -1))
        moves = [
            *((dist.isend, x, ahead, tag) for tag, x in enumerate(held)),
            *((dist.irecv, x, behind, tag) for tag, x in enumerate(coming)),
        ]
        ops = [dist.P2POp(*move[:3], lane, move[3]) for move in moves if move[1].numel()]
        return Coming(held, coming, dist.batch_isend_irecv(ops) if ops else [])


def _rows(x: Tensor, num_rows: int) -> Tensor:
    """So many rows, as if they had come: those of `x`, and zeros behind them."""
    rest = x.new_zeros(max(num_rows - len(x), 0), *x.shape[1:])
    return torch.cat([x[:num_rows], rest])


class Coming(NamedTuple):
    """Rows that are on their way, and those that went out with them, which must stay as they are until then."""

    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    works: Sequence[dist.Work]

    def wait(self) -> Sequence[Tensor]:
        """The rows, for the current stream."""
        for work in self.works:
            work.wait()
        return self.received


class Rings(NamedTuple):
    """A ring of ranks, or a ring of windows of ranks with a ring in each: rows pass through a window, and then the
    window's rows go on to the next one."""

    levels: tuple[Ring, ...]  # the outermost first
    rows: Sequence[int]  # of each owner, in the order of windows and of places in them

    @property
    def place(self) -> int:
        """The number of this rank among the owners."""
        place = 0
        for ring in self.levels:
            place = place * ring.size + ring.place
        return place

    def inner(self, window: int) -> Rings:
        """One window, whose rows this rank will meet."""
        size = len(self.rows) // self.levels[0].size
        return Rings(self.levels[1:], self.rows[window * size : (window + 1) * size])

    def owners(self) -> list[int]:
        """The owners whose rows this rank meets, in that order; the first is itself."""
        if not self.levels:
            return [0]
        ring, found = self.levels[0], []
        for step in range(ring.size):
            window = (ring.place - step) % ring.size
            inner = self.inner(window)
            found += [window * len(inner.rows) + owner for owner in inner.owners()]
        return found

    def received(self) -> tuple[int, int]:
        """The rows that come to this rank: of keys, and of gradients."""
        if not self.levels:
            return 0, 0
        ring = self.levels[0]
        windows = [self.inner(window) for window in range(ring.size)]
        parts = [window.received() for window in windows]
        keys, gradients = (sum(x) for x in zip(*parts, strict=True))
        passing = [window.rows[window.place] for window in windows]
        if ring.size > 1:
            gradients += sum(passing)
        return keys + sum(passing) - passing[ring.place], gradients


def around(held: Sequence[Tensor], rings: Rings) -> Iterator[Sequence[Tensor]]:
    """The rows of all `rings.owners()`, one after the other, beginning with those that are `held`. The next ones travel
    while the caller works on these; of a window of windows, all the while that its rows pass through this one."""
    if not rings.levels:
        yield held
        return
    ring = rings.levels[0]
    for step in range(ring.size):
        window, coming = (ring.place - step) % ring.size, None
        if step + 1 < ring.size:
            coming = ring.pass_on(held, _passing(rings, window - 1), ring.keys)
        yield from around(held, rings.inner(window))
        if coming is not None:
            held = coming.wait()


#: Adds a step's share of the gradients of rows that passed by to those that come with them, if any do, in their memory:
#: `add(held, coming) -> total`.
Add = Callable[[Sequence[Tensor], Coming | None], Sequence[Tensor]]


def there_and_back(
    held: Sequence[Tensor], rings: Rings, add: Add, before: Coming | None = None
) -> Sequence[Tensor]:
    """Takes rows around as `around` does, and their gradients one step behind them until they are home. `add` is
    called for the rows of all `rings.owners()` in turn; `before` are the gradients of `held` by ranks that had them
    before, on their way."""
    if not rings.levels:
        return add(held, before)
    ring, total = rings.levels[0], before
    for step in range(ring.size):
        window, coming = (ring.place - step) % ring.size, None
        if step + 1 < ring.size:
            coming = ring.pass_on(held, _passing(rings, window - 1), ring.keys)
        gradients = there_and_back(held, rings.inner(window), add, total)
        if ring.size == 1:
            return gradients
        total = ring.pass_on(gradients, _passing(rings, window - 1), ring.gradients)
        if coming is not None:
            held = coming.wait()
    assert total is not None
    return total.wait()


def _passing(rings: Rings, window: int) -> int:
    """The rows that a window's rank at this rank's place in it has."""
    inner = rings.inner(window % rings.levels[0].size)
    return inner.rows[inner.place]


def group_of(world: World, parts: Sequence[Sequence[int]], name: str = "") -> dist.ProcessGroup:
    """The group of this rank among `parts` of all ranks; made when first asked for, by all ranks together. Other names
    are other lanes: no sort of moves waits behind another."""
    return _connected(world.group, tuple(map(tuple, parts)), name, world.device)


@cache
def _connected(
    everyone: dist.ProcessGroup, parts: tuple[tuple[int, ...], ...], name: str, device: torch.device
) -> dist.ProcessGroup:
    """The new group, all of whose ranks are connected: else the first move of some of them may wait for the others."""
    groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in parts]
    rank = dist.get_rank(everyone)
    (mine,) = (made for made, ranks in zip(groups, parts, strict=True) if rank in ranks)
    dist.all_reduce(torch.zeros(1, device=device), group=mine)
    return mine


# All-to-all


class Exchange(torch.autograd.Function):
    """`x [ranks, ...]`: part i goes to rank i; part i of the result comes from it.
    The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    if _stays:
        return x
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


# Gathers

# PyTorch 2.13 has other names for them.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x: Tensor, group: dist.ProcessGroup) -> Coming:
    """The rows of all ranks, in their order."""
    if _stays:
        return Coming([], [x.repeat(dist.get_world_size(group), 1, 1)], [])
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    work = _all_gather(out, x, group=group, async_op=True)
    return Coming([x], [out], [work])


def scatter_sums(x: Tensor, group: dist.ProcessGroup) -> Coming:
    """This rank's rows of the sum over ranks."""
    if _stays:
        return Coming([], [x[: x.shape[0] // dist.get_world_size(group)]], [])
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    work = _reduce_scatter(out, x, group=group, async_op=True)
    return Coming([x], [out], [work])
