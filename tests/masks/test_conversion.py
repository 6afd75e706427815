"""mask_mod -> slices equals PyTorch's dense mask bit for bit, called with symbols and through Dynamo's graph."""

import random
from dataclasses import replace

import pytest
import torch

from magi_compile.masks import (
    MaskProgram,
    UnsupportedMaskError,
    padded_slices_from_intervals,
    row_intervals,
    slices_from_intervals,
    trace_mask_mod,
)
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.library import document_causal
from tests.masks.support.helpers import dense_mask, dynamo_program, evaluate, packed
from tests.masks.support.mask_mods import MASK_MODS
from tests.masks.support.random_masks import random_mask, tables_for

SIZES = [(1, 1, 1), (2, 63, 63), (3, 129, 129), (2, 200, 77), (2, 77, 200), (1, 1521, 1521)]


def size_id(size):
    return "{}x{}x{}".format(*size)


@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("name", MASK_MODS)
def test_intervals_equal_the_dense_mask(name, size):
    mask_mod = MASK_MODS[name](*size)
    program, tables, _ = trace_mask_mod(mask_mod)
    batch, seqlen_q, seqlen_k = size
    intervals = row_intervals(
        program, tables, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device="cpu"
    )
    intervals.check()
    assert intervals.num_intervals == max(program.max_intervals(seqlen_k), 1)
    assert torch.equal(intervals.to_dense(), dense_mask(mask_mod, *size))
    assert_disjoint_and_sorted(intervals)


@pytest.mark.parametrize("seed", range(8))
def test_random_masks_equal_their_dense_mask(seed):
    """Of those that can be expressed, where the data is as they need it."""
    generator, checked = random.Random(seed), 0
    while checked < 40:
        program = MaskProgram.parse(text := random_mask(generator, generator.randint(1, 5)))
        size = batch, seqlen_q, seqlen_k = [generator.randint(1, n) for n in (2, 40, 40)]
        symbols = [generator.choice([2, 3, 5])]
        try:
            program.keys(seqlen_k, symbols)
        except UnsupportedMaskError:
            continue
        tables = tables_for(batch, max(seqlen_q, seqlen_k), generator.randint(0, 99))
        sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        intervals = row_intervals(program, tables, symbols, **sizes, device="cpu")
        if all(check.ok for check in intervals.checks):
            checked += 1
            assert torch.equal(intervals.to_dense(), evaluate(text, *size, tables, symbols)), text


@pytest.mark.parametrize("seed", range(8))
def test_random_masks_by_head(seed):
    """Of those that can be expressed, where the data is as they need it: intervals, slices,
    and a second opinion's places."""
    generator, checked, by_head = random.Random(seed), 0, 0
    while by_head < 30:
        program = MaskProgram.parse(text := random_mask(generator, generator.randint(1, 4), True))
        size = batch, seqlen_q, seqlen_k = [generator.randint(1, n) for n in (2, 30, 30)]
        heads, symbols = Heads(*generator.choice([(2, 1), (4, 2), (3, 3), (1, 1)])), [3]
        try:
            program.keys(seqlen_k, symbols)
        except UnsupportedMaskError:
            continue
        tables = tables_for(batch, max(seqlen_q, seqlen_k), generator.randint(0, 99), heads.q)
        sizes = MaskSizes(batch, seqlen_q, seqlen_k, heads)
        intervals = row_intervals(program, tables, symbols, **sizes._asdict(), device="cpu")
        if not all(check.ok for check in intervals.checks):
            continue
        checked, by_head = checked + 1, by_head + program.differs_by_head
        expected = evaluate(text, *size, tables, symbols, heads.q)
        assert torch.equal(intervals.to_dense(), expected), text
        slices, fits = padded_slices_from_intervals(intervals, 4000)
        assert bool(fits.ok)
        slices.validate()
        wanted = torch.zeros(
            batch * heads.q, seqlen_q, batch * heads.kv, seqlen_k, dtype=torch.bool
        )
        for entry in range(batch * heads.q):
            wanted[entry, :, entry // heads.group] = expected[entry]
        assert torch.equal(slices.to_dense(), wanted.flatten(2).flatten(0, 1)), text


def test_a_mask_by_head_is_none_of_all_heads():
    with pytest.raises(UnsupportedMaskError, match=r"depends on the head \(h\), and one mask"):
        row_intervals("kv < h", batch=1, seqlen_q=4, seqlen_k=4)
    with pytest.raises(UnsupportedMaskError, match=r"depends on the head \(h\), and one mask"):
        trace_mask_mod(lambda b, h, q, kv: q - kv < h)


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
    program, tables, _ = trace_mask_mod(mask_mod)
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
    text = program.text
    assert MaskProgram.parse(text) == program
    intervals = row_intervals(
        text, tables, symbols, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device="cpu"
    )
    intervals.check()
    assert torch.equal(intervals.to_dense(), dense_mask(mask_mod, *size))


@pytest.mark.parametrize("size", [1, 5, 37])
def test_dynamo_symbols(size):
    """A captured int that Dynamo takes for dynamic arrives as a symbol, and serves all values."""

    def mask_mod_of(size):
        return lambda b, h, q, kv: (q - kv <= size) & (q // size >= kv // size)

    program, tables, symbols = dynamo_program(mask_mod_of(37), 1, 130, 130, dynamic=True)
    assert str(program) == "(q - kv <= s0) & (q // s0 >= kv // s0)"
    assert tables == []
    assert symbols == [37]
    intervals = row_intervals(program, (), [size], batch=1, seqlen_q=130, seqlen_k=130)
    intervals.check()
    assert torch.equal(intervals.to_dense(), dense_mask(mask_mod_of(size), 1, 130, 130))


def test_symbols_that_divide_must_be_positive():
    intervals = row_intervals("q // s0 >= kv // s0", (), [-3], batch=1, seqlen_q=9, seqlen_k=9)
    with pytest.raises(ValueError, match="`s0 > 0` must be true in every row"):
        intervals.check()


def test_padded_slices_that_do_not_fit():
    program, tables, _ = trace_mask_mod(document_causal([3, 4, 5]).mask_mod)
    intervals = row_intervals(program, tables, batch=1, seqlen_q=12, seqlen_k=12)
    slices, fits = padded_slices_from_intervals(intervals, capacity=2)
    assert len(slices) == 2
    with pytest.raises(ValueError, match=r"the mask must fit in 2 slices .*, but it has 3"):
        fits.raise_if_broken()
    with pytest.raises(ValueError, match="`capacity` must not be negative, got -1"):
        padded_slices_from_intervals(intervals, capacity=-1)


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
    large = replace(intervals, lo=lo, hi=lo + 1, seqlen_k=1 << 15)
    with pytest.raises(ValueError, match=r"`batch \* seqlen_k` must be below 2\*\*30"):
        slices_from_intervals(large)
