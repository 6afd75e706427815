"""What is read of score_mods, and what is refused, is what they compute."""

import pytest
import torch
from torch.fx import symbolic_trace

from magi_compile.score.program import UnsupportedScoreModError
from magi_compile.score.read import read_score_graph, trace_score_program

CPU = torch.device("cpu")


def code_of(score_mod):
    return trace_score_program(score_mod, CPU).program.code


def test_scores_are_fp32_and_indices_int32():
    code = code_of(
        lambda score, b, h, q, kv: (score + q / 2).to(score.dtype) + (q + 1).to(kv.dtype)
    )
    assert "_to_copy" not in code


def test_gradients_are_those_of_autograd():
    functions = trace_score_program(
        lambda score, b, h, q, kv: torch.tanh(score) * score.clamp(-1, 1), CPU
    ).program.functions
    for value in (-2.0, 0.3, 1.5):
        score = torch.tensor(value, requires_grad=True)
        (want,) = torch.autograd.grad(torch.tanh(score) * score.clamp(-1, 1), score)
        assert functions["d_score"](g=torch.tensor(1.0), score=score.detach()) == want


def test_what_never_has_a_gradient_has_no_function():
    table = torch.randn(4, requires_grad=True)
    code = code_of(lambda score, b, h, q, kv: torch.where(table[h] > 0, score.round(), kv * 1.0))
    assert "def score(" in code
    assert "def d_l0_t0" not in code


def test_numbers_that_are_not_known():
    def score_mod(score, b, h, q, kv, table, width):
        return score + table[q // width] * (width / 2)

    graph = symbolic_trace(score_mod)
    read = read_score_graph(graph, [torch.randn(9), 4], ["bias"], CPU)
    assert [node.name for node in (*read.tables, *read.symbols)] == ["table", "width"]
    assert read.program.num_symbols == 1
    assert read.program.functions["l0_t0_0"](q=torch.tensor(9), s0=4) == 2
    assert "bias" in read.program.title


def test_a_float_that_is_not_known():
    graph = symbolic_trace(lambda score, b, h, q, kv, slope: score + slope)
    with pytest.raises(UnsupportedScoreModError, match="it captures a float whose value is not"):
        read_score_graph(graph, [0.5], [], CPU)


def test_chained_look_ups_are_one():
    table = torch.arange(24.0).view(2, 3, 4)
    program, tables = trace_score_program(
        lambda score, b, h, q, kv: score + table[b][q][kv] + table[:, q][b, kv], CPU
    )
    (look,) = program.looks
    at = [program.functions[name] for name in look.indices]
    assert [f(torch.tensor(n)) for f, n in zip(at, (1, 2, 3), strict=True)] == [1, 2, 3]
    assert tables[0] is table


def test_one_program_for_equal_score_mods():
    def make(table):
        return lambda score, b, h, q, kv: score + table[h]

    first, second = (trace_score_program(make(torch.randn(4)), CPU) for _ in range(2))
    assert first.program is second.program
    assert first.tables[0] is not second.tables[0]
    other = trace_score_program(make(torch.randn(4).double()), CPU)
    assert other.program is not first.program


def test_captures_of_another_number():
    graph = symbolic_trace(lambda score, b, h, q, kv, table: score + table[h])
    with pytest.raises(ValueError, match=r"`captures` must have 1 entries, one for each .* got 0"):
        read_score_graph(graph, [], [], CPU)


def test_a_value_that_is_used_several_times_is_named_once():
    def score_mod(score, b, h, q, kv):
        for _ in range(30):
            score = score * score
        return score

    title = trace_score_program(score_mod, CPU).program.title
    assert title.startswith("x29 * x29 with x1 = (score * score), x2 = (x1 * x1)")
    assert len(title) < 310
