"""Reading rows from the slots of peers: by copy engines where ranges of rows are long, by a few SMs otherwise."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.on_device import to_device
from magi_compile.dtensor.transport.collectives import derived
from magi_compile.dtensor.transport.native import stream_ops
from magi_compile.dtensor.transport.native.window import Slot

COPY_ENGINE, SMS = "copy_engine", "sms"
# On average. Of copies of 64 KB an H200's engine makes 222 GB/s, from 256 KB on 356; each takes the host most of a
# microsecond. A few SMs make 300.
MIN_BYTES_OF_A_COPY = 1 << 18

#: Where in a slot rows begin, a multiple of 16 bytes, and the contiguous tensor `[rows, width]` to read them into.
Targets: TypeAlias = Sequence[tuple[int, Tensor]]


class _Copies(NamedTuple):
    """Copies out of a slot: bytes from the begin of a target, addresses, and sizes."""

    steps: list[int]
    sources: list[int]
    sizes: list[int]


_MOST_COPIES = 16  # of slots and widths that are kept


class Pulls:
    """The `num_rows` rows that this rank reads in one go, and what the engines make of them once. `ranges` are `peer,
    target_row, source_row, count`, ordered by peer; `device` is where rows go."""

    def __init__(self, ranges: Sequence[Sequence[int]], rank: int, size: int, device: torch.device):
        self.device, self._rank, self._size = device, rank, size
        # Every rank begins with the one after it, so that no rank is read by all at once.
        ranges = [x for x in ranges if x[3]]
        self._ranges_in_turn = sorted(ranges, key=lambda x: (x[0] - rank - 1) % size)
        self.num_rows = sum(count for *_, count in ranges)
        self._copies: dict[tuple[int, ...], _Copies] = {}

    def engine(
        self, row_bytes: int, chosen: str | None = None, stream: torch.cuda.Stream | None = None
    ) -> str:
        """The faster one for rows of this size, on average, or the one that was `chosen`. If there is a `stream`, that
        makes the table which it will read there."""
        is_long = self.num_rows * row_bytes >= MIN_BYTES_OF_A_COPY * len(self._ranges_in_turn)
        engine = chosen or (COPY_ENGINE if is_long else SMS)
        if engine == SMS and stream is not None and self.num_rows and "places" not in vars(self):
            with _compat.on_stream(stream):
                _ = self.places
        return engine

    def enqueue(self, slot: Slot, targets: Targets, engine: str, stream: torch.cuda.Stream) -> None:
        """Reads into `targets`."""
        if not self.num_rows:
            return
        if engine == COPY_ENGINE:
            where: list[int] = []
            sources: list[int] = []
            sizes: list[int] = []
            for offset, target in targets:
                copies = self._copies_of(slot, offset, target.shape[1] * target.element_size())
                base = target.data_ptr()
                where += [base + step for step in copies.steps]
                sources += copies.sources
                sizes += copies.sizes
            if sizes:
                stream_ops.copy(where, sources, sizes, stream)
            return
        with _compat.on_stream(stream):
            for offset, target in targets:
                if target.shape[1]:
                    _kernel().pull(target, self.places, slot.device_addresses, offset)

    def _copies_of(self, slot: Slot, offset: int, row_bytes: int) -> _Copies:
        """The copies of rows that begin at `offset` in a slot."""
        key = (*slot.addresses, offset, row_bytes)
        copies = self._copies.get(key)
        if copies is None:
            of_ranges = self._ranges_in_turn if row_bytes else []
            copies = _Copies(
                [row_bytes * target_row for _, target_row, _, _ in of_ranges],
                [slot.addresses[peer] + offset + row_bytes * row for peer, _, row, _ in of_ranges],
                [row_bytes * count for *_, count in of_ranges],
            )
            if len(self._copies) >= _MOST_COPIES:
                self._copies.clear()
            self._copies[key] = copies
        return copies

    @derived
    def places(self) -> Tensor:
        """int32 `[3, num_rows]` on the device, `peer, source_row, target_row`, with the peers in turn all along."""
        of_peer = [0] * self._size
        for peer, _, _, count in self._ranges_in_turn:
            of_peer[peer] += count
        # The host computes what each range has, the device what each row has, numbered through all ranges.
        table, begin, before = [], 0, [0] * self._size
        for peer, target_row, source_row, count in self._ranges_in_turn:
            # In proportion, so that the last rows of all peers are read together.
            share = (before[peer] - begin + 0.5) / of_peer[peer]
            turn = (peer - self._rank - 1) % self._size
            rows = (peer, source_row - begin, target_row - begin)
            table.append((*rows, share + turn * 1e-9, 1 / of_peer[peer], begin + count))
            before[peer] += count
            begin += count
        of_ranges = (
            torch.tensor(table, dtype=torch.float64, device="cpu").view(-1, 6).T.contiguous()
        )
        of_ranges = to_device(of_ranges, self.device)
        row = torch.arange(self.num_rows, dtype=torch.float64, device=self.device)
        of_rows = of_ranges[:5, torch.searchsorted(of_ranges[5], row, right=True)]
        order = torch.argsort(torch.addcmul(of_rows[3], of_rows[4], row))
        of_rows[1:3] += row
        return of_rows[:3, order].int().contiguous()


@cache
def _kernel() -> ModuleType:
    """Imported at first use, because Triton need not be installed."""
    return importlib.import_module("magi_compile.dtensor.transport.native.pull_triton")
