"""The build of the launcher of `csrc/host`, by the C++ compiler of the machine: a process beside this one.

begin()   ->   is_done()   no: calls go through Python
               library()   the file, from then on also in the cache
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from magi_compile.kernels.sm90.runtime import cubin_cache
from magi_compile.kernels.sm90.runtime.nvrtc import source_dir

logger = logging.getLogger("magi_compile")

_OPTIONS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_MOST_SECONDS = 120


class Build:
    """A launcher that is in the cache, or that a compiler has begun to make.

    Raises:
        OSError: if there is no compiler, or no directory to compile in.
    """

    def __init__(self) -> None:
        source = source_dir().parent / "host" / "launcher.cpp"
        compiler = os.environ.get("CXX") or next(
            (x for x in ("c++", "g++", "clang++") if shutil.which(x)), None
        )
        if compiler is None:
            raise FileNotFoundError(
                "there is no C++ compiler (c++, g++ or clang++), and `CXX` is not set"
            )
        made_for = repr((compiler, _OPTIONS, os.uname().machine))
        digest = hashlib.sha256(source.read_bytes() + made_for.encode()).hexdigest()
        self._name = f"launcher-{digest[:32]}.so"
        self._library = cubin_cache.opened(self._name)
        self._compiler = None if self._library is not None else _Compiler(compiler, source)

    def is_done(self) -> bool:
        """True if nobody waits in `library`."""
        return self._compiler is None or self._compiler.is_done()

    def library(self) -> int:
        """The library, for its one user.

        Returns:
            A descriptor of its file. Where it cannot be kept, nothing else refers to that file.

        Raises:
            OSError: if the compiler failed.
            subprocess.SubprocessError: if it takes too long.
        """
        if self._compiler is not None:
            with self._compiler as built:
                cubin_cache.write(self._name, built.read_bytes())
                self._library = cubin_cache.opened(self._name)
                if self._library is None:
                    self._library = os.open(built, os.O_RDONLY)
        assert self._library is not None
        return self._library


class _Compiler:
    """A compiler at work, which does not outlive this process; a context with the file that it makes."""

    def __init__(self, compiler: str, source: Path):
        self._of_process = os.getpid()
        self._directory = Path(tempfile.mkdtemp(prefix="magi_compile-"))
        atexit.register(self._end)
        self._built, self._log = self._directory / "launcher.so", self._directory / "log"
        self._command = [compiler, *_OPTIONS, "-o", str(self._built), str(source), "-ldl"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def is_done(self) -> bool:
        return self._process.poll() is not None

    def __enter__(self) -> Path:
        try:
            if self._process.wait(_MOST_SECONDS):
                said = self._log.read_text(errors="replace").strip()[-500:]
                raise OSError(f"{' '.join(self._command)} failed: {said}")
        except BaseException:
            self._end()
            raise
        return self._built

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        atexit.unregister(self._end)
        if os.getpid() == self._of_process:  # and not in a fork
            if hasattr(self, "_process"):
                self._process.kill()
                self._process.wait()
            shutil.rmtree(self._directory, ignore_errors=True)


def build() -> int:
    """Builds the launcher now, if the cache has none that is whole and to be trusted; see `Build`."""
    return Build().library()


def begin() -> Build | None:
    """The build of this process, which begins when the first one asks; None where the launcher is switched off, or
    cannot be built, which is logged once."""
    with _beginning:
        return _begun(os.getpid())


_beginning = threading.Lock()


@cache
def _begun(process: int) -> Build | None:
    if os.environ.get("MAGI_COMPILE_LAUNCHER", "1") == "0":
        return None
    try:
        return Build()
    except OSError as error:
        log_absence(error)
        return None


def log_absence(error: Exception) -> None:
    """Says why there is no launcher."""
    logger.info("calls go through Python and take longer on the host: no launcher: %s", error)
