"""The Triton kernels of score programs compile for GPUs that are not at hand, and their tiles fit there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import triton_config
from magi_compile.kernels.triton.score_source import score_functions
from magi_compile.score.read import trace_score_program
from tests.score.score_mods import CASES

from .test_device import IS_ALIGNED, POINTERS, SHARED_MEMORY

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

NAMES = {torch.float32: "*fp32", torch.int64: "*i64"}


def shared_memory(name: str, case: Any, head_dim: int, arch: tuple[int, int]) -> int:
    """Bytes of shared memory of a kernel for bf16 inputs with contiguous heads."""
    from magi_compile.kernels.triton import device_scores

    program, tables = trace_score_program(case.make(*case.tensors()), torch.device("cpu"))
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    wanted = program.differentiable_tables
    functions = score_functions(program.text, dtypes, ranks, wanted)
    problem = AttnProblem(
        "cuda", arch, torch.bfloat16, 8, 2, head_dim, head_dim, 1.0, has_score=True
    )
    config = triton_config(problem)
    is_k_walk = name == "dkdv"
    constants = {
        "TILE_ROWS": config.k_tile_rows if is_k_walk else config.q_tile_rows,
        "BLOCK_COLS": config.k_block_cols if is_k_walk else config.q_block_cols,
        "DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "DIM_V": head_dim,
        "PADDED_DIM_V": triton.next_power_of_2(head_dim),
        "HAS_BITS": False,
        "BY_ENTRY": False,
        "HAS_MAX_SCORES": True,  # of the forward
        "HAS_TOTALS": bool(wanted),
        "SCORES": functions.scores,
        "SLOPES": functions.slopes,
        "ADD_GRADIENTS": functions.add_gradients,
    }
    tuples = {
        "numbering": ("i32",) * 3,
        "tables": tuple(NAMES[dtype] for dtype in dtypes) or ("*i32",),
        "totals": ("*fp32",) * len(dtypes) or ("*i32",),
        "sizes": ("i32",) * max(1, sum(ranks)),
        "symbols": ("i32",),
    }
    kernel = getattr(device_scores, f"scored_{name}_kernel")
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            constexprs[i,] = constants[argument]
        elif argument in tuples:
            signature[argument] = tuples[argument]
        elif argument.endswith("_ptr"):
            signature[argument] = POINTERS.get(argument, "*bf16")
            attributes[i,] = IS_ALIGNED
        elif argument.endswith("_strides"):
            signature[argument] = ("i32", "i32", "constexpr")
            constexprs[i, 2] = 1
            attributes[i, 0] = attributes[i, 1] = IS_ALIGNED
        else:
            signature[argument] = "fp32" if argument == "softmax_scale" else "i32"
    major, minor = arch
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options=getattr(config, name)._asdict(),
    )
    return compiled.metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert shared_memory("dq", case, 64, (9, 0)) <= SHARED_MEMORY[9, 0]


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
    assert shared_memory(name, case, head_dim, arch) <= SHARED_MEMORY[arch]
