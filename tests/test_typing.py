"""What mypy tells a user's code: the package has types, and a flag that changes a result changes its type."""

import subprocess
import sys
from pathlib import Path

import pytest

import magi_compile

USER = """
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
from typing_extensions import assert_type

import magi_compile
from magi_compile import AttnOutput, AttnSlices
from magi_compile import create_block_mask, flex_attention, select_blocks
from magi_compile import flex_flash_attention
import magi_compile.dtensor
from magi_compile.dtensor import (
    ContextParallelOptions, SequencePlan, context_parallel, context_parallel_attention, plan
)
from magi_compile.dtensor.planning.rank_plan import PlanTensors
from magi_compile.masks import library


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, p: SequencePlan, tensors: PlanTensors
) -> None:
    assert_type(flex_attention(q, k, v, block_mask=mask), Tensor)
    assert_type(flex_attention(q, k, v, None, mask, None, True), Tensor)
    assert_type(flex_attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flex_attention(q, k, v, None, mask, None, True, True), tuple[Tensor, Tensor])
    assert_type(flex_attention(q, k, v, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
    assert_type(p.attention(q, k, v), Tensor)
    assert_type(p.attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(p.attention(q, k, v, return_aux=None), Tensor)
    with_aux = p.attention(q, k, v, return_lse=False, return_aux=AuxRequest(max_scores=True))
    assert_type(with_aux, tuple[Tensor, AuxOutput])
    p.attention(q, k, v, return_lse=True, return_aux=AuxRequest())  # error: [call-overload]
    assert_type(context_parallel_attention(q, k, v, tensors, "cp"), AttnOutput)
    named = library.document_causal([3, 4])
    assert_type(named.slices, AttnSlices)
    found = flex_flash_attention(q, k, v, named.slices, return_max_scores=True)
    assert_type(found, AttnOutput)
    assert_type(found.max_scores, Tensor | None)
    assert_type(create_block_mask(named.mask_mod, None, None, 7, 7), BlockMask)
    assert_type(select_blocks(q, k, 8, (64, 128), heads="group", by="first"), BlockMask)
    select_blocks(q, k, 8, heads="kv")  # error: [arg-type]
    magi_compile.enable(strict=True, kernel=None)
    magi_compile.enable(sloppy=True)  # error: [call-arg]
    magi_compile.enable(kernel="hoper")  # error: [arg-type]
    magi_compile.LoweringOptions(kernel="triton", bits=True)
    magi_compile.typo()  # error: [attr-defined]
    magi_compile.dtensor.typo()  # error: [attr-defined]
    context_parallel_attention(q, k, v, tensors, "cp", collective="nccl")  # error: [arg-type]
    ContextParallelOptions(strategy="ring")  # error: [arg-type]
    flex_flash_attention(q, k, v, named.slices, kernel="tritn")  # error: [arg-type]
    flex_flash_attention(q, k, v, mask)  # error: [arg-type]
    flex_attention(q, k, v, scale="large")  # error: [call-overload]
"""


@pytest.mark.slow
def test_a_users_file(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(USER)
    package = Path(magi_compile.__file__).parent
    assert (package / "py.typed").exists()
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += ["--config-file=", f"--cache-dir={tmp_path / 'cache'}", str(file)]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=package.parent, timeout=300, check=False
    )
    found = {
        (int(line.split(":")[1]), line.rsplit("[")[-1].rstrip("]"))
        for line in run.stdout.splitlines()
        if ": error: " in line
    }
    expected = {
        (number, line.split("error: [")[1].rstrip("]"))
        for number, line in enumerate(USER.splitlines(), 1)
        if "# error: [" in line
    }
    assert found == expected, run.stdout + run.stderr
