"""mask_mod -> slices equals PyTorch's dense mask bit for bit, called with symbols and through Dynamo's graph."""

import pytest
import torch

from magi_compile.masks import (
    MaskProgram,
    padded_slices_from_intervals,
    row_intervals,
    slices_from_intervals,
    trace_mask_mod,
)
from magi_compile.masks.library import MASKS
from tests.masks.helpers import dense_mask, dynamo_program, packed
from tests.masks.mask_mods import MASK_MODS

SIZES = [(1, 1, 1), (2, 63, 63), (3, 129, 129), (2, 200, 77), (2, 77, 200), (1, 1521, 1521)]


def size_id(size):
    return "{}x{}x{}".format(*size)


@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("name", MASK_MODS)
def test_intervals_equal_the_dense_mask(name, size):
    mask_mod = MASK_MODS[name](*size)
    program, tables = trace_mask_mod(mask_mod)
    batch, seqlen_q, seqlen_k = size
    intervals = row_intervals(
        program, tables, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device="cpu"
    )
    intervals.check()
    assert intervals.num_intervals == max(program.max_intervals, 1)
    assert torch.equal(intervals.to_dense(), dense_mask(mask_mod, *size))
    assert_disjoint_and_sorted(intervals)


def assert_disjoint_and_sorted(intervals):
    last = torch.full_like(intervals.lo[0], -1)
    for lo, hi in zip(intervals.lo, intervals.hi, strict=True):
        is_live = lo < hi
        assert torch.equal(lo[~is_live], torch.zeros_like(lo[~is_live]))
        assert torch.equal(hi[~is_live], torch.zeros_like(hi[~is_live]))
        assert bool((lo > last)[is_live].all())
        last = torch.where(is_live, hi, last)


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 65, 65), (2, 50, 77)], ids=size_id)
@pytest.mark.parametrize("name", MASK_MODS)
def test_slices_equal_the_dense_mask(name, size):
    mask_mod = MASK_MODS[name](*size)
    program, tables = trace_mask_mod(mask_mod)
    batch, seqlen_q, seqlen_k = size
    intervals = row_intervals(
        program, tables, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device="cpu"
    )
    expected = packed(dense_mask(mask_mod, *size))
    slices = slices_from_intervals(intervals)
    slices.validate()
    assert torch.equal(slices.to_dense(), expected)
    assert slices.area() == int(expected.sum())
    padded, fits = padded_slices_from_intervals(intervals, capacity=2000)
    assert bool(fits.ok)
    assert len(padded) == 2000
    padded.validate()
    assert list(padded.normalize()) == list(slices) == list(slices.normalize())


@pytest.mark.parametrize("name", MASK_MODS)
def test_dynamo_graph(name):
    size = (2, 50, 77)
    mask_mod = MASK_MODS[name](*size)
    program, tables, symbols = dynamo_program(mask_mod, *size)
    batch, seqlen_q, seqlen_k = size
    text = str(program)
    assert MaskProgram.parse(text) == program
    intervals = row_intervals(
        text, tables, symbols, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device="cpu"
    )
    intervals.check()
    assert torch.equal(intervals.to_dense(), dense_mask(mask_mod, *size))


