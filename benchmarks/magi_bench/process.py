"""Workers: asked with a time limit, and started again after a crash. Imports nothing of magi_compile,
which workers may have another of."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple


class WorkerLost(Exception):
    """The worker died or was stopped; `status` is what the row says: "crash" or "timeout"."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Running(NamedTuple):
    process: subprocess.Popen
    requests: IO[bytes]
    replies: IO[bytes]
    log: IO[bytes]


class Process:
    """A process of Python that answers requests. It starts at the first one, and again after it was lost or spent."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None):
        self._command, self._environment = [sys.executable, *arguments], environment
        self._running: _Running | None = None

    def ask(self, request: dict[str, Any], limit_s: float) -> Any:
        """Asks the worker, which is started if it does not run, and waits for its answer. WorkerLost: it died, or
        took longer than `limit_s` and was stopped."""
        self._running = self._running or _start(self._command, self._environment)
        requests = self._running.requests
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
        except BrokenPipeError:
            raise self._lost(self._running) from None
        reply = json.loads(self._read_line(self._running, time.monotonic() + limit_s))
        if reply["spent"]:
            self.stop()
        return reply["answer"]

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._running is None:
            return
        self._running.process.kill()
        self._running.process.communicate()
        self._running.log.close()
        self._running = None

    def _read_line(self, running: _Running, deadline: float) -> bytes:
        received = b""
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([running.replies], [], [], left)[0]:
                self.stop()
                raise WorkerLost("timeout", "took longer than its time limit and was stopped")
            chunk = os.read(running.replies.fileno(), 65536)
            if not chunk:
                raise self._lost(running)
            received += chunk
        return received

    def _lost(self, running: _Running) -> WorkerLost:
        code = running.process.wait()
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        running.log.seek(0)
        lines = running.log.read().decode(errors="replace").strip().splitlines()
        self.stop()
        return WorkerLost("crash", f"{cause}: {lines[-1][:200] if lines else 'no output'}")


def serve(start: Callable[[], Callable[[dict[str, Any]], tuple[Any, bool]]]) -> None:
    """A worker's end: JSON requests on stdin, a JSON line `{"answer": ..., "spent": ...}` each on stdout. `start`
    makes the function of a request that gives the answer, and whether the process is spent: it has lost its GPU and
    must be replaced. What anybody prints goes to standard error from before that, also from C."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer_of = start()
    for line in sys.stdin:
        answer, spent = answer_of(json.loads(line))
        replies.write(json.dumps({"answer": answer, "spent": spent}) + "\n")
        replies.flush()


def _start(command: list[str], environment: Mapping[str, str] | None) -> _Running:
    log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
    )
    assert process.stdin and process.stdout
    return _Running(process, process.stdin, process.stdout, log)
