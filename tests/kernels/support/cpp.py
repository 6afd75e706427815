"""C++ around sources of `csrc/sm90`, compiled for this machine."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from magi_compile.kernels.sm90.runtime.nvrtc import source_dir

LIBRARY = "library.so"
# In place of the instructions of Hopper GPUs.
ON_A_CPU = {"common/ptx.cuh": "ptx_on_a_cpu.cuh", "common/wgmma.cuh": "wgmma_on_a_cpu.cuh"}


def compiler_command(
    path: Path, main: str, options: str, replaced: Mapping[str, str] | None = None
) -> list[str]:
    """Lays out an empty directory, in which the command then compiles `main` to `LIBRARY`; skips the test without g++.

    `main` may include the sources, in which headers of this directory stand for those in `replaced`, and these headers.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    here = Path(__file__).parent
    shutil.copytree(source_dir(), path, dirs_exist_ok=True)
    for name, header in (replaced or {}).items():
        shutil.copy(here / header, path / name)
    (path / "main.cpp").write_text(main)
    common = f"-std=c++17 -shared -fPIC -w -I. -I{here}"
    return ["g++", *common.split(), *options.split(), "main.cpp", "-o", LIBRARY]


def compile_library(
    path: Path, main: str, options: str, replaced: Mapping[str, str] | None = None
) -> ctypes.CDLL:
    """The library that `compiler_command` makes."""
    subprocess.run(compiler_command(path, main, options, replaced), cwd=path, check=True)
    return ctypes.CDLL(str(path / LIBRARY))
