"""Ends what waits on a GPU for a rank that does not come, while no host waits with it (`docs/kernels/across_ranks.md`).

A thread of each process looks after the passes of attention that were enqueued:

    a pass is done                an event behind it says so; nothing else happens
    its host is still in it       as one that the driver holds up, for memory or for room in a queue
    it takes longer than others   this rank tells the others through the store that it waits: `roll_call.py`
    it takes the timeout          who does not wait in it is late, and an error names them; a look before, a warning

A thread that the driver holds up may have a lock of the driver's. So the thread that looks never calls the driver: it
has that done by others, and goes on without their answer.

The error is logged, and the thread that called attention gets it, wherever it is; then what waits on the device is
released. Later calls raise it as well. Where that thread does not take it, because a kernel of NCCL's holds it, the
process ends. Replays of CUDA graphs are no calls, and nobody looks after them.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from magi_compile import _compat
from magi_compile.dtensor.ranks.roll_call import RollCall
from magi_compile.dtensor.transport.collectives import is_recorded, release

logger = logging.getLogger("magi_compile")

MOST_SECONDS = 1.0  # between two looks
LOOKS = 10  # within a timeout, at least
LOOKS_BEFORE_ROLL_CALL = 2
SECONDS_TO_TAKE_AN_ERROR = 10.0
SECONDS_OF_A_STOP = 5.0  # by which a look is late only where this process did not run
SECONDS_OF_RELEASE = 0.02  # between two: streams that were released may wait again
SECONDS_OF_AN_ANSWER = 0.2  # of the driver: one that comes later counts in the next look
SECONDS_OF_A_HOST = 60.0  # in a pass, beyond the timeout: its first call may compile


class Event(Protocol):
    """An event behind some work, which says whether that is done."""

    def query(self) -> bool: ...


@dataclass(eq=False)
class Pass:
    """A pass that the host enqueues, or has enqueued."""

    number: int  # all ranks count alike
    is_backward: bool
    time: float  # at which the host has begun with it, or was done
    event: Event | None = None  # behind all of it; None while the host is in it

    def is_done(self) -> bool:
        try:
            return self.event is not None and self.event.query()
        except RuntimeError:  # the device has failed, which the next call of the host says
            return True


class Aside:
    """Calls on threads of their own, one at a time, for a thread that must not wait long. Each of these threads does
    `prepare` first."""

    def __init__(self, prepare: Callable[[], None] = lambda: None):
        self._prepare = prepare
        self._has_ended = threading.Event()
        self._has_ended.set()

    def run(self, call: Callable[[], None]) -> bool:
        """Begins a call, unless one before goes on, and waits a moment for it; true if it has ended. Nobody sees the
        RuntimeErrors that it raises."""
        if not self._has_ended.is_set():
            return False
        self._has_ended.clear()
        thread = threading.Thread(target=self._run, args=(call,), name="magi-aside", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end
            self._has_ended.set()
            return False
        return self._has_ended.wait(SECONDS_OF_AN_ANSWER)

    def _run(self, call: Callable[[], None]) -> None:
        try:
            with suppress(RuntimeError):  # of a device that has failed
                self._prepare()
                call()
        finally:
            self._has_ended.set()


class Passes:
    """The passes of one group, that of the name, which may still be under way; `error` is that of ranks that were late.

    `timeout` gives that of the group, and `clock` the time, in seconds. `release` lets go what waits on the device for
    other ranks; it is called again until nothing waits. `raise_in` and `end` are as `raise_in_thread` and
    `end_process`, and `aside` calls the driver.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        timeout: Callable[[], float],
        roll_call: RollCall,
        release: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        raise_in: Callable[[int, str, threading.Event], None] | None = None,
        end: Callable[[str], None] | None = None,
        aside: Aside | None = None,
    ):
        self.name, self.rank = name, rank
        self.error: str | None = None
        self._timeout, self._roll_call, self._release = timeout, roll_call, release
        self._clock = clock
        self._raise_in, self._end = raise_in or raise_in_thread, end or end_process
        self._aside = aside or Aside()
        self._pending: deque[Pass] = deque()
        self._number = self._warned = 0
        # Of the last forward that was called: a backward may have another.
        self._thread = threading.get_ident()
        self._is_taken = threading.Event()
        self._failed = 0.0
        self._resumed = -math.inf

    def begin(self, *, is_backward: bool) -> Pass:
        """A pass that the host is about to enqueue; `enqueued` or `ended` has to follow. Raises RuntimeError if ranks
        were late for an earlier one."""
        if self.error is not None:
            if is_backward or _compat.is_in_backward():  # for the thread that called `backward`
                withdraw(self._is_taken)
            self._is_taken.set()
            raise RuntimeError(self.error)
        # What a backward computes again runs on a thread of autograd, which sleeps afterwards and would raise nothing.
        if not is_backward and not _compat.is_in_backward():
            self._thread = threading.get_ident()
        self._number += 1
        begun = Pass(self._number, is_backward, self._clock())
        self._pending.append(begun)
        return begun

    def enqueued(self, begun: Pass, event: Event) -> None:
        """The host has enqueued a pass, behind which is `event`, or as much of it as it will."""
        begun.time, begun.event = self._clock(), event

    def ended(self, begun: Pass) -> None:
        """The host has left a pass, and nothing says when what it has enqueued is done."""
        with suppress(ValueError):
            self._pending.remove(begun)

    def was_stopped(self) -> None:
        """This process did not run for a while, as under a scheduler that suspends jobs: other ranks may have been
        stopped as well, and have their timeout from now on."""
        self._resumed = self._clock()

    def look(self) -> float | None:
        """One look at the oldest pass; seconds until the next one, None if nothing is under way."""
        self._aside.run(self._drop_what_is_done)
        if self.error is not None:
            return self._look_after_the_error()
        oldest = self._oldest()
        if oldest is None:
            self._roll_call.leave()
            return None
        # Where the host is still in a pass, it may be busy, and others wait for it.
        is_left, timeout = oldest.event is not None, self._timeout()
        limit = timeout if is_left else timeout + SECONDS_OF_A_HOST
        pause = min(MOST_SECONDS, timeout / LOOKS)
        age = self._clock() - max(oldest.time, self._resumed)
        if age >= limit:
            self._fail(oldest, limit, timeout)
            return self._look_after_the_error()
        if age >= (LOOKS_BEFORE_ROLL_CALL * pause if is_left else timeout / 2):
            self._roll_call.wait_in(oldest.number, pause)
        if age >= limit - pause and self._warned < oldest.number:
            # NCCL may end the process at the timeout, and names nobody.
            logger.warning("%s", self._in_words(oldest, age, timeout))
            self._warned = oldest.number
        return min(pause, limit - age)

    def _drop_what_is_done(self) -> None:
        while (oldest := self._oldest()) is not None and oldest.is_done():
            self.ended(oldest)

    def _oldest(self) -> Pass | None:
        try:
            return self._pending[0]
        except IndexError:
            return None

    def _in_words(self, late: Pass, age: float, timeout: float) -> str:
        what = "backward" if late.is_backward else "forward"
        return (
            f"rank {self.rank} of group {self.name!r}, whose timeout is {timeout:g} s, has waited {age:.0f} s for the "
            f"end of a {what} across ranks, pass {late.number}: {self._roll_call.of_absent(late.number)}"
        )

    def _fail(self, late: Pass, age: float, timeout: float) -> None:
        message = self._in_words(late, age, timeout)
        self._failed = self._clock()
        # Nothing in between, for which `begin` could raise it as well. And before what waits is released: nothing may
        # go on with rows that are not there.
        self.error = message
        self._raise_in(self._thread, message, self._is_taken)
        logger.error("%s", message)

    def _look_after_the_error(self) -> float | None:
        assert self.error is not None
        if self._pending:
            self._aside.run(self._release)
        if self._is_taken.is_set():
            self._roll_call.leave()
            if not self._pending:
                return None
            # An error may come while the host leaves a pass, which then never ends.
            is_enqueued = any(x.event is not None for x in list(self._pending))
            return SECONDS_OF_RELEASE if is_enqueued else MOST_SECONDS
        if self._clock() - self._failed >= SECONDS_TO_TAKE_AN_ERROR:
            self._end(self.error)
        return SECONDS_OF_RELEASE


