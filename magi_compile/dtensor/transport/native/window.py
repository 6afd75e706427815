"""Symmetric memory of a group: two slots that all ranks fill in turn and read from each other.

    rank 0    fill A | meet | read A of all | fill B | meet | read B of all | fill A | ...
    rank 1    fill A   | meet | read A of all | fill B   | meet | read B of all | fill A | ...

At a meeting a rank sets a flag in the memory of every peer, and goes on once every peer has set its own. That is all:
whoever comes to a meeting has read all of the slot before, so after it that slot is free on every rank, and the
other one is what is read meanwhile. A flag is cleared by the rank that awaited it and is set again two meetings
later, which that peer reaches only after this rank was at the one between. Flags hold 0 or 1 and never count, so a
recorded graph may replay them.

But a replay takes the slots of its recording, whatever slot was filled last. Once uses were recorded, ranks therefore
meet before they fill a slot too, when all have read whatever they wanted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.transport.native import stream_ops
from magi_compile.dtensor.transport.native.stream_ops import Op, await_flag, set_flag

NUM_SLOTS = 2
FLAG_BYTES = 4
NUM_STREAMS = 32  # of one priority, in PyTorch
ALIGNMENT = 4096  # of slots, in bytes
MOST_VIEWS = 32  # of a slot that are kept
GRANULARITY = 1 << 21  # of symmetric memory, in bytes


@dataclass(frozen=True, eq=False)
class Slot:
    """One slot, on all ranks."""

    memory: Tensor  # this rank's, uint8
    addresses: tuple[int, ...]  # where it lies on each rank, as this process sees it
    device_addresses: Tensor  # the same on the device, int64
    meeting: list[Op]
    _views: dict[Hashable, Tensor] = field(default_factory=dict, repr=False)

    def view(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's contiguous tensor at a place in it, in bytes; recent ones are kept."""
        key = (begin, shape, dtype)
        view = self._views.get(key)
        if view is None:
            end = begin + math.prod(shape) * dtype.itemsize
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = self.memory[begin:end].view(dtype).view(shape)
        return view


