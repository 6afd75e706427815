"""The key intervals of a mask as expressions of the row."""

import pytest

from magi_compile.masks import MaskProgram, UnsupportedMaskError


def lanes(text):
    return [(str(lane.lo), str(lane.hi)) for lane in MaskProgram.parse(text).solved.lanes]


END = str(2**31 - 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("True", [("0", END)]),
        ("False", []),
        ("q >= kv", [("0", "q + 1")]),
        ("(q - kv <= 31) & (q >= kv)", [("max(q - 31, 0)", "q + 1")]),
        ("~((q - kv <= 31) & (q >= kv))", [("0", "q - 31"), ("q + 1", END)]),
        ("(kv < s0) | (q >= kv)", [("0", "max(s0, q + 1)")]),
        ("(kv > s0) | (q <= kv)", [("min(s0 + 1, q)", END)]),
        ("(kv > s0) | (kv > s0 + 2)", [("s0 + 1", END)]),
        ("q // 16 >= kv // 16", [("0", "q // 16 * 16 + 16")]),
        ("(q // 9 == kv // 9)", [("q // 9 * 9", "q // 9 * 9 + 9")]),
        ("abs(q - kv) <= 7", [("max(q - 7, 0)", "q + 8")]),
        ("kv != q", [("0", "q"), ("q + 1", END)]),
        ("(q < 3) & (kv < q)", [("0", "where(q < 3, q, 0)")]),
        ("(q < 3) | (kv < q)", [("0", f"where(q < 3, {END}, q)")]),
        ("where(q < 5, kv < 3, kv >= q)", [("where(q < 5, 0, q)", f"where(q < 5, 3, {END})")]),
        ("t0[q] == t1[kv]", [("group_begin(t1[kv], t0[q])", "group_end(t1[kv], t0[q])")]),
        ("t0[kv] <= t0[q]", [("0", "upper_bound(t0[kv], t0[q])")]),
        ("t0[kv] > t0[q]", [("upper_bound(t0[kv], t0[q])", END)]),
        ("-t0[kv] > q", [("0", "upper_bound(t0[kv], -q - 1)")]),
        ("t0[kv] * 2 == q", [
            ("where(q % 2 == 0, group_begin(t0[kv], q // 2), 0)",
             "where(q % 2 == 0, group_end(t0[kv], q // 2), 0)"),
        ]),
        ("kv * s0 <= q", [("0", "q // s0 + 1")]),
        ("kv * s0 >= q", [("-(-q // s0)", END)]),
        ("q - kv * s0 > 3", [("0", "(q - 4) // s0 + 1")]),
        ("kv * s0 - kv * 2 >= q", [("-(-q // (s0 - 2))", END)]),
        ("abs(kv * s0 - q) <= 3", [("max(0, -((-q + 3) // s0))", "(q + 3) // s0 + 1")]),
        ("t0[kv] // 4 + kv // 2 <= q", [("0", "upper_bound(t0[kv] // 4 + kv // 2, q)")]),
    ],
)  # fmt: skip
def test_lanes(text, expected):
    assert lanes(text) == expected


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("t0[kv]", ["t0[kv]"]),
        ("~t0[kv]", ["~t0[kv]"]),
        ("t0[kv] & (t1[kv] >= 3)", ["t0[kv] & (t1[kv] >= 3)"]),
        ("t0[kv] | t1[kv]", ["t0[kv] | t1[kv]"]),
        ("t0[kv] | (kv < 4)", ["t0[kv]", "True"]),
        ("where(q < 3, t0[kv], t1[kv])", ["t0[kv]", "t1[kv]"]),
        ("where(q < 3, t0[kv], False)", ["t0[kv]"]),
        ("t0[b, kv] == t1[b]", ["t0[b, kv] == t1[b]"]),
    ],
)
def test_conditions_of_keys(text, keys):
    assert [str(lane.keys) for lane in MaskProgram.parse(text).solved.lanes] == keys


@pytest.mark.parametrize(
    ("text", "promises"),
    [
        ("t0[kv] != t0[q]", [("is_grouped(t0[kv], t0[q])", "True")]),
        ("q // s0 == kv // s0", [("s0 > 0", "True")]),
        ("kv * t0[b] < q", [("t0[b] > 0", "True")]),
        ("max(kv, q) * s0 < 9", [("s0 > 0", "True")]),
        ("kv * -s0 >= q", [("-s0 > 0", "True")]),
        ("kv * s0 - kv * 2 >= q", [("s0 - 2 > 0", "True"), ("s0 > 0", "True")]),
    ],
)
def test_required_promises(text, promises):
    required = MaskProgram.parse(text).solved.required
    assert sorted({(str(p.holds), str(p.when)) for p in required}) == promises


@pytest.mark.parametrize(
    ("text", "promises"),
    [
        ("t0[kv] <= q", [("is_sorted(t0[kv])", "True")]),
        ("(q > 3) & (t0[kv] <= q)", [("is_sorted(t0[kv])", "q > 3")]),
        ("(q > 3) | (t0[kv] <= q)", [("is_sorted(t0[kv])", "q <= 3")]),
        ("(t0[kv] <= q) & (t0[kv] >= q - 3)", [("is_sorted(t0[kv])", "True")]),
        ("(t0[kv] <= q) | (kv < 4)", [("is_sorted(t0[kv])", "True")]),
        ("(t0[kv] == q) & (t1[kv] > q)", [("is_sorted(t1[kv])", "True")]),
    ],
)
def test_promises_of_order(text, promises):
    (lane,) = MaskProgram.parse(text).solved.lanes
    assert [(str(p.holds), str(p.when)) for p in lane.ordered] == promises


def test_all_reasons_at_once():
    text = "(h < 2) & (t0[q, kv] == 1) | (kv % b == 1) & (q * kv < 4)"
    with pytest.raises(UnsupportedMaskError) as error:
        MaskProgram.parse(text).require_one_mask()
    assert len(error.value.reasons) == 4
    assert len(MaskProgram.parse(text).refusals) == 3


def test_too_many_intervals():
    stripes = " | ".join(f"(kv == q + {3 * i})" for i in range(65))
    assert MaskProgram.parse(stripes.replace("(kv == q + 192)", "False")).max_intervals() == 64
    with pytest.raises(UnsupportedMaskError, match="up to 65 key intervals, at most 64"):
        MaskProgram.parse(stripes).max_intervals()
    many = " | ".join(f"(kv == q + {3 * i})" for i in range(8))
    more = " | ".join(f"(kv == q - {2 * i})" for i in range(9))
    with pytest.raises(UnsupportedMaskError, match="up to 72 key intervals"):
        MaskProgram.parse(f"({many}) & ({more})").max_intervals()


def test_reasons_use_the_names_of_tables():
    program = MaskProgram.parse("t0[q, kv] == 1  # t0: tree")
    with pytest.raises(UnsupportedMaskError, match=r"`tree\[q, kv\]` looks up a row and a key"):
        _ = program.solved
