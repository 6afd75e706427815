"""The Triton tiles fit GPUs that are not at hand: Triton compiles for any of them anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import triton_config
from magi_compile.kernels.triton.kernel import sizes_of

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

SHARED_MEMORY = {(8, 0): 163 << 10, (8, 6): 99 << 10, (9, 0): 227 << 10}
IS_ALIGNED = [["tt.divisibility", 16]]
ROWS = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}
STATISTICS = {"lse_ptr", "max_scores_ptr", "delta_ptr"}


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
    tile_rows, block_cols = (
        (config.k_tile_rows, config.k_block_cols)
        if name == "dkdv"
        else (config.q_tile_rows, config.q_block_cols)
    )
    constants = {
        "S": sizes_of(problem, tile_rows, block_cols),
        "HAS_MAX_SCORES": True,  # of the forward
        **(program or dict.fromkeys(("SCORES", "SLOPES", "ADD_GRADIENTS"))),
    }
    types = types or {}
    score = (("fp32", "fp32"), *(types.get(x, "constexpr") for x in ("numbering", "captured")))
    types = {"softmax_scale": "fp32", "walk": ("*i32",) * 4, "score": score, **types}
    constants |= {} if "totals" in types else {"totals": None}
    kernel = getattr(triton_device, f"{name}_kernel")
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            constexprs[i,] = constants[argument]
        elif argument in ROWS:
            signature[argument] = ("*bf16", ("i32", "i32", "constexpr"))
            constexprs[i, 1, 2] = 1
            attributes |= dict.fromkeys([(i, 0), (i, 1, 0), (i, 1, 1)], IS_ALIGNED)
        elif argument in STATISTICS:
            signature[argument] = "*fp32"
            attributes[i,] = IS_ALIGNED
        else:
            signature[argument] = types.get(argument, "i32")
        if argument == "walk":
            attributes |= {(i, part): IS_ALIGNED for part in range(4)}
        if argument == "score":
            constexprs |= {(i, n): None for n in (1, 2) if score[n] == "constexpr"}
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
