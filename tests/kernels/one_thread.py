"""Kernels of one thread block that work on lists, as they are, on a CPU: behind a header that knows one thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from magi_compile.kernels.cuda.nvrtc import Variant, source_dir

_OPTIONS = "-std=c++17 -O1 -shared -fPIC -w -fsanitize=undefined -fno-sanitize-recover"


def compile_for_one_thread(
    directories: pytest.TempPathFactory, variant: Variant, params: str, body: str
) -> Callable[[bytes], None]:
    """`body` as a function of packed `params`, a struct that it knows by a pointer of that name."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = directories.mktemp("one_thread")
    for name in (variant.source, "plan.cuh"):
        shutil.copy(source_dir() / name, path)
    shutil.copy(Path(__file__).parent / "one_thread.cuh", path / "block.cuh")
    (path / "main.cpp").write_text(
        f'#include "{variant.source}"\n'
        f'extern "C" void run(const ffa::{params}* params) {{ {body} }}\n'
    )
    defines = [f"-D{name}={value}" for name, value in variant.defines]
    command = ["g++", *_OPTIONS.split(), *defines, "main.cpp", "-o", "run.so"]
    subprocess.run(command, cwd=path, check=True)
    return ctypes.CDLL(str(path / "run.so")).run
