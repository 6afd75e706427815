"""What NVRTC makes of the kernels with a score program."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import forward_config
from magi_compile.kernels.sm90.backward.variants import backward_variants
from magi_compile.kernels.sm90.forward.launch import forward_variant
from magi_compile.kernels.sm90.runtime.nvrtc import compile_variant
from magi_compile.kernels.sm90.scores.source import score_source
from magi_compile.score.read import trace_score_program
from tests.score.score_mods import CASES


@pytest.mark.parametrize("head_dim", [64, 128])
def test_alibi_spills_nothing(head_dim):
    (case,) = (case for case in CASES if case.name == "alibi")
    captures = [x.detach() for x in case.tensors(torch.float32)]
    program, tables = trace_score_program(case.make(*captures), torch.device("cpu"))
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    score = score_source(program.text, dtypes, ranks, has_short_sequences=True, may_shift=True)
    heads = (32, 8, head_dim, head_dim)
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, *heads, head_dim**-0.5, has_score=True)
    forward = forward_variant(problem, forward_config(problem), score=score)
    for variant in (forward, backward_variants(problem, score=score)[1]):
        compile_variant(replace(variant, may_spill=False))
