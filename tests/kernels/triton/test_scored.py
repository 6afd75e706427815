"""Score programs on the Triton kernel: on a GPU, and everywhere in Triton's interpreter."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.triton import TritonKernel
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.options import LoweringOptions
from magi_compile.score.read import trace_score_program
from tests.score.score_mods import (
    BATCH,
    CASES,
    SEQLEN,
    assert_as_good_as_plain,
    causal,
    qkv,
    results,
)
from tests.support.triton_interpreter import needs_triton, run_interpreted

CPU = torch.device("cpu")
PROBLEM = AttnProblem("cuda", (8, 0), torch.float32, 2, 2, 64, 64, 1.0, has_score=True)


@needs_triton
def test_in_the_interpreter():
    run_interpreted(Path(__file__).parents[1] / "support" / "interpreted_scores.py")


def test_what_has_no_code_is_refused_with_its_name():
    program, _ = trace_score_program(lambda s, b, h, q, kv: torch.lgamma(s), CPU)
    needs = ScoreNeeds(program, (), (), wants_table_gradients=False)
    (reason,) = TritonKernel().score_refusals(PROBLEM, needs)
    assert reason == "has no code for the score_mod: `lgamma` is not written in Triton"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_gpu(case, dtype):
    torch._dynamo.reset()  # all cases have the code of one function
    visible = create_mask(causal, None, None, SEQLEN, SEQLEN, device="cpu")
    mask = create_block_mask(causal, BATCH, None, SEQLEN, SEQLEN, device="cuda")
    tensors, captures = qkv(dtype), case.tensors(dtype)
    options = LoweringOptions(strict=True, kernel="triton")

    @torch.compile(backend=make_backend("aot_eager", options), fullgraph=True)
    def attend(q, k, v, captures):
        score_mod = case.make(*captures)
        return flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)

    def on_gpu(*qkv):
        moved = [x.cuda() for x in captures]
        return [x.cpu() for x in attend(*(x.cuda() for x in qkv), moved)]

    ours = results(on_gpu, tensors, captures)
    assert_as_good_as_plain(ours, case.make, tensors, captures, visible)
