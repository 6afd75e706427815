"""Symmetric memory of a group: two slots that ranks fill in turn and read from each other, and the flags around them.

A slot goes round, on every rank alike, with two flags for each peer in the memory of the rank that awaits them:

    acquire    await "read" of every peer: all have read what the slot held; clear it      before its owner writes
    publish    set "published" at every peer; await that of every peer; clear it           before anybody reads
    release    set "read" at every peer                                                    after the last read

Flags hold 0 or 1 and never count, so a recorded graph may replay these operations. A rank keeps flags for itself too,
which orders its own streams. With two slots, one is filled while peers still read the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.native import stream_ops
from magi_compile.dtensor.native.stream_ops import Op, await_flag, set_flag

NUM_SLOTS = 2
FLAG_BYTES = 4
ALIGNMENT = 4096  # of slots, in bytes
GRANULARITY = 1 << 21  # of symmetric memory, in bytes


class Slot(NamedTuple):
    """One slot, on all ranks."""

    memory: Tensor  # this rank's, uint8
    addresses: list[int]  # where it lies on each rank, as this process sees it
    device_addresses: Tensor  # the same on the device, int64
    acquire_ops: list[Op]
    publish_ops: list[Op]
    release_ops: list[Op]

    def acquire(self, stream: torch.cuda.Stream) -> None:
        """From here on `stream` may write to this rank's slot."""
        stream_ops.enqueue(self.acquire_ops, stream)

    def publish(self, stream: torch.cuda.Stream) -> None:
        """What `stream` did before is what peers read; from here on it may read the slots of all ranks."""
        stream_ops.enqueue(self.publish_ops, stream)

    def release(self, stream: torch.cuda.Stream) -> None:
        """`stream` has read all that it wants."""
        stream_ops.enqueue(self.release_ops, stream)


class Window:
    """The slots of one group for one purpose, and the stream that reads from them.

    Ranks ask for slots in the same order and of the same sizes. Memory grows to the largest that was asked for.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        # By name: a window lives as long as its group, so it must not keep the group alive.
        self._group_name, self._rank, self._size = group.group_name, group.rank(), group.size()
        self._device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._slots: list[Slot] = []
        self._capacity = 0  # bytes of a slot
        self._turn = 0

    def next_slot(self, num_bytes: int) -> Slot:
        """The slot whose turn it is, with room for `num_bytes`.

        Raises:
            RuntimeError: if it would have to grow while a graph is being captured.
        """
        if num_bytes > self._capacity or not self._slots:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"a slot of symmetric memory has {self._capacity} bytes and {num_bytes} are needed: "
                    "run the step once before it is captured in a graph"
                )
            self._grow(num_bytes)
        self._turn = (self._turn + 1) % NUM_SLOTS
        return self._slots[self._turn]

    def _grow(self, num_bytes: int) -> None:
        # What was enqueued here is done, and nobody leaves the meeting before that is so on every rank.
        torch.cuda.synchronize(self._device)
        self._slots.clear()
        num_flags = NUM_SLOTS * 2 * self._size
        begin = _round_up(num_flags * FLAG_BYTES, ALIGNMENT)
        total = _round_up(begin + NUM_SLOTS * _round_up(num_bytes, ALIGNMENT), GRANULARITY)
        self._capacity = (total - begin) // NUM_SLOTS // ALIGNMENT * ALIGNMENT
        memory = _compat.symmetric_empty(total, self._device)
        flags = memory[: num_flags * FLAG_BYTES].view(torch.int32).view(NUM_SLOTS, 2, self._size)
        flags[:, _PUBLISHED] = 0
        flags[:, _READ] = 1
        torch.cuda.synchronize(self._device)
        self._meeting = _compat.symmetric_meeting(memory, self._group_name)
        addresses = _compat.symmetric_addresses(self._meeting)
        for index in range(NUM_SLOTS):
            offset = begin + index * self._capacity
            mine = memory[offset : offset + self._capacity]
            where = [address + offset for address in addresses]
            on_device = torch.tensor(where, device=self._device)
            self._slots.append(
                Slot(mine, where, on_device, *_flag_ops(addresses, self._rank, index))
            )


_PUBLISHED, _READ = 0, 1


def _flag_ops(addresses: list[int], rank: int, slot: int) -> tuple[list[Op], list[Op], list[Op]]:
    """Acquire, publish and release of one slot, with all flags `[slot, kind, peer]` at `addresses`."""
    size = len(addresses)
    # The next rank first, so that not everybody writes to the same one.
    peers = [(rank + step) % size for step in range(1, size + 1)]

    def flag(kind: int, owner: int, peer: int) -> int:
        return addresses[owner] + ((2 * slot + kind) * size + peer) * FLAG_BYTES

    def set_at_all(kind: int) -> list[Op]:
        return [set_flag(flag(kind, peer, rank), 1) for peer in peers]

    def await_all(kind: int) -> list[Op]:
        mine = [flag(kind, rank, peer) for peer in peers]
        return [await_flag(x, 1) for x in mine] + [set_flag(x, 0) for x in mine]

    publish = set_at_all(_PUBLISHED) + await_all(_PUBLISHED)
    return await_all(_READ), publish, set_at_all(_READ)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
