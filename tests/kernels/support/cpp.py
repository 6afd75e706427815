"""C++ around sources of `csrc/sm90`, compiled for this machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import pytest

from magi_compile.kernels.sm90.runtime.nvrtc import source_dir

# In place of the instructions of Hopper GPUs.
ON_A_CPU = {"common/ptx.cuh": "ptx_on_a_cpu.cuh", "common/wgmma.cuh": "wgmma_on_a_cpu.cuh"}


class Library:
    """C++ compiled once for all workers of a run of tests: whoever asks first compiles it, the others wait.

    The compiler runs until the first use of `path` waits for it. Skips the test where there is no g++.

    Args:
        directories: those of pytest.
        main: the source; it may include those of `csrc/sm90`, in which headers of this directory stand for those in `replaced`, and
            these headers.
        options: of the compiler.
        replaced: headers of this directory by those that they replace.
        headers: the texts of others, by name.
        header_options: of `options`, those with which the standard headers are compiled, once for all libraries. None for headers that
            are compiled with the rest.
    """

    def __init__(
        self,
        directories: pytest.TempPathFactory,
        main: str,
        options: str,
        replaced: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        header_options: str | None = None,
    ):
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        root = _shared(directories)
        headers = headers or {}
        key = repr((main, options, sorted((replaced or {}).items()), sorted(headers.items())))
        self._directory = root / f"library-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        self._compiler: subprocess.Popen | None = None
        try:
            self._directory.mkdir()
        except FileExistsError:
            return
        if header_options is not None:
            options = f"{options} -include {_standard_headers(root, header_options)}"
        self._compiler = self._start(main, options, replaced or {}, headers)

    def _start(
        self, main: str, options: str, replaced: Mapping[str, str], headers: Mapping[str, str]
    ) -> subprocess.Popen:
        here, path = Path(__file__).parent, self._directory
        shutil.copytree(source_dir(), path, dirs_exist_ok=True)
        for name, header in replaced.items():
            shutil.copy(here / header, path / name)
        for name, text in {**headers, "main.cpp": main}.items():
            (path / name).write_text(text)
        command = f"g++ {_STANDARD} -shared -I. -I{here} {options} main.cpp -o part.so 2> {_ERRORS}"
        command = f"{command} && mv part.so {_DONE} || touch {_FAILED}"
        return subprocess.Popen(command, shell=True, cwd=path)

    @cached_property
    def path(self) -> Path:
        """Where it is, once it is there."""
        if self._compiler is not None:
            self._compiler.wait()
        done, failed = self._directory / _DONE, self._directory / _FAILED
        deadline = time.monotonic() + _LONGEST_S
        while not done.exists():
            assert not failed.exists(), (self._directory / _ERRORS).read_text()[:4000]
            assert time.monotonic() < deadline, f"nobody compiled {self._directory}"
            time.sleep(0.05)
        return done


def _shared(directories: pytest.TempPathFactory) -> Path:
    """The same for all workers of this run."""
    root = directories.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def _standard_headers(root: Path, options: str) -> Path:
    """A header with all that `ON_A_CPU` includes of the standard library, precompiled. The compiler takes its text where the
    precompiled one is not there, or not for its options."""
    path = root / f"standard-{hashlib.sha256(options.encode()).hexdigest()[:24]}.hpp"
    written = root / f"{path.stem}.{os.getpid()}.hpp"
    written.write_text("".join(f"#include <{name}>\n" for name in _STANDARD_HEADERS))
    try:
        path.hardlink_to(written)
    except FileExistsError:
        return path
    command = f"g++ {_STANDARD} {options} -x c++-header {written} -o {written}.gch"
    subprocess.run(command, shell=True, check=True)
    Path(f"{written}.gch").rename(f"{path}.gch")
    return path


_STANDARD = "-std=c++17 -fPIC -w"
_STANDARD_HEADERS = (
    *("algorithm", "cmath", "cstdint", "cstring", "deque", "functional", "list", "memory"),
    *("numeric", "random", "utility", "vector"),
)
_DONE, _FAILED, _ERRORS = "library.so", "failed", "errors.txt"
_LONGEST_S = 300.0


def compile_library(
    directories: pytest.TempPathFactory,
    main: str,
    options: str,
    replaced: Mapping[str, str] | None = None,
) -> ctypes.CDLL:
    """A `Library`, loaded."""
    return ctypes.CDLL(str(Library(directories, main, options, replaced).path))