def test_dynamo_symbols():
    """A captured int that Dynamo takes for dynamic arrives as a symbol."""
    size = 37
    program, tables, symbols = dynamo_program(
        lambda b, h, q, kv: (q - kv <= size) & (q // size >= kv // size), 1, 130, 130, dynamic=True
    )
    assert not tables
    if program.num_symbols:
        assert symbols == [37]
        assert str(program) == "(q - kv <= s0) & (q // s0 >= kv // s0)"
    for size in (37, 5):
        now = [size] * program.num_symbols
        intervals = row_intervals(program, (), now, batch=1, seqlen_q=130, seqlen_k=130)
        intervals.check()
        if program.num_symbols or size == 37:
            expected = dense_mask(
                lambda b, h, q, kv: (q - kv <= size) & (q // size >= kv // size), 1, 130, 130
            )
            assert torch.equal(intervals.to_dense(), expected)


LENGTHS = [[1], [63], [5, 1, 40, 17], [300, 1, 2, 129, 200], [700, 821]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("name", MASKS)
def test_library(name, lengths):
    """The mask_mod, its conversion, and the slices from the definition are one mask."""
    options = {"window": 37, "block": 16}
    options = {k: v for k, v in options.items() if k in MASKS[name].__kwdefaults__}
    mask, total = MASKS[name](lengths, **options), sum(lengths)
    expected = dense_mask(mask.mask_mod, 1, total, total)[0]
    mask.slices.validate()
    assert torch.equal(mask.slices.to_dense(), expected)
    program, tables = trace_mask_mod(mask.mask_mod)
    intervals = row_intervals(program, tables, batch=1, seqlen_q=total, seqlen_k=total)
    intervals.check()
    assert list(slices_from_intervals(intervals)) == list(mask.slices.normalize())


@pytest.mark.parametrize("name", MASKS)
def test_library_through_dynamo(name):
    mask = MASKS[name]([20, 30, 1, 49])
    program, tables, symbols = dynamo_program(mask.mask_mod, 1, 100, 100)
    intervals = row_intervals(program, tables, symbols, batch=1, seqlen_q=100, seqlen_k=100)
    intervals.check()
    assert list(slices_from_intervals(intervals)) == list(mask.slices.normalize())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("full", 1),
        ("causal", 1),
        ("document_causal", 4),
        ("sliding_window_causal", 2),
        ("sliding_window_full", 3),
        ("share_question", 4),
        ("global_sliding_window", 5),
        ("causal_blockwise", 4),
        ("prefix_lm_causal", 2),
        ("prefix_lm_document", 8),
    ],
)
def test_as_few_slices_as_it_takes(name, count):
    options = {"window": 10} if "window" in MASKS[name].__kwdefaults__ else {}
    mask = MASKS[name]([30, 40, 50, 60], **options)
    program, tables = trace_mask_mod(mask.mask_mod)
    intervals = row_intervals(program, tables, batch=1, seqlen_q=180, seqlen_k=180)
    assert len(slices_from_intervals(intervals)) == count
    padded, _ = padded_slices_from_intervals(intervals, capacity=100)
    assert len(padded.compact()) == count


def test_lengths_must_be_positive():
    with pytest.raises(ValueError, match=r"`lengths` must hold positive .* got \[3, 0\]"):
        MASKS["document_causal"]([3, 0])


def test_padded_slices_that_do_not_fit():
    program, tables = trace_mask_mod(MASKS["document_causal"]([3, 4, 5]).mask_mod)
    intervals = row_intervals(program, tables, batch=1, seqlen_q=12, seqlen_k=12)
    slices, fits = padded_slices_from_intervals(intervals, capacity=2)
    assert len(slices) == 2
    with pytest.raises(ValueError, match="the mask must fit in 2 slices, but it has 3"):
        fits.raise_if_broken()
    with pytest.raises(ValueError, match="`capacity` must be at least 1, got 0"):
        padded_slices_from_intervals(intervals, capacity=0)


@pytest.mark.parametrize("size", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=size_id)
def test_empty_sizes(size):
    batch, seqlen_q, seqlen_k = size
    intervals = row_intervals(
        "q >= kv", batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device="cpu"
    )
    assert len(slices_from_intervals(intervals)) == 0
    padded, fits = padded_slices_from_intervals(intervals, capacity=4)
    assert bool(fits.ok)
    assert padded.area() == 0


def test_totals_stay_in_int32():
    lo = torch.zeros(1, 1, 1, dtype=torch.int32).expand(1, 1 << 15, 1)
    intervals = row_intervals("q >= kv", batch=1, seqlen_q=1, seqlen_k=1)
    from dataclasses import replace

    large = replace(intervals, lo=lo, hi=lo + 1, seqlen_k=1 << 15)
    with pytest.raises(ValueError, match=r"`batch \* seqlen_k` must be below 2\*\*30"):
        slices_from_intervals(large)
