"""Texts of mask expressions: what is printed is read as the same, and nothing else is read."""

import pytest

from magi_compile.masks.expr.expr import ExprError
from magi_compile.masks.expr.parse import parse

PRINTED = [
    "(q >= kv) & (t0[b, q] == t0[b, kv])",
    "~(t0[kv] & (q // 3 * 3 == -kv))",
    "where(q < 3, kv, -1) >= max(q, min(3, t1))",
    "abs(q - kv) <= t0[t1[q], 5] - q + kv % 3",
    "(q < 3) ^ (kv < 4) | t0[kv]",
    "((q < 3) | (kv < 4)) & ~t0[kv]",
    "-(q * kv) + 2 != s0 - s1 * 3",
    "(q + 4) // -2 < (q - 1) * (kv - 1)",
    "q - (q - kv) // 2 > -7",
    "t0[-1] == t1",
    "True",
    "q",
]


@pytest.mark.parametrize("text", PRINTED)
def test_round_trip(text):
    expr = parse(text)
    assert str(expr) == text
    assert parse(str(expr)) == expr
    assert hash(parse(text)) == hash(expr)


@pytest.mark.parametrize(
    "text",
    [
        "q +",
        "x + q",
        "q < kv < 3",
        "q / 2",
        "q[3]",
        "t0[1:2]",
        "min(q)",
        "sin(q)",
        "q if kv else b",
        "1.5",
        "min(q, kv=3)",
    ],
)
def test_not_an_expression(text):
    with pytest.raises(ExprError, match="not a mask expression"):
        parse(text)