class _Raised(NamedTuple):
    """An error that a thread is to raise, or has raised."""

    thread: int
    message: str
    are_taken: tuple[threading.Event, ...]


_raised: list[_Raised] = []  # the last one
_raising = threading.Lock()


def raise_in_thread(thread: int, message: str, is_taken: threading.Event) -> None:
    """Raises a RuntimeError in a thread as soon as that runs Python; `is_taken` is set then.

    A thread has room for one: another that it has not raised yet becomes a part of this one.
    """
    with _raising:
        idents = (thread, threading.main_thread().ident or 0)
        any(_set_error(ident, message, is_taken) for ident in idents)


def _set_error(thread: int, message: str, is_taken: threading.Event) -> bool:
    are_taken: tuple[threading.Event, ...] = (is_taken,)
    for before in _raised:
        if before.thread == thread and not before.are_taken[0].is_set():
            message, are_taken = f"{before.message}\n{message}", (*before.are_taken, is_taken)

    def __init__(self: RuntimeError) -> None:
        RuntimeError.__init__(self, message)
        for event in are_taken:
            event.set()

    def __reduce__(self: RuntimeError) -> tuple[type[RuntimeError], tuple[str]]:
        return RuntimeError, (message,)  # to other processes

    methods = {"__init__": __init__, "__reduce__": __reduce__}
    error = ctypes.py_object(type("LateRankError", (RuntimeError,), methods))
    if not ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error):
        return False  # the thread has ended
    _raised[:] = [_Raised(thread, message, are_taken)]
    return True


def withdraw(is_taken: threading.Event) -> None:
    """Takes back what `raise_in_thread` was given with `is_taken`, if no thread has raised it yet."""
    with _raising:
        for raised in _raised:
            if is_taken in raised.are_taken and not is_taken.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(raised.thread), None)
                for event in raised.are_taken:
                    event.set()


