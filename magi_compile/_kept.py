"""What is kept from call to call: values derived from tensors and other objects, as long as these are what they were.

The rules, for all that this package keeps of its users' tensors:

- **Sources are compared by identity**, by weak references: a value goes when one of its sources does. A tensor must also have the same
  version, which moves with every write that PyTorch counts, and the same address, which `x.data = y` changes and no version tells.
- **Nothing is kept of tensors whose writes nobody counts**: those of inference mode, and outputs of Inductor's CUDA graphs. Such values are
  made in every call. `x.data.copy_(y)`, writes to the memory of `torch.from_numpy` and replays of a user's CUDA graph go unseen.
- **Nothing is kept, or taken from what is kept, while a CUDA graph is captured or a graph is traced**: those run again, and make their values
  again.
- **A value is made outside of the caller's modes** (`_compat.outside_of_modes`): evaluation may come first and training second, the
  first call may be inside a checkpoint, under autocast or under a FLOP counter.
- **A value that one CUDA stream made serves others**: they wait for it, and its memory waits for them.
- **Not more than so many are kept**: the least recently used goes.

Threads may share what is kept; two of them may make the same value at a time.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from magi_compile import _compat

Value = TypeVar("Value")

_version, _address = operator.attrgetter("_version"), Tensor.data_ptr  # of many in a row, past Python


class States:
    """What is compared of tensors that are the same objects.

    Args:
        tensors: of which something was made, or will be now.
    """

    __slots__ = ("addresses", "versions")

    def __init__(self, tensors: Iterable[Tensor]):
        tensors = list(tensors)
        self.versions = list(map(_version, tensors))
        self.addresses = list(map(_address, tensors))

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> States | None:
        """The states of tensors; None where they may change and their states do not."""
        if any(map(_compat.may_change_uncounted, tensors)) or any(map(_compat.is_traced, tensors)):
            return None
        try:
            return States(tensors)
        except RuntimeError:  # without an address: sparse ones, those of torch.func
            return None

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors, the same as before, have not been written to."""
        return (
            list(map(_version, tensors)) == self.versions
            and list(map(_address, tensors)) == self.addresses
        )


class Entry(Generic[Value]):
    """A value that is kept, and of what.

    Attributes:
        value: what was made.
        stream: the CUDA stream that made it, 0 on a CPU.
    """

    __slots__ = ("__weakref__", "_owner", "_refs", "_states", "is_there", "stream", "value")

    def __init__(
        self,
        value: Value,
        tensors: Sequence[Tensor],
        states: States,
        owner: Any,
        forget: Callable[[Any], None],
        stream: int,
        is_there: torch.cuda.Event | None,
    ):
        self.value, self.stream, self.is_there = value, stream, is_there
        self._refs = tuple([weakref.ref(x, forget) for x in tensors])
        self._states = states
        self._owner = None if owner is None else weakref.ref(owner, forget)

    def is_of(self, tensors: Sequence[Tensor], owner: Any = None) -> bool:
        """Whether its sources are these, as they are now."""
        if self._owner is not None and self._owner() is not owner:
            return False
        if not self._refs:
            return True
        for ref, x in zip(self._refs, tensors, strict=True):
            if ref() is not x:
                return False
        return self._states.are_of(tensors)


class Kept(Generic[Value]):
    """Values by what they are made of.

    Args:
        most: how many are kept.
        tensors_of: the tensors of a value.
    """

    def __init__(self, most: int, tensors_of: Callable[[Value], Iterable[Tensor]]):
        self.most = most
        self._tensors_of = tensors_of
        self._entries: OrderedDict[Any, Entry[Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()

    def of(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        make: Callable[[], Value],
        device: torch.device,
        owner: Any = None,
    ) -> Value:
        """The value of these sources: one that is kept, or one that is made now.

        Args:
            key: what else a value depends on; all that it holds is compared by value.
            tensors: the sources that are tensors.
            make: makes the value.
            device: of the value's tensors.
            owner: one more source, any object, by identity.
        """
        stream = stream_of(device)
        found = self.entry(key, tensors, make, device, stream, owner)
        if found is not None:
            return found.value
        with _compat.outside_of_modes():
            return make()

    def entry(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        make: Callable[[], Value],
        device: torch.device,
        stream: int | None,
        owner: Any = None,
    ) -> Entry[Value] | None:
        """The same for somebody who looks at the entry again himself; None where nothing can be kept, and nothing was made."""
        if stream is None:
            return None
        found = self.find(key, tensors, device, stream, owner)
        if found is not None:
            return found
        states = States.of(tensors)
        if states is None:
            return None
        with _compat.outside_of_modes():
            value = make()
        return self.keep(key, tensors, states, value, device, stream, owner)

    def find(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        device: torch.device,
        stream: int | None,
        owner: Any = None,
    ) -> Entry[Value] | None:
        """What is kept of these sources as they are now, ready for the current stream."""
        place = (key, id(owner), *map(id, tensors))
        found = self._entries.get(place)
        if found is None or not found.is_of(tensors, owner):
            return None
        try:  # noqa: SIM105 (contextlib.suppress takes as long as all the rest)
            self._entries.move_to_end(place)
        except KeyError:  # another thread has let it go
            pass
        if stream is not None and found.stream != stream:
            self._hand_over(found, device)
        return found

    def keep(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        states: States,
        value: Value,
        device: torch.device,
        stream: int,
        owner: Any = None,
    ) -> Entry[Value]:
        """Keeps a value that the current stream has made of sources in these states."""
        place = (key, id(owner), *map(id, tensors))
        entries = self._entries

        def forget(_: Any) -> None:
            entries.pop(place, None)

        is_there = None
        if device.type == "cuda":
            is_there = torch.cuda.Event()
            is_there.record(_current_stream(stream, device))
        made = Entry(value, tensors, states, owner, forget, stream, is_there)
        entries[place] = made
        while len(entries) > self.most:
            try:
                entries.popitem(last=False)
            except KeyError:  # another thread was faster
                break
        return made

    def _hand_over(self, found: Entry[Value], device: torch.device) -> None:
        """The current stream, which did not make the value, waits for it, and its memory for the stream."""
        assert found.is_there is not None
        stream = torch.cuda.current_stream(device)
        stream.wait_event(found.is_there)
        for x in self._tensors_of(found.value):
            if x.is_cuda:
                x.record_stream(stream)


def stream_of(device: torch.device) -> int | None:
    """The stream that a call uses, 0 on a CPU; None while it is captured, or while a graph is traced."""
    if _compat.is_tracing():
        return None
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return None if _compat.is_capturing() else _compat.raw_stream(index)


@lru_cache(maxsize=64)
def _current_stream(stream: int, device: torch.device) -> torch.cuda.Stream:
    """The current stream, whose handle is `stream`: to ask torch for it takes longer than to look it up."""
    return torch.cuda.current_stream(device)
