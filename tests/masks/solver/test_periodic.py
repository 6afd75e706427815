"""Masks that repeat along the keys: how many intervals a row sees of so many keys, and which."""

import pytest

from magi_compile.masks import MaskProgram, UnsupportedMaskError, row_intervals
from magi_compile.masks.expr.parse import parse
from magi_compile.masks.solver.periodic import remainder_of, upper_bound_of
from tests.masks.support.helpers import evaluate


def lanes(text, seqlen_k, symbols=()):
    keys = MaskProgram.parse(text).keys(seqlen_k, symbols)
    return [(str(lane.lo), str(lane.hi)) for lane in keys.lanes]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(kv // 8 == q // 8) & (kv % 8 <= q % 8)", [("q // 8 * 8", "min(q // 8 * 8 + 8, q // "
         "8 * 8 + min(q % 8 + 1, 8))")]),
        ("kv % 12 == 5", [("5", "6"), ("17", "18"), ("29", "30")]),
        ("(kv + 4) % 12 == 5", [("1", "2"), ("13", "14"), ("25", "26")]),
        ("(kv < 16) & (kv % 16 > q)", [("q + 1", "16")]),
        ("(kv // 4 % 3 == 1) & (kv < 20)", [("4", "8"), ("16", "20")]),
        ("kv % 24 // 6 % 2 == 1", [("6", "12"), ("18", "24"), ("30", "36")]),
    ],
)  # fmt: skip
def test_lanes(text, expected):
    assert lanes(text, 30) == expected


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("(abs(kv // 9 - q // 9) <= 2) & (abs(kv % 9 - q % 9) <= 2)", [5, 5]),
        ("(abs(kv - q) <= 30) & ((kv - q) % 10 == 0)", [7, 7]),
        ("kv % 40 <= q % 40", [3, 25]),
        ("(kv >= 40) & (kv % 40 <= q % 40)", [2, 24]),
        ("(kv // 27 == q // 27) & (kv % 27 // 9 == 1) & (kv % 9 <= q % 9)", [1, 1]),
        ("(kv % s0 <= q) & (kv // s0 == q // s0)", [1, 1]),
        ("kv % s0 <= q", [3, 20]),
    ],
)
def test_how_many_intervals(text, counts):
    """As few as there are where both edges of what is seen move together, whatever the length."""
    program = MaskProgram.parse(text)
    assert [program.max_intervals(seqlen_k, [50]) for seqlen_k in (120, 1000)] == counts
    assert program.max_intervals() == 64
    for seqlen_k, count in zip((120, 1000), counts, strict=True):
        sizes = {"batch": 1, "seqlen_q": 70, "seqlen_k": seqlen_k}
        intervals = row_intervals(program, [], [50], **sizes)
        assert intervals.num_intervals == count
        assert intervals.to_dense().equal(evaluate(text, 1, 70, seqlen_k, [], [50]))


def test_short_periods():
    square = MaskProgram.parse("(abs(kv // 9 - q // 9) <= 2) & (abs(kv % 9 - q % 9) <= 2)")
    assert square.least_period(81) == square.least_period() == 9
    assert MaskProgram.parse("(kv // 9 == q // 9) & (kv % 9 <= q % 9)").least_period() is None
    assert MaskProgram.parse("q >= kv").least_period(81) is None
    by_symbol = MaskProgram.parse("kv % (s0 * 2) <= q")
    assert by_symbol.least_period(81) is None
    assert by_symbol.least_period(81, [7]) == 14
    assert by_symbol.least_period(14, [7]) is None


def test_too_many():
    stripes = MaskProgram.parse("kv % 2 == 1  # t0: document")
    assert stripes.max_intervals(128) == 64
    with pytest.raises(UnsupportedMaskError, match=r"`kv % 2`: a row needs up to 65 key intervals"):
        stripes.max_intervals(129)
    both = MaskProgram.parse("(kv % 9 == 1) | (kv % 10 == 0)")
    with pytest.raises(UnsupportedMaskError, match="up to 70 key intervals, at most 64"):
        row_intervals(both, batch=1, seqlen_q=3, seqlen_k=330)


def test_captured_ints():
    program = MaskProgram.parse("kv % (s0 - 4) <= q // (s0 - 5)")
    assert program.max_intervals(30, [14]) == 3
    with pytest.raises(ValueError, match=r"`s0 - 4` must be positive, keys repeat by it, got -1"):
        program.keys(30, [3])
    with pytest.raises(ValueError, match=r"`s0 - 5` must not be zero, it divides"):
        row_intervals(program, [], [5], batch=1, seqlen_q=3, seqlen_k=30)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("q // 9 * 9 + 9 - q // 9 * 9", 9),
        ("min(q + 3, 40) - max(q - 3, 0)", 6),
        ("min(q * 2 + 3, 40) - max(q, 5)", 35),
        ("where(q < 4, q + 9, 2) - where(q < 4, q, 0)", 9),
        ("q % 7 * 3 - kv", 18),
        ("max(q % 7, q % 9)", 8),
        ("q", None),
        ("min(q, t0[q])", None),
        ("3 - t0[q]", None),
    ],
)
def test_upper_bounds(text, bound):
    assert upper_bound_of(parse(text)) == bound


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("q * 8 + 13", 5),
        ("min(q * 8, t0[q] * 16) + 3", 3),
        ("max(q, b * 4) * 4", None),
        ("where(q < 4, 16, 8 - q * 8) + 1", 1),
        ("where(q < 4, 16, 9) * 8", 0),
        ("where(q < 4, 16, 9)", None),
        ("q", None),
    ],
)
def test_remainders(text, left):
    assert remainder_of(parse(text), 8) == left
