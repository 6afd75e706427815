"""Each kernel is compiled once in a process: ahead, in a few threads, or in the thread that needs it.

    begin([variant, ...])               ->   threads compile, while a graph is traced and Inductor works
    begin([variant, ...], later=True)   ->   one thread does so, one after another, when all of these are made
    cubin_of(variant)                   ->   what a thread has made, or is making; else compiled here

NVRTC works without Python's lock, so threads run at the same time. They need no GPU: the caller loads the cubin.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from magi_compile.kernels.sm90.runtime import launcher_build
from magi_compile.kernels.sm90.runtime.nvrtc import Variant, compile_variant

MOST_THREADS = 4  # a pass has three kernels or four, of which one is half of the work

Cubin = Future[bytes]


class Compilations:
    """The compilations of a process.

    A fork waits for those that run, and holds up others: in the child, NVRTC's own locks would stay locked.
    """

    def __init__(self) -> None:
        self._changes = threading.Condition()
        self._known: dict[Variant, Cubin] = {}
        self._queue: dict[Variant, None] = {}  # in order
        self._later: dict[Variant, None] = {}  # what nothing needs yet
        self._is_at_later = False  # a thread compiles one of these
        self._num_threads = 0
        self._num_running = 0  # in NVRTC, of any thread
        self._num_forks = 0

    def begin(self, variants: Iterable[Variant], *, later: bool = False) -> None:
        """Has threads compile what nobody has begun.

        Args:
            variants: the kernels.
            later: nothing needs them yet, so one thread compiles them when no other has anything to do. What is begun
                without it waits for none of them.
        """
        with self._changes:
            asked = dict.fromkeys(variants)
            new = dict.fromkeys(variant for variant in asked if variant not in self._known)
            self._known |= {variant: Future() for variant in new}
            if later:
                self._later |= new
                most = 1
            else:
                new |= dict.fromkeys(variant for variant in asked if variant in self._later)
                self._later = {variant: None for variant in self._later if variant not in new}
                self._queue |= new
                most = min(MOST_THREADS, os.cpu_count() or 1) + self._is_at_later
            for _ in range(min(len(new), most - self._num_threads)):
                try:
                    threading.Thread(target=self._work, name="magi_compile").start()
                except RuntimeError:  # the interpreter is about to end
                    break
                self._num_threads += 1

    def _work(self) -> None:
        """Compiles what waits, until nothing does. The end of the process waits for what runs, and for no more."""
        while True:
            with self._changes:
                is_later = not self._queue and self._num_threads == 1
                waiting = self._later if is_later else self._queue
                if not waiting or not threading.main_thread().is_alive():
                    self._num_threads -= 1
                    return
                variant = next(iter(waiting))
                del waiting[variant]
                self._is_at_later |= is_later
                cubin = self._known.get(variant)
                is_ours = cubin is not None and _take(cubin)
            if is_ours and cubin is not None:
                self._compile(variant, cubin)
            if is_later:
                with self._changes:
                    self._is_at_later = False

    def cubin_of(self, variant: Variant) -> bytes:
        """Waits for the thread that has begun to compile, else compiles here.

        Args:
            variant: the kernel.

        Returns:
            Its cubin.

        Raises:
            CompileError: if the compiler refuses it, wherever it ran; the next call tries again.
        """
        with self._changes:
            cubin = self._known.setdefault(variant, Future())
            is_ours = _take(cubin)
        if is_ours:
            self._compile(variant, cubin)
        try:
            return cubin.result()
        finally:
            if cubin.done() and cubin.exception() is not None:
                with self._changes:
                    if self._known.get(variant) is cubin:
                        del self._known[variant]

    def _compile(self, variant: Variant, cubin: Cubin) -> None:
        try:
            with self._in_nvrtc():
                cubin.set_result(compile_variant(variant))
        except (
            BaseException
        ) as error:  # Ctrl-C as well, wherever it comes: who asks next would wait forever
            if cubin.done():
                raise
            cubin.set_exception(error)

    @contextmanager
    def _in_nvrtc(self) -> Iterator[None]:
        with self._changes:
            self._changes.wait_for(lambda: self._num_forks == 0)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changes:
                self._num_running -= 1
                self._changes.notify_all()

    def before_fork(self) -> None:
        """Waits until nothing runs, and keeps it so."""
        self._changes.acquire()
        self._num_forks += 1
        self._changes.wait_for(lambda: self._num_running == 0)

    def after_fork(self) -> None:
        """Goes on."""
        self._num_forks -= 1
        self._changes.notify_all()
        self._changes.release()

    def after_fork_in_child(self) -> None:
        """Goes on without threads, and without what they were to do."""
        self._known = {variant: cubin for variant, cubin in self._known.items() if cubin.done()}
        self._queue.clear()
        self._later.clear()
        self._is_at_later = False
        self._num_threads = 0
        self.after_fork()


def _take(cubin: Cubin) -> bool:
    """True for the first thread that asks: it has to compile."""
    return not (cubin.running() or cubin.done()) and cubin.set_running_or_notify_cancel()


_compilations = Compilations()
os.register_at_fork(
    before=_compilations.before_fork,
    after_in_parent=_compilations.after_fork,
    after_in_child=_compilations.after_fork_in_child,
)

cubin_of = _compilations.cubin_of


def begin(variants: Iterable[Variant], *, later: bool = False) -> None:
    """Begins to compile kernels that calls will launch, and the launcher; `later` as in
    `Compilations.begin`."""
    launcher_build.begin()
    _compilations.begin(variants, later=later)
