"""Ranks that wait for others say so, and so find out who does not: through the store of their group.

A rank that waits says every moment in which pass it does. Whoever says nothing new has ended, has been stopped, or does
something else; whoever waits in an earlier pass has not come yet. Nothing is said while nobody waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

KEY = "magi_compile/waits"
OLDER = 2.5  # pauses between two rounds that are compared
FRESH = 3.0  # pauses since the last round: afterwards, the store no longer answers


class _Round(NamedTuple):
    """The words of all ranks at a time; none of those that never waited."""

    time: float
    said: dict[int, bytes]


class RollCall:
    """The part of this rank among `size`: what it says and hears. `store` makes a store that nobody else uses, whose
    calls may block."""

    def __init__(self, store: Callable[[], Any], rank: int, size: int):
        self._store, self._rank, self.size = store, rank, size
        self._number: int | None = None  # of the pass in which this rank waits
        self._pause = 1.0
        self._beat = 0
        self._rounds: deque[_Round] = deque(maxlen=16)
        self._thread: threading.Thread | None = None

    def wait_in(self, number: int, pause: float) -> None:
        """This rank waits in the pass `number` until it says otherwise, and says so every `pause` seconds."""
        self._number, self._pause = number, pause
        if self._thread is None:
            self._rounds.clear()
            self._thread = threading.Thread(
                target=_speak, args=(weakref.ref(self),), name="magi-roll-call", daemon=True
            )
            self._thread.start()

    def leave(self) -> None:
        """This rank waits no longer."""
        self._number = None

    def absent(self, number: int) -> list[int] | None:
        """The ranks that do not wait in the pass `number`, in which this one does; None if the store does not
        answer."""
        rounds, now = list(self._rounds), time.monotonic()
        if not rounds or now - rounds[-1].time > FRESH * self._pause:
            return None
        last = rounds[-1]
        before = [x for x in rounds if last.time - x.time >= OLDER * self._pause]
        if not before:
            return None
        return [
            rank
            for rank in range(self.size)
            if rank != self._rank and not _waits(rank, number, before[-1], last)
        ]

    def of_absent(self, number: int) -> str:
        """`absent` in words, the second half of a sentence."""
        absent = self.absent(number)
        if absent is None:
            return (
                "which ranks are late nobody knows: the store of the process group does not answer, so the process "
                "that has it, rank 0 unless a launcher has it, has ended or hangs"
            )
        if not absent:
            return "all ranks wait in it; a GPU hangs, or ranks have called other attentions"
        ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        return f"{ranks} did not take part in time: ended, stopped, or busy with something else"

    def speak(self, store: Any, keys: _Keys) -> Any:
        """Says that this rank waits, and hears what others say. Gives the store for the next time, None if it is of no
        more use."""
        number = self._number
        try:
            store = store or self._store()
            if number is not None:
                self._rounds.append(self._round(store, keys, number))
        except (RuntimeError, ValueError, KeyError):  # the store, or its group, has gone
            return None
        return store

    @property
    def pause(self) -> float | None:
        """Seconds until it speaks again; None if it waits no longer, and the thread is to end."""
        if self._number is None:
            self._thread = None
            return None
        return self._pause

    def _round(self, store: Any, keys: _Keys, number: int) -> _Round:
        self._beat += 1
        store.set(_key(self._rank), f"{number} {self._beat}")
        return _Round(time.monotonic(), keys.read(store))


def _speak(roll_call: weakref.ref[RollCall]) -> None:
    """Speaks for a rank as long as that waits, and is there: a group that goes takes its roll call along."""
    store, keys = None, None
    while (here := roll_call()) is not None:
        pause = here.pause
        if pause is None:
            return
        keys = keys or _Keys(here.size)
        store = here.speak(store, keys)
        del here
        time.sleep(pause)


class _Keys:
    """The keys of all ranks; those that are there are read by one request, since many ranks share the store's host."""

    def __init__(self, size: int):
        self._there: list[int] = []
        self._missing = list(range(size))

    def read(self, store: Any) -> dict[int, bytes]:
        new = [rank for rank in self._missing if store.check([_key(rank)])]
        if new:
            self._there += new
            self._missing = [rank for rank in self._missing if rank not in new]
        keys = [_key(rank) for rank in self._there]
        said = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        return dict(zip(self._there, said, strict=True))


def _key(rank: int) -> str:
    return f"{KEY}/{rank}"


def _waits(rank: int, number: int, before: _Round, last: _Round) -> bool:
    said = last.said.get(rank)
    return said is not None and said != before.said.get(rank) and int(said.split()[0]) >= number