def end_process(message: str) -> None:
    """Ends this process at once, as NCCL does where ranks are late."""
    sys.stderr.write(f"magi_compile ends this process, which has not taken this error: {message}\n")
    sys.stderr.flush()
    os._exit(1)


class Watch:
    """The thread that looks after the passes of all groups, until `is_over`. It sleeps while nothing is under way. It,
    and threads that call the driver, do `prepare` first."""

    def __init__(self, prepare: Callable[[], None] = lambda: None):
        self.prepare = prepare
        self._passes: list[weakref.ref[Passes]] = []
        self._has_work = threading.Event()
        self.is_over = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, passes: Passes) -> None:
        """Looks after these passes, too."""
        with self._starting:
            self._passes = [x for x in self._passes if x() is not None] + [weakref.ref(passes)]

    def wake(self) -> None:
        """Something is under way."""
        if self._has_work.is_set():
            return
        self._has_work.set()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="magi-watch", daemon=True)
                self._thread.start()
                atexit.register(self.stop)

    def stop(self) -> None:
        self.is_over = True
        self._has_work.set()

    def _run(self) -> None:
        try:
            self.prepare()
            while True:
                self._has_work.wait()
                if self.is_over:
                    return
                self._has_work.clear()
                pause = self.look()
                if pause is not None:
                    self._has_work.set()
                    self._sleep(pause)
        except Exception:
            logger.exception("from here on, nobody looks after ranks that are late")
            self.is_over = True

    def _sleep(self, pause: float) -> None:
        begin = time.monotonic()
        time.sleep(pause)
        if time.monotonic() - begin > pause + SECONDS_OF_A_STOP:
            for passes in self._all():
                passes.was_stopped()

    def _all(self) -> list[Passes]:
        return [passes for ref in self._passes if (passes := ref()) is not None]

    def look(self) -> float | None:
        """One look at all passes; seconds until the next one."""
        pauses = [passes.look() for passes in self._all()]
        return min((x for x in pauses if x is not None), default=None)


class _Watched:
    """Inside, the host enqueues a pass."""

    __slots__ = ("begun", "device", "is_backward", "passes")

    def __init__(self, passes: Passes, device: torch.device, *, is_backward: bool):
        self.passes, self.device, self.is_backward = passes, device, is_backward

    def __enter__(self) -> None:
        self.begun = self.passes.begin(is_backward=self.is_backward)
        if _watch.is_over:
            self.passes.ended(self.begun)
        else:
            _watch.wake()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _watch.is_over:
            self.passes.ended(self.begun)
            return
        try:
            event = _compat.current_stream(self.device).record_event()
        except BaseException:
            self.passes.ended(self.begun)
            if kind is None:
                raise
            return  # the first error says more
        # Where the host was interrupted, streams may wait all the same, for what it has enqueued.
        self.passes.enqueued(self.begun, event)
        _watch.wake()


def _prepare() -> None:
    # Events are asked for while other threads capture CUDA graphs, which would otherwise fail.
    from cuda.bindings import driver

    driver.cuThreadExchangeStreamCaptureMode(
        driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    )


_watch = Watch(_prepare)
_passes: weakref.WeakKeyDictionary[dist.ProcessGroup, Passes] = weakref.WeakKeyDictionary()
# The groups whose streams may wait in passes of a group: that one, and those of its gradients.
_moving: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_UNWATCHED: AbstractContextManager[None] = nullcontext()


def watched(
    group: dist.ProcessGroup,
    device: torch.device,
    reduce_group: dist.ProcessGroup | None = None,
    *,
    is_backward: bool,
) -> AbstractContextManager[None]:
    """A context in which the host enqueues a pass of rows on `device`, which becomes an error if ranks of `group` are
    late. `reduce_group` holds the same ranks, for gradients. On CPUs ranks wait in calls that time out.

    Entering it raises a RuntimeError if ranks were late for an earlier pass of the group.
    """
    if device.type != "cuda" or is_recorded(device):
        return _UNWATCHED
    passes = _passes.get(group)
    if passes is None:
        passes = _passes[group] = _passes_of(group, device)
        _watch.add(passes)
    if reduce_group is not None and reduce_group is not group:
        _moving[group].add(reduce_group)
    return _Watched(passes, device, is_backward=is_backward)


def _passes_of(group: dist.ProcessGroup, device: torch.device) -> Passes:
    """Those of a group, which they do not keep alive."""
    here = weakref.ref(group)
    moving = _moving[group] = weakref.WeakSet([group])

    def timeout() -> float:
        alive = here()
        # Nobody waits for a group that was destroyed.
        return math.inf if alive is None else _compat.timeout_of(alive, device).total_seconds()

    def release_all() -> None:
        for x in list(moving):
            release(x)

    roll_call = RollCall(lambda: _compat.own_store_of(here()), group.rank(), group.size())
    of_group = (group.group_name, group.rank(), timeout, roll_call, release_all)
    return Passes(*of_group, aside=Aside(_watch.prepare))
