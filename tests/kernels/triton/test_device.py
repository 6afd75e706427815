"""The Triton tiles fit GPUs that are not at hand: Triton compiles for any of them anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import triton_config

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

SHARED_MEMORY = {(8, 0): 163 << 10, (8, 6): 99 << 10, (9, 0): 227 << 10}
IS_ALIGNED = [["tt.divisibility", 16]]
POINTERS = {
    "tiles_ptr": "*i32",
    "runs_ptr": "*i32",
    "edges_ptr": "*i32",
    "bits_ptr": "*i32",
    "lse_ptr": "*fp32",
    "max_scores_ptr": "*fp32",
    "delta_ptr": "*fp32",
}


def shared_memory(
    name: str,
    head_dim: int,
    arch: tuple[int, int],
    has_bits: bool = False,
    program: dict[str, Any] | None = None,
    types: dict[str, Any] | None = None,
) -> int:
    """Bytes of shared memory of a kernel for bf16 inputs with contiguous heads;
    `types` are of the arguments of a program."""
    from magi_compile.kernels.triton import device as triton_device

    sizes = (8, 2, head_dim, head_dim)
    has_score = program is not None
    problem = AttnProblem(
        "cuda", arch, torch.bfloat16, *sizes, 1.0, has_bits=has_bits, has_score=has_score
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
        "HAS_SOFTCAP": False,
        "HAS_BITS": has_bits,
        "HAS_MAX_SCORES": True,  # of the forward
        **(program or dict.fromkeys(("SCORES", "SLOPES", "ADD_GRADIENTS"))),
    }
    types = {"factors": ("fp32", "fp32"), "softmax_scale": "fp32", **(types or {})}
    constants |= {x: None for x in ("numbering", "captured", "totals") if x not in types}
    kernel = getattr(triton_device, f"{name}_kernel")
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            constexprs[i,] = constants[argument]
        elif argument.endswith("_ptr"):
            signature[argument] = POINTERS.get(argument, "*bf16")
            attributes[i,] = IS_ALIGNED
        elif argument.endswith("_strides"):
            signature[argument] = ("i32", "i32", "constexpr")
            constexprs[i, 2] = 1
            attributes[i, 0] = attributes[i, 1] = IS_ALIGNED
        else:
            signature[argument] = types.get(argument, "i32")
    major, minor = arch
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options=getattr(config, name)._asdict(),
    )
    return compiled.metadata.shared


@pytest.mark.parametrize("name", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [  # those that come closest to the limit
        pytest.param((8, 6), 256, id="sm_86-256"),
        pytest.param((8, 0), 128, id="sm_80-128", marks=pytest.mark.slow),
        pytest.param((9, 0), 256, id="sm_90-256", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "has_bits",
    [
        pytest.param(True, id="bits"),
        pytest.param(False, id="intervals", marks=pytest.mark.slow),
    ],
)
def test_fits_in_shared_memory(arch, head_dim, name, has_bits, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert shared_memory(name, head_dim, arch, has_bits) <= SHARED_MEMORY[arch]
