"""Kernels of one thread block that work on lists, as they are, on a CPU: behind a header that knows one thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from tests.kernels.support.cpp import compile_library

_OPTIONS = "-O1 -fsanitize=undefined -fno-sanitize-recover"


def compile_for_one_thread(
    directories: pytest.TempPathFactory, variant: Variant, params: str, body: str
) -> Callable[[bytes], None]:
    """`body` as a function of packed `params`, a struct that it knows by a pointer of that name."""
    main = (
        f'#include "{variant.source}"\n'
        f'extern "C" void run(const ffa::{params}* params) {{ {body} }}\n'
    )
    options = " ".join([_OPTIONS, *(f"-D{name}={value}" for name, value in variant.defines)])
    replaced = {"common/block.cuh": "one_thread.cuh"}
    return compile_library(directories, main, options, replaced).run
