"""Expressions: kinds, folding, programs."""

import pytest
import torch

from magi_compile.masks import MaskProgram
from magi_compile.masks.expr.expr import (
    END,
    FALSE,
    TRUE,
    ExprError,
    const,
    is_le,
    table,
    var,
)
from magi_compile.masks.expr.parse import parse
from tests.masks.expr.test_parse import PRINTED
from tests.masks.support.helpers import evaluate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q - kv + 3 - q <= 2 * (kv - 1) + s0", "-kv + 3 <= kv * 2 + s0 - 2"),
        ("(q < kv) & True", "q < kv"),
        ("(q < kv) | True", "True"),
        ("(q < kv) & False", "False"),
        ("(q < kv) ^ True", "q >= kv"),
        ("(q < kv) ^ (q < kv)", "False"),
        ("~~(q < kv)", "q < kv"),
        ("(q < 3) == (kv < 4)", "~((q < 3) ^ (kv < 4))"),
        ("q - q <= 0", "True"),
        ("kv == kv", "True"),
        ("max(q, 0) + min(q, q + 2)", "q * 2"),
        ("max(q, q - 3)", "q"),
        ("3 * 4 % 5 // 2", "1"),
        ("abs(-3)", "3"),
        ("q // 1 + q % 1 + kv * 0", "q"),
        ("where(True, q, kv)", "q"),
        ("where(q < 3, kv, kv)", "kv"),
        ("where(q < 3, True, kv < 4)", "(q < 3) | (kv < 4)"),
        ("where(q < 3, False, kv < 4)", "(q >= 3) & (kv < 4)"),
        ("where(q < 3, kv < 4, True)", "(q >= 3) | (kv < 4)"),
        ("where(q < 3, kv < 4, False)", "(q < 3) & (kv < 4)"),
        ("(q < 3) * (kv < 4)", "(q < 3) & (kv < 4)"),
        ("(q < 3) + (kv < 4)", "(q < 3) | (kv < 4)"),
    ],
)
def test_folding(text, expected):
    assert str(parse(text)) == expected


@pytest.mark.parametrize("text", [text for text in PRINTED if "t1[" not in text])
def test_folding_keeps_values(text):
    tables = [torch.tensor([[3, 1, 0, 2, 5], [4, 0, 1, 3, 3]]) > 1, torch.tensor(4)]
    if "t0[b" not in text:
        tables[0] = tables[0][0]
    folded = str(parse(text))
    found, expected = (evaluate(t, 2, 5, 5, tables, [5, 2]) for t in (folded, text))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q & kv", "`&` of integer `q` and integer `kv`"),
        ("q | (kv < 3)", r"`\|` of integer `q` and truth value `kv < 3`"),
        ("q ^ kv", r"`\^` of integer"),
        ("~q", "`~` of integer `q`"),
        ("(q < 3) + t0[q]", r"`\+` of truth value `q < 3` and captured value"),
        ("(q < 3) - (kv < 3)", "`-` of"),
        ("t0[q] * (q < 3)", r"`\*` of"),
        ("(q < 3) // (kv < 3)", "`//` of"),
        ("(q < 3) % t0[q]", "`%` of"),
        ("abs(q < 3)", "`abs` of"),
        ("min(q < 3, t0[q])", "`min` of"),
        ("max(q < 3, t0[q])", "`max` of"),
        ("(q < 3) < t0[q]", "`<` between"),
        ("where(q, 1, 2)", "`where` of"),
        ("q // 0", "division by zero"),
        ("q % 0", "division by zero"),
    ],
)
def test_operands_of_the_wrong_kind(text, message):
    with pytest.raises(ExprError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("(q < 3) == 1", "q < 3"),
        ("0 == (q < 3)", "q >= 3"),
        ("(q < 3) != 1", "q >= 3"),
        ("(q < 3) == 2", "False"),
        ("(q < 3) >= 0", "True"),
        ("(q < 3) > kv", "where(q < 3, 1 > kv, 0 > kv)"),
        ("(q < 3) < (kv < 3)", "(q >= 3) & (kv < 3)"),
        ("(q < 3) <= (kv < 3)", "where(q < 3, kv < 3, True)"),
        ("(q < 3) + 1", "where(q < 3, 1, 0) + 1"),
        ("1 - (q < 3)", "1 - where(q < 3, 1, 0)"),
        ("(q < 3) * 2", "where(q < 3, 1, 0) * 2"),
        ("(q < 3) // 2", "where(q < 3, 1, 0) // 2"),
        ("(q < 3) % 2", "where(q < 3, 1, 0) % 2"),
        ("min(q < 3, q)", "min(where(q < 3, 1, 0), q)"),
        ("max(q < 3, kv < 3)", "(q < 3) | (kv < 3)"),
        ("min(q < 3, kv < 3)", "(q < 3) & (kv < 3)"),
        ("where(q < 3, 7, kv < 2)", "where(q < 3, 7, where(kv < 2, 1, 0))"),
    ],
)
def test_truth_beside_numbers(text, same):
    assert parse(text) == parse(same)


def test_kinds():
    assert parse("t0[q]").kind == "any"
    assert parse("where(q < 3, t0[q], t1[q])").kind == "any"
    assert parse("where(q < 3, q, 3)").kind == "int"
    assert parse("min(t0, t1)").kind == "any"
    assert parse("t0[q] == t0[kv]").kind == "bool"


def test_variables_and_truth_constants():
    assert parse("t0[b, q] < kv").variables == {"b", "q", "kv"}
    assert const(True) is TRUE
    assert const(1) != TRUE
    assert const(0) != FALSE
    assert table(0, var("q")) == parse("t0[q]")
    assert table(0) != "t0"
    assert repr(parse("q < 3")) == "Expr(q < 3)"


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ("q", "q + 3", True),
        ("q + 3", "q", False),
        ("0", "q + b * 2", True),
        ("0", "t0[q]", False),
        ("min(t0, 3)", "3", True),
        ("max(q, kv)", "max(kv, q + 1)", True),
        ("q - kv", "q", True),
        ("0", "abs(t0[q]) + q % 3 + q // 2", True),
        ("0", "t0[q] // 2", False),
        ("t0[q]", str(END), True),
    ],
)
def test_is_le(x, y, expected):
    assert is_le(parse(x), parse(y)) is expected


def test_program_round_trip():
    program = MaskProgram(parse("t0[q] == t1[kv]"), ("document ids, {new}", "L['x'].cell[0]"))
    assert program.names == ("document ids, {new}", "L['x'].cell[0]")
    assert str(program) == "t0[q] == t1[kv]  # t0: document ids, {new}, t1: L['x'].cell[0]"
    assert MaskProgram.parse(str(program)) == program
    assert program.describe(program.expr) == "document ids, {new}[q] == L['x'].cell[0][kv]"
    assert (program.num_captures, program.num_symbols, program.max_intervals()) == (2, 0, 1)
    assert not program.is_always_true
    odd = MaskProgram(parse("t0[q] == t1[kv]"), ("a,  t1: `b`#\n", "c"))
    assert str(odd) == "t0[q] == t1[kv]  # t0: a t1: b, t1: c"
    assert MaskProgram.parse(str(odd)) == odd
    assert MaskProgram.parse("True").is_always_true


@pytest.mark.parametrize("text", ["q < 3 # t1: x", "q < 3 # nothing", "q < 3 #"])
def test_program_with_bad_names(text):
    with pytest.raises(ExprError, match="not a list of names"):
        MaskProgram.parse(text)
