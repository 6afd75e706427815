"""C++ around sources of `csrc/sm90`, compiled for this machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

import pytest

from magi_compile.kernels.sm90.runtime.nvrtc import source_dir

# In place of the instructions of Hopper GPUs.
ON_A_CPU = {"common/ptx.cuh": "ptx_on_a_cpu.cuh", "common/wgmma.cuh": "wgmma_on_a_cpu.cuh"}


class Compiled:
    """C++ compiled once: kept for later runs of tests, under a digest of all that the compiler reads. Of the workers of
    one run, who asks first compiles it, and the others wait.

    The compiler runs until the first use of `path` waits for it. Skips the test where there is no g++.

    Args:
        directories: those of pytest.
        main: the source; it may include those of `csrc/sm90`, in which headers of this directory stand for those in
            `replaced`, and these headers.
        options: of the compiler.
        replaced: headers of this directory by those that they replace.
        headers: the texts of others, by name.
        header_options: of `options`, those with which the standard headers are compiled, once for all libraries. None
            for headers that are compiled with the rest.
        linked: an object to link to it. Without `-c` among the options, the result is a shared library.
    """

    def __init__(
        self,
        directories: pytest.TempPathFactory,
        main: str,
        options: str,
        replaced: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        header_options: str | None = None,
        linked: Compiled | None = None,
    ):
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        replaced, headers = replaced or {}, headers or {}
        key = _digest(main, options, replaced, headers)
        is_object = "-c" in options.split()
        self._library = kept_for_later() / f"{key}.{'o' if is_object else 'so'}"
        self._directory = _shared(directories) / f"library-{key}"
        self._compiler: subprocess.Popen | None = None
        if self._library.exists():
            os.utime(self._library)
            return
        try:
            self._directory.mkdir()
        except FileExistsError:
            return
        if header_options is not None:
            headers_of_all = _standard_headers(self._directory.parent, header_options)
            options = f"{options} -include {headers_of_all}"
        options = options if is_object else f"-shared {options}"
        inputs = "main.cpp" if linked is None else f"main.cpp {linked.path}"
        self._compiler = self._start(main, f"{options} {inputs}", replaced, headers)

    def _start(
        self, main: str, options: str, replaced: Mapping[str, str], headers: Mapping[str, str]
    ) -> subprocess.Popen:
        path = self._directory
        shutil.copytree(source_dir(), path, dirs_exist_ok=True)
        for name, header in replaced.items():
            shutil.copy(_HERE / header, path / name)
        for name, text in {**headers, "main.cpp": main}.items():
            (path / name).write_text(text)
        part = self._library.with_suffix(f".{os.getpid()}")
        command = f"g++ {_STANDARD} -I. -I{_HERE} {options} -o {part} 2> {_ERRORS}"
        command = f"{command} && mv {part} {self._library} || touch {_FAILED}"
        return subprocess.Popen(command, shell=True, cwd=path)

    @cached_property
    def path(self) -> Path:
        """Where it is, once it is there."""
        if self._compiler is not None:
            self._compiler.wait()
        done, failed = self._library, self._directory / _FAILED
        deadline = time.monotonic() + _LONGEST_S
        while not done.exists():
            assert not failed.exists(), (self._directory / _ERRORS).read_text()[:4000]
            assert time.monotonic() < deadline, f"nobody compiled {self._directory}"
            time.sleep(0.05)
        return done


def _digest(
    main: str, options: str, replaced: Mapping[str, str], headers: Mapping[str, str]
) -> str:
    """Of the compiler, its options, and every text that `main` includes from here or from `csrc/sm90`,
    under whatever condition."""
    texts = {"main.cpp": main}
    names = ["main.cpp"]
    while names:
        for name in re.findall(r'#include "(.*?)"', texts[names.pop()]):
            text = headers[name] if name in headers else _text(replaced.get(name, name))
            if name not in texts and text is not None:
                texts[name] = text
                names.append(name)
    key = repr((_compiler(), options, sorted(texts.items())))
    return hashlib.sha256(key.encode()).hexdigest()[:24]


@cache
def _text(name: str) -> str | None:
    """None for a header that is made for some variants."""
    paths = [folder / name for folder in (source_dir(), _HERE) if (folder / name).exists()]
    return paths[0].read_text() if paths else None


@cache
def _compiler() -> str:
    command = ["g++", "-v", *_STANDARD.split()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@cache
def kept_for_later() -> Path:
    """`$MAGI_COMPILE_TEST_CACHE_DIR`, or a folder in the user's cache directory;
    what was used longest ago has gone if it was full."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("MAGI_COMPILE_TEST_CACHE_DIR") or f"{caches}/magi_compile_tests"
    path = Path(folder).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_room(path)
    return path


def _make_room(folder: Path) -> None:
    size = 0
    with suppress(FileNotFoundError):  # another worker makes room too
        for file in sorted(folder.iterdir(), key=lambda x: x.stat().st_mtime, reverse=True):
            size += file.stat().st_size
            if size > _MOST_KEPT_BYTES:
                file.unlink()


def _shared(directories: pytest.TempPathFactory) -> Path:
    """The same for all workers of this run."""
    root = directories.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def _standard_headers(root: Path, options: str) -> Path:
    """A header with all that `ON_A_CPU` includes of the standard library, precompiled. The compiler takes its text
    where the precompiled one is not there, or not for its options."""
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
_FAILED, _ERRORS = "failed", "errors.txt"
_HERE = Path(__file__).parent
_MOST_KEPT_BYTES = 1 << 30
_LONGEST_S = 300.0


def compile_library(
    directories: pytest.TempPathFactory,
    main: str,
    options: str,
    replaced: Mapping[str, str] | None = None,
) -> ctypes.CDLL:
    """A library, loaded."""
    return ctypes.CDLL(str(Compiled(directories, main, options, replaced).path))
