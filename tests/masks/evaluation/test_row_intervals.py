"""Evaluating mask programs: exact whatever the mask, or an error that says what is wrong with the data."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from magi_compile import MaskDataError
from magi_compile.masks import (
    MaskProgram,
    UnsupportedMaskError,
    padded_slices_from_intervals,
    row_intervals,
    slices_from_intervals,
)
from magi_compile.masks.evaluation.block_lists import visible_blocks
from tests.masks.support.helpers import evaluate, packed
from tests.masks.support.random_masks import KEYS, LEAVES, ROWS, SIGNS, tables_for

rows, keys, signs = map(st.sampled_from, (ROWS, KEYS, SIGNS))
leaves = st.one_of(
    [st.builds(leaf.format, key=keys, sign=signs, row=rows, other=rows) for leaf in LEAVES]
)
masks = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("&|^"), inner),
        st.builds("(~{})".format, inner),
        st.builds("where({}, {}, {})".format, inner, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=250, deadline=None)
@given(masks, st.integers(1, 2), st.integers(1, 14), st.integers(1, 14), st.integers(0, 9))
def test_random_masks(text, batch, seqlen_q, seqlen_k, seed):
    """If there is a program and its checks hold, it is exact."""
    tables = tables_for(batch, max(seqlen_q, seqlen_k), seed)
    program = MaskProgram.parse(text)
    try:
        max_intervals = program.max_intervals(seqlen_k, [3])
    except UnsupportedMaskError:
        return
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    intervals = row_intervals(str(program), tables, [3], **sizes)
    if not all(bool(check.ok) for check in intervals.checks):
        return
    expected = evaluate(text, batch, seqlen_q, seqlen_k, tables, [3])
    assert torch.equal(intervals.to_dense(), expected)
    assert list(slices_from_intervals(intervals)) == list(
        padded_slices_from_intervals(intervals, max(max_intervals, 1) * batch * seqlen_q)[
            0
        ].normalize()
    )


@settings(max_examples=250, deadline=None)
@given(masks, st.integers(1, 2), st.integers(1, 14), st.integers(1, 14), st.integers(0, 9))
def test_random_masks_by_keys(text, batch, seqlen_q, seqlen_k, seed):
    """The same of masks that are solved for the rows that see a key."""
    tables = tables_for(batch, max(seqlen_q, seqlen_k), seed)
    program = replace(MaskProgram.parse(text), by_keys=True)
    assert MaskProgram.parse(program.text) == program
    if program.refusals or program.repeats:
        return
    intervals = row_intervals(
        program.text, tables, [3], batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )
    if not all(bool(check.ok) for check in intervals.checks):
        return
    expected = evaluate(text, batch, seqlen_q, seqlen_k, tables, [3])
    assert torch.equal(intervals.to_dense(), expected)
    slices = slices_from_intervals(intervals)
    assert torch.equal(slices.to_dense(), packed(expected))
    room = 3 * max(program.max_intervals(), 1) * batch * seqlen_k
    padded, fits = padded_slices_from_intervals(intervals, room)
    assert bool(fits.ok)
    assert list(padded.normalize()) == list(slices)
    if count := int((padded.q_ranges[:, 0] < padded.q_ranges[:, 1]).sum()):
        assert not bool(padded_slices_from_intervals(intervals, count - 1)[1].ok)
    by_block = zip(visible_blocks(intervals, 4, 3), (torch.any, torch.all), strict=True)
    for found, of_block in by_block:
        for i, j in itertools.product(*map(range, found.shape[2:])):
            block = expected[:, 4 * i : 4 * i + 4, 3 * j : 3 * j + 3].flatten(1)
            assert torch.equal(found[:, 0, i, j], of_block(block, 1))


def test_messages_about_keys():
    """They speak of rows where others speak of keys."""
    sizes = {"batch": 1, "seqlen_q": 4, "seqlen_k": 3}
    tables = [torch.tensor([0, 3, 1, 2])]
    for text, message in (
        ("t0[q] <= kv", r"`t0\[q\]` must never decrease along the rows that may see a key, but at key kv = 1"),
        ("t0[q] // 2 == kv", r"`t0\[q\] // 2` must hold equal values next to each other along q, but the value 0 "
         "that key kv = 0 of batch entry 0 looks up lies in several places"),
    ):  # fmt: skip
        program = replace(MaskProgram.parse(text), by_keys=True)
        with pytest.raises(MaskDataError, match=message):
            row_intervals(program, tables, **sizes).check()


def test_most_random_masks_are_evaluated():
    """The property above is not empty: simple masks with good tables never fail a check."""
    leaves = [
        "(q >= kv)",
        "(t0[q] == t0[kv])",
        "(t2[kv] <= t2[q])",
        "(kv < t4[b])",
        "(abs(q - kv) <= 3)",
    ]
    for seed in range(5):
        tables = tables_for(2, 12, seed)
        for x in leaves:
            for y in leaves:
                for text in (f"{x} & {y}", f"{x} | {y}", f"{x} & ~{y}", f"{x} ^ {y}"):
                    sizes = {"batch": 2, "seqlen_q": 12, "seqlen_k": 9}
                    intervals = row_intervals(text, tables, **sizes)
                    intervals.check()
                    assert torch.equal(intervals.to_dense(), evaluate(text, 2, 12, 9, tables))


# What tables must be like

SIZES = {"batch": 2, "seqlen_q": 6, "seqlen_k": 6}


@pytest.mark.parametrize(
    ("text", "table", "message"),
    [
        (
            "t0[q] == t0[kv]  # t0: document",
            [5, 5, 7, 5, 8, 8],
            r"`document\[kv\]` must hold equal values next to each other along kv, but the value 5 that row "
            r"q = 0 of batch entry 0 looks up lies in several places",
        ),
        (
            "(t0[q] == t0[kv]) & (q == 4)  # t0: document",
            [0, 0, 1, 0, 0, 1],
            "the value 0 that row q = 4 of batch entry 0",
        ),
        (
            "t0[b, q] != t0[b, kv]",
            [[5, 5, 7, 7, 8, 8], [1, 2, 1, 4, 5, 6]],
            r"`t0\[b, kv\]` must hold equal .* value 1 that row q = 0 of batch entry 1 looks up",
        ),
        (
            "t0[kv] <= q",
            [0, 1, 2, 1, 3, 4],
            r"`t0\[kv\]` must never decrease along the keys that a row may see, but in row q = 0 of batch entry 0 it "
            "does",
        ),
        (
            "t0[b, kv] > t0[b, q]",
            [[0, 1, 2, 3, 3, 4], [0, 0, 0, 0, 2, 1]],
            r"`t0\[b, kv\]` must never decrease along the keys that a row may see, but in row q = 0 of "
             r"batch entry 1 it "
            "does",
        ),
        (
            "(t0[kv] == 1) & (q >= kv)",
            [1, 1, 0, 0, 1, 0],
            r"the keys with `t0\[kv\] == 1` that a row may see must be next to each other, but in row q = 4 of "
            "batch entry 0 there is a gap",
        ),
        (
            "kv < t0[t0[q]]",
            [0, 1, 2, 3, 4, 6],
            r"`t0\[t0\[q\]\]` must look up entries in \[-6, 6\), but it looks up 6 at position 5",
        ),
        ("q // t0[b] >= kv // t0[b]", [4, -1], r"`t0\[b\] > 0` must be true in every row, but it is not"),
        ("q // t0[b] >= kv", [4, 0], r"`t0\[b\]` must not be zero, it divides, but it is at position 0 of batch"),
    ],
)  # fmt: skip
def test_broken_promises(text, table, message):
    intervals = row_intervals(text, [torch.tensor(table)], **SIZES)
    with pytest.raises(ValueError, match=message):
        intervals.check()


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("(t0[q] == t0[kv]) & (t0[q] > 0)", [1, 0, 2, 0, 3, 3]),
        ("(t0[q] == t0[kv]) & (kv >= 2) & (q != 1) & (q != 5)", [5, 0, 2, 2, 3, 0]),
        ("(q >= 9) & (t0[kv] <= q)", [3, 2, 1, 0, 0, 0]),
        ("(q < 9) | (t0[kv] <= q)", [3, 2, 1, 0, 0, 0]),
        ("where(q < 3, (t0[kv] == 1) & (kv < 3), (t0[kv] == 1) & (kv > 3))", [1, 1, 0, 0, 1, 0]),
        ("t0[-q - 1] >= kv", [3, 2, 1, 0, 0, 0]),
    ],
)
def test_promises_that_do_not_matter(text, table):
    """What no row asks for may be as it likes."""
    tables = [torch.tensor(table)]
    intervals = row_intervals(text, tables, **SIZES)
    intervals.check()
    assert torch.equal(intervals.to_dense(), evaluate(text, 2, 6, 6, tables))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_dtypes_of_tables(dtype):
    tables = [torch.tensor([0, 0, 1, 1, 1, 1]).to(dtype)]
    for text in ("t0[q] == t0[kv]", "t0[q] - 1 <= t0[kv] - 1", "t0[kv] == 1"):
        intervals = row_intervals(text, tables, **SIZES)
        intervals.check()
        wide = [tables[0].long()]
        assert torch.equal(intervals.to_dense(), evaluate(text, 2, 6, 6, wide))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_large_numbers(dtype):
    """Numbers near the end of int32 do not wrap around."""
    tables = [torch.tensor([0, 1, 2, 3, 4, 5]).to(dtype) + 2**31 - 6]
    wide = [tables[0].long()]
    for text in (
        "t0[kv] + 3 <= t0[q] + 4",
        "t0[kv] * 2 <= t0[q] * 2",
        "q * 2147483647 + 3 >= kv * 2147483647",
        "t0[kv] == t0[q]",
        "kv <= 2147483647000",
    ):
        intervals = row_intervals(text, tables, **SIZES)
        intervals.check()
        assert torch.equal(intervals.to_dense(), evaluate(text, 2, 6, 6, wide)), text


def test_symbols():
    for window in (0, 2, 9):
        intervals = row_intervals("abs(q - kv) <= s0", (), [window], **SIZES)
        assert torch.equal(
            intervals.to_dense(), evaluate("abs(q - kv) <= s0", 2, 6, 6, (), [window])
        )


@pytest.mark.parametrize(
    ("text", "tables", "error", "message"),
    [
        ("t0[q] < t1[kv]", [torch.zeros(6).long()], ValueError, "`tables` must hold 2 tensors, got 1"),
        ("t0[q]", [torch.arange(6)], TypeError, r"`t0\[q\]` must be bool where it is a truth value, got integers"),
        ("~t0[kv] & (q > kv)", [torch.arange(6)], TypeError, r"`t0\[kv\]` must be bool where"),
        ("t0[kv]", [torch.arange(6)], TypeError, r"`t0\[kv\]` must be bool where"),
        ("where(t0[q], kv, q) < 3", [torch.arange(6)], TypeError, r"`t0\[q\]` must be bool where"),
        ("where(t0[q], t0[kv] <= q, kv < 3)", [torch.arange(6)], TypeError, r"`t0\[q\]` must be bool where"),
        ("q // s0 > kv", [], ValueError, "`s0` must not be zero, it divides"),
        ("q < s1", [], ValueError, "`symbols` must hold 2 ints, got 1"),
        ("t0[q] < 3", [torch.zeros(6)], TypeError, "`t0` must hold ints or bools, got torch.float32"),
        (
            "t0[q] < 3  # t0: x",
            [torch.zeros(6, dtype=torch.int64, device="meta")],
            ValueError,
            "captured tensor `x` must be on cpu, got meta",
        ),
        ("t0[q] < 3", [torch.zeros(1, 6).long()], ValueError, "must have 1 dimensions, got 2"),
        ("t0[q] < 3", [torch.zeros(5).long()], ValueError, "must have at least 6 entries in dimension 0, got 5"),
        (
            "t0[b, q] < 3",
            [torch.zeros(2, 5).long()],
            ValueError,
            r"`t0\[b, q\]` must have at least 6 entries in dimension 1, got 5",
        ),
        ("t0[q // 2] < 3", [torch.zeros(0).long()], ValueError, "looks up a captured tensor without entries"),
    ],
)  # fmt: skip
def test_wrong_arguments(text, tables, error, message):
    with pytest.raises(error, match=message):
        row_intervals(text, tables, [0], **SIZES, device="cpu")


def test_scalars_may_be_elsewhere():
    intervals = row_intervals("q - kv <= t0", [torch.tensor(2)], **SIZES)
    assert intervals.lo[0, 0].tolist() == [0, 0, 0, 1, 2, 3]


def test_names_and_shape():
    intervals = row_intervals("(q == kv) | (kv < 2)", **SIZES)
    assert (intervals.num_intervals, intervals.sizes) == (2, (2, 6, 6, (1, 1)))
    assert intervals.lo.dtype == torch.int32
    assert intervals.lo[:, 0, 4].tolist() == [0, 4]
    assert intervals.hi[:, 0, 4].tolist() == [2, 5]
    assert intervals.checks == ()


@pytest.mark.parametrize(
    "text", ["q >= kv", "(t0[q] == t0[kv]) & (t1[b] > kv) & t2[kv]", "(t0[kv] <= q) | (kv > q + 3)"]
)
def test_fake_tensors(text):
    """Shapes and dtypes come out without data, as on a GPU."""
    real = [torch.arange(6) // 2, torch.tensor([3, 6]), torch.arange(6) < 4]
    expected = row_intervals(text, real, **SIZES)
    with FakeTensorMode() as mode:
        tables = [mode.from_tensor(table) for table in real]
        intervals = row_intervals(text, tables, **SIZES)
        slices, fits = padded_slices_from_intervals(intervals, 40)
    assert intervals.lo.shape == expected.lo.shape
    assert intervals.lo.dtype == torch.int32
    assert (len(slices), slices.seqlen_q, fits.ok.shape) == (40, 12, ())


def test_device_path_equals_host_path(monkeypatch):
    """The code for GPUs, which never looks at a value, on tensors of the host."""
    from magi_compile.masks.evaluation import key_index as module

    for seed in range(6):
        tables = tables_for(2, 40, seed)
        tables[1][0] = torch.randint(0, 4, (40,))  # not grouped
        sizes = {"batch": 2, "seqlen_q": 40, "seqlen_k": 33}
        for text in (
            "(t0[q] == t0[kv]) & (q >= kv)",
            "t1[b, q] == t1[b, kv]",
            "(t2[kv] < t2[q]) | (t0[q] != t0[kv])",
            "t3[kv] & (t1[b, q] == t1[b, kv])",
            "(t5[q] == t5[kv]) & ((q < 20) ^ (kv >= 20))",
            "(t5[q] == t5[kv]) & t3[kv]",
            "where(q < 30, (t1[b, q] == t1[b, kv]) & (kv < 9), t5[kv] == 3)",
        ):
            on_host = row_intervals(text, tables, **sizes)
            with monkeypatch.context() as patch:
                patch.setattr(module, "is_readable", lambda tensor: False)
                on_device = row_intervals(text, tables, **sizes)
            failed = [not all(bool(c.ok) for c in found.checks) for found in (on_host, on_device)]
            assert failed[0] == failed[1]
            assert torch.equal(on_host.lo, on_device.lo)
            assert torch.equal(on_host.hi, on_device.hi)


def test_slices_of_batches():
    intervals = row_intervals("(q >= kv) & (kv < t0[b])", [torch.tensor([2, 6])], **SIZES)
    expected = packed(evaluate("(q >= kv) & (kv < t0[b])", 2, 6, 6, [torch.tensor([2, 6])]))
    assert torch.equal(slices_from_intervals(intervals).to_dense(), expected)
