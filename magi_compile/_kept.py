"""Values that follow from tensors and objects, kept as long as these are what they were.

- **Owners** are told apart by identity. When one of them dies, the value goes.
- **Tensors**, owners or not, must have the version and the address that they had. So a write that PyTorch counts is
  noticed, and another storage is. A write through `.data`, or to the memory of `torch.from_numpy`, is not.
- **Nothing is kept of tensors whose writes nobody counts**: those of inference mode, and outputs of Inductor's CUDA
  graphs.
- **Functions** are what they were while all that they reach is (`functions/reached.py`).
- **Modes**: a value is made outside of the caller's (`_compat.outside_of_modes`), so that calls in any mode can use it.
- **Streams**: a value that one CUDA stream has made is handed over to another that asks for it.
- **Capture**: while a CUDA graph is captured nothing is kept, since a replay has to make it again. What was kept before
  serves where the caller says so.
- **Room**: the least recently used value goes.

Whoever compiles or traces must not ask here.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from magi_compile import _compat

T = TypeVar("T")


class Made(NamedTuple):
    """A value, and what it follows from beside its owners.

    Attributes:
        value: what is kept.
        sources: tensors; None where nobody knows which, so that the value cannot be kept.
        is_unchanged: whether all else is as it was.
    """

    value: Any
    sources: Sequence[Tensor] | None = ()
    is_unchanged: Callable[[], bool] | None = None


class _Entry:
    """A value that is kept."""

    __slots__ = (
        "addresses",
        "event",
        "is_unchanged",
        "owners",
        "sources",
        "stream",
        "tensors",
        "value",
        "versions",
    )

    def __init__(
        self, owners: list[weakref.ref[Any]], tensors: list[weakref.ref[Tensor]], made: Made
    ):
        self.value, self.is_unchanged = made.value, made.is_unchanged
        self.owners, self.tensors = owners, tensors
        self.sources = list(made.sources or ())
        watched: list[Any] = [*[ref() for ref in tensors], *self.sources]
        self.versions = [x._version for x in watched]
        self.addresses = [x.data_ptr() for x in watched]
        self.stream = 0
        self.event: torch.cuda.Event | None = None

    def holds(self) -> bool:
        for ref in self.owners:
            if ref() is None:
                return False
        watched: list[Any] = [ref() for ref in self.tensors] + self.sources
        if [x._version for x in watched] != self.versions:
            return False
        if [x.data_ptr() for x in watched] != self.addresses:
            return False
        return self.is_unchanged is None or self.is_unchanged()


class Memo(Generic[T]):
    """Some values of one kind.

    Args:
        most: how many are kept.
        tensors_of: the tensors of a value, for the allocator, which has to know every stream that reads them.
    """

    def __init__(self, most: int, tensors_of: Callable[[T], Sequence[Tensor]]):
        self.most, self.tensors_of = most, tensors_of
        _all.add(self)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def get(
        self,
        owners: Sequence[Any],
        key: Hashable,
        make: Callable[[], Made],
        device: torch.device,
        *,
        serves_capture: bool = False,
    ) -> T:
        """The value of `owners` under `key`: kept, or made now.

        Args:
            owners: objects, which take weak references; tensors are watched.
            key: tells values of the same owners apart.
            make: makes the value, outside of the caller's modes.
            device: where the value is.
            serves_capture: whether a CUDA graph that is captured may read what was kept before.

        Returns:
            The value.
        """
        place = (key, *map(id, owners))
        stream, is_captured = _stream_on(device)
        entry = self._entries.get(place) if serves_capture or not is_captured else None
        if entry is not None and entry.holds():
            if not is_captured:
                self._touch(place)
                if entry.stream != stream:
                    self._hand_over(entry, device)
            return entry.value  # type: ignore[no-any-return]
        with _compat.outside_of_modes():
            made = make()
        if is_captured:
            return made.value  # type: ignore[no-any-return]
        tensors = [x for x in owners if isinstance(x, Tensor)]
        if made.sources is None or any(map(_is_uncounted, (*tensors, *made.sources))):
            self._entries.pop(place, None)
            return made.value  # type: ignore[no-any-return]

        def forget(_: Any) -> None:
            self._entries.pop(place, None)

        refs = [weakref.ref(x, forget) for x in owners]
        of_tensors = [ref for ref, x in zip(refs, owners, strict=True) if isinstance(x, Tensor)]
        entry = self._entries[place] = _Entry(refs, of_tensors, made)
        self._touch(place)
        if device.type == "cuda":
            entry.stream, event = stream, torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            entry.event = event
        while len(self._entries) > self.most:
            self._entries.popitem(last=False)
        return made.value  # type: ignore[no-any-return]

    def _touch(self, place: Hashable) -> None:
        if place in self._entries:  # an owner may have died meanwhile
            self._entries.move_to_end(place)

    def _hand_over(self, entry: _Entry, device: torch.device) -> None:
        """The current stream, which did not make the value, waits for it, and the allocator for the stream."""
        assert entry.event is not None
        stream = torch.cuda.current_stream(device)
        stream.wait_event(entry.event)
        for tensor in self.tensors_of(entry.value):
            tensor.record_stream(stream)


_all: weakref.WeakSet[Memo[Any]] = weakref.WeakSet()


def forget_all() -> None:
    """Drops what is kept, of every kind."""
    for memo in _all:
        memo.clear()


def _is_uncounted(x: Tensor) -> bool:
    return _compat.may_change_uncounted(x) or _compat.has_no_address(x)


def _stream_on(device: torch.device) -> tuple[int, bool]:
    """The current stream, and whether it is captured."""
    if device.type != "cuda":
        return 0, False
    if _compat.is_capturing():
        return 0, True
    index = torch.cuda.current_device() if device.index is None else device.index
    return _compat.raw_stream(index), False
