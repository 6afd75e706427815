"""Lines of progress while a phase takes long and says nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENT_S = 30.0


@contextmanager
def said_while(doing: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
    """Every `SILENT_S` seconds a line says what is being done. Not for what is timed in this process.

    Args:
        doing: makes the line.
        say: takes it.

    Yields:
        Nothing.
    """
    done = threading.Event()

    def wait() -> None:
        while not done.wait(SILENT_S):
            say(doing())

    thread = threading.Thread(target=wait, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