class Window:
    """The slots of one group for one purpose, and the `stream` that reads from them.

    A use is `next_slot`, `meet`, reads on `stream`, `end`; the next begins after that. Ranks go through the same uses
    in the same order, with equal sizes. Memory grows to the largest that was asked for, from the second time on with a
    quarter to spare. Until ranks meet, the slot whose turn it is stays the same, whoever asks again.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        # By name: a window lives as long as its group, so it must not keep the group alive.
        self._group_name, self._rank, self._size = group.group_name, group.rank(), group.size()
        self._device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._slots: list[Slot] = []
        self._capacity = 0  # bytes of a slot
        self._turn = 0
        self._is_being_filled = False
        # The end of the last use, unless it was waited for.
        self._last: torch.cuda.Event | None = None
        self._is_recorded = False
        self._flags: list[Op] = []  # set, all that this rank may await
        self._is_released = False
        self._aside: torch.cuda.Stream | None = None

    def next_slot(self, num_bytes: int, current: torch.cuda.Stream) -> Slot:
        """The slot whose turn it is, with room for `num_bytes`, which the stream `current` may fill: it waits until the
        use before has ended. Raises RuntimeError if it would have to grow while a graph is being captured, or if ranks
        were late."""
        self._refuse_what_was_released()
        is_capturing = torch.cuda.is_current_stream_capturing()
        if num_bytes > self._capacity or not self._slots:
            if is_capturing:
                raise RuntimeError(
                    f"a slot of symmetric memory has {self._capacity} bytes and {num_bytes} are needed: "
                    "run one warm-up step before the CUDA graph capture"
                )
            self._grow(num_bytes)
        if not self._is_being_filled:
            if self._last is not None:
                self.wait(self._last, current)
            self._is_recorded |= is_capturing
            if self._is_recorded:
                current.wait_event(self._meet(self._meeting_before, current))
            self._turn = (self._turn + 1) % NUM_SLOTS
            self._is_being_filled = True
        return self._slots[self._turn]

    def meet(self, slot: Slot, current: torch.cuda.Stream) -> torch.cuda.Event:
        """Lets `stream` read the slots of all ranks, once what `current` holds is done everywhere: at the event."""
        self._refuse_what_was_released()
        self._is_being_filled = False
        return self._meet(slot.meeting, current)

    def _refuse_what_was_released(self) -> None:
        """Its flags say that ranks were at meetings where they were not: who goes on would read what is not there."""
        if self._is_released:
            raise RuntimeError(
                f"ranks of group {self._group_name!r} were late, and rows that they share with it are lost: make a new "
                "process group"
            )

    def _meet(self, meeting: list[Op], current: torch.cuda.Stream) -> torch.cuda.Event:
        self.stream.wait_stream(current)
        stream_ops.enqueue(meeting, self.stream)
        return self.stream.record_event()

    def end(self) -> torch.cuda.Event:
        """When `stream` has read what it was to read of this use."""
        self._last = self.stream.record_event()
        return self._last

    def wait(self, event: torch.cuda.Event, current: torch.cuda.Stream) -> None:
        """Makes `current` wait for what `stream` does until `event`."""
        current.wait_event(event)
        if event is self._last:
            self._last = None

    def release(self) -> None:
        """Sets all flags that this rank may await, as peers would that have come. On a stream that waits for nothing;
        on any thread. Nothing is read from slots any more."""
        self._is_released = True
        if not self._flags:
            return
        with torch.cuda.device(self._device):
            if self._aside is None:
                self._aside = _idle_stream(self._device)
            stream_ops.enqueue(self._flags, self._aside)

    @_compat.outside_of_modes()
    def _grow(self, num_bytes: int) -> None:
        # What was enqueued here is done, and nobody leaves the rendezvous before that is so on every rank.
        torch.cuda.synchronize(self._device)
        if self._slots:
            num_bytes += num_bytes // 4  # other masks need a little more, and growing takes long
        self._slots.clear()
        self._flags = []  # `release` comes from another thread, and this memory goes
        num_flags = (NUM_SLOTS + 1) * self._size
        begin = round_up(num_flags * FLAG_BYTES, ALIGNMENT)
        total = round_up(begin + NUM_SLOTS * round_up(num_bytes, ALIGNMENT), GRANULARITY)
        self._capacity = (total - begin) // NUM_SLOTS // ALIGNMENT * ALIGNMENT
        memory = _compat.symmetric_empty(total, self._device)
        memory[:begin] = 0
        torch.cuda.synchronize(self._device)
        self._rendezvous = _compat.symmetric_rendezvous(memory, self._group_name)
        addresses = _compat.symmetric_addresses(self._rendezvous)
        self._meeting_before = _meeting(addresses, self._rank, NUM_SLOTS)
        own = addresses[self._rank]
        self._flags = [set_flag(own + i * FLAG_BYTES, 1) for i in range(num_flags)]
        for index in range(NUM_SLOTS):
            offset = begin + index * self._capacity
            mine = memory[offset : offset + self._capacity]
            where = tuple(address + offset for address in addresses)
            on_device = torch.tensor(where, device=self._device)
            meeting = _meeting(addresses, self._rank, index)
            self._slots.append(Slot(mine, where, on_device, meeting))


def _meeting(addresses: list[int], rank: int, index: int) -> list[Op]:
    """A meeting with flags of its own: `[index, peer]` lie at the address of the rank that awaits them."""
    size = len(addresses)
    # The next rank first, so that not everybody writes to the same one.
    peers = [(rank + step) % size for step in range(1, size)]

    def flag(owner: int, peer: int) -> int:
        return addresses[owner] + (index * size + peer) * FLAG_BYTES

    mine = [flag(rank, peer) for peer in peers]
    return [
        *(set_flag(flag(peer, rank), 1) for peer in peers),
        *(await_flag(address) for address in mine),
        *(set_flag(address, 0) for address in mine),
    ]


def _idle_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream with nothing under way: PyTorch has a few of each priority, which it gives out in turn."""
    for _ in range(NUM_STREAMS):
        stream = torch.cuda.Stream(device, priority=-1)
        if stream.query():
            break
    return stream


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
