"""The Triton kernels of score programs compile for GPUs that are not at hand, and their tiles fit there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magi_compile.kernels.triton.score_source import score_functions
from magi_compile.score.read import trace_score_program
from tests.score.score_mods import CASES

from .test_device import SHARED_MEMORY, shared_memory

NAMES = {torch.float32: "*fp32", torch.int64: "*i64"}


def shared_memory_of_program(name: str, case: Any, head_dim: int, arch: tuple[int, int]) -> int:
    """Bytes of shared memory of a kernel with the score program of `case`."""
    program, tables = trace_score_program(case.make(*case.tensors()), torch.device("cpu"))
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    functions = score_functions(program.text, dtypes, ranks, program.differentiable_tables)
    of_tables = tuple(NAMES[dtype] for dtype in dtypes) or ("i32",)
    types = {
        "numbering": ("i32",) * 3,
        "captured": (of_tables, ("i32",) * max(1, sum(ranks)), ("i32",)),
        "totals": ("*fp32",) * len(dtypes) or ("i32",),
    }
    constants = {field.upper(): function for field, function in functions._asdict().items()}
    return shared_memory(name, head_dim, arch, program=constants, types=types)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert shared_memory_of_program("dq", case, 64, (9, 0)) <= SHARED_MEMORY[9, 0]


@pytest.mark.parametrize("name", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [  # those that come closest to the limit
        pytest.param((8, 6), 256, id="sm_86-256"),
        pytest.param((8, 0), 128, id="sm_80-128", marks=pytest.mark.slow),
        pytest.param((9, 0), 256, id="sm_90-256", marks=pytest.mark.slow),
    ],
)
def test_fits_in_shared_memory(arch, head_dim, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = next(case for case in CASES if case.name == "relative")
    assert shared_memory_of_program(name, case, head_dim, arch) <= SHARED_MEMORY[arch]
