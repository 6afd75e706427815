"""What NVRTC makes of the kernels with a score program."""

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import forward_config, table_gradients_config
from magi_compile.kernels.sm90.backward.table_gradients import table_gradients_variant
from magi_compile.kernels.sm90.backward.variants import backward_variants, keeps_slopes
from magi_compile.kernels.sm90.forward.launch import forward_variant
from magi_compile.kernels.sm90.runtime.nvrtc import compile_variant
from magi_compile.kernels.sm90.scores.source import score_source
from magi_compile.score.read import trace_score_program
from tests.score.score_mods import CASES

PROGRAMS = {case.name: case for case in CASES}


def source_of(name, wants_gradients):
    captures = [x.requires_grad_(False) for x in PROGRAMS[name].tensors(torch.float32)]
    program, tables = trace_score_program(PROGRAMS[name].make(*captures), torch.device("cpu"))
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    wanted = program.differentiable_tables if wants_gradients else ()
    return score_source(program.text, dtypes, ranks, wanted=wanted)


def problem_of(head_dim, has_bits=False):
    sizes = (32, 8, head_dim, head_dim, head_dim**-0.5)
    return AttnProblem(*("cuda", (9, 0), torch.bfloat16, *sizes), has_bits=has_bits, has_score=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_alibi_spills_nothing(head_dim):
    score, problem = source_of("alibi", wants_gradients=False), problem_of(head_dim)
    forward = forward_variant(problem, forward_config(problem), score=score)
    for variant in (forward, backward_variants(problem, score=score)[1]):
        compile_variant(replace(variant, may_spill=False))


@pytest.mark.parametrize(
    ("name", "head_dim", "has_bits"),
    [
        *(("relative", head_dim, True) for head_dim in (64, 128, 192, 256)),
        *[("learned", 64, False), ("documents", 128, False)],
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                *((name, 128, False) for name in ("alibi", "relative", "t5")),
                *[("relative", 96, True), ("tanh_of_sums", 192, False)],
            )
        ),
    ],
)
def test_gradients_of_captured_tensors_spill_nothing(name, head_dim, has_bits):
    problem = problem_of(head_dim, has_bits)
    score = source_of(name, wants_gradients=True)
    variant = table_gradients_variant(problem, table_gradients_config(problem), score)
    compile_variant(replace(variant, may_spill=False))


@pytest.mark.parametrize(
    ("name", "has_bits", "deterministic"),
    [  # bits and an order of additions need registers most
        pytest.param(*x, marks=() if x[1] and x[2] else pytest.mark.slow)
        for x in itertools.product(
            ["learned", "tanh_of_sums", "where", "temperature", "square"],
            *[(False, True), (False, True)],
        )
    ],
)
def test_slopes_spill_nothing(name, has_bits, deterministic):
    score = source_of(name, wants_gradients=False)
    assert keeps_slopes(score)
    _, main, _ = backward_variants(problem_of(128, has_bits), deterministic, score=score)
    compile_variant(replace(main, may_spill=False))


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_come_behind_the_rest(name):
    """What the other kernels compile does not change with them."""
    plain, score = (source_of(name, wants_gradients=x) for x in (False, True))
    assert "kNumSums" not in plain.text
    assert (plain.tables, plain.num_words, plain.is_shift) == (
        score.tables,
        score.num_words,
        score.is_shift,
    )
    assert len(score.sums) == score.text.count("found[")
