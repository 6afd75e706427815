"""Score programs are text, and their text says all."""

import pytest
import torch

from magi_compile.score.program import Look, ScoreCall, ScoreProgram
from magi_compile.score.read import trace_score_program

from .score_mods import CASES

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_text_and_parse_are_inverse(case):
    program = trace_score_program(case.make(*case.tensors()), CPU).program
    assert "\n" not in program.text
    assert ScoreProgram.parse(program.text) == program
    assert str(program) == program.title


def test_look_ups():
    """An index may depend on look-ups of lower numbers; a number is looked up without an index."""
    table, where = torch.randn(3, 5, requires_grad=True), torch.zeros(9, dtype=torch.int64)
    factor = torch.tensor(2.0, requires_grad=True)

    def score_mod(score, b, h, q, kv):
        return score * factor + table[where[q], h]

    program, tables = trace_score_program(score_mod, CPU)
    assert [x is y for x, y in zip(tables, (factor, where, table), strict=True)] == [True] * 3
    looks = program.looks
    assert looks == (
        Look("l0_t0", 0, ()),
        Look("l1_t1", 1, ("l1_t1_0",)),
        Look("l2_t2", 2, ("l2_t2_0", "l2_t2_1")),
    )
    assert program.differentiable_tables == (0, 2)
    assert program.title == "(score * factor) + table[where[q], h]"


def test_what_would_break_a_line_or_end_a_comment():
    program = ScoreProgram("a;; b\n# c", "def score(score):\n    return score\n")
    assert program.text == "a b c;; def score(score):;;     return score"


def test_a_text_that_is_no_program():
    with pytest.raises(ValueError, match="`program` must have a function `score`, got 'score'"):
        ScoreProgram.parse("score")


def test_rows_of_packed_tensors():
    program = ScoreProgram("", "")
    rows = torch.tensor([0, 9, 10, 35])
    b, head, q = ScoreCall(program, [], [], 10, 10).entry(rows)
    assert (b.tolist(), head.tolist(), q.tolist()) == ([0, 0, 1, 3], [0] * 4, [0, 9, 0, 5])
    b, head, q = ScoreCall(program, [], [], 10, 10, nheads=2).entry(rows)
    assert (b.tolist(), head.tolist(), q.tolist()) == ([0, 0, 0, 1], [0, 0, 1, 1], [0, 9, 0, 5])
