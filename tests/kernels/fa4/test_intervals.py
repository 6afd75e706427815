"""Intervals, bounds, block lists and native masks of slices, against the dense mask."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_compile.kernels.fa4.intervals import (
    blocks_of,
    intervals_of_rects,
    searched_bounds,
    unrolled_bounds,
)
from magi_compile.kernels.fa4.native import native_mask
from magi_compile.masks.evaluation.block_lists import counts_and_order
from magi_compile.masks.slices import AttnSlices
from tests.support.cases import (
    CAUSAL,
    FULL,
    INV_CAUSAL,
    MASKS,
    Case,
    one,
    random_disjoint,
    varlen,
    windows,
)

EMPTY = [Case("no_rows", 0, 40, []), Case("no_keys", 40, 0, []), Case("nothing", 0, 0, [])]
many_masks = pytest.mark.parametrize("case", [*MASKS, *EMPTY], ids=lambda case: case.name)

random_masks = st.builds(
    random_disjoint,
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(0, 10_000),
    st.integers(0, 12),
)


def intervals_of(case: Case):
    slices = case.slices()
    rects = slices.untrimmed_rects().trimmed()
    return intervals_of_rects(rects, slices.seqlen_q, slices.seqlen_k)


def dense_of(intervals):
    shown = torch.zeros(intervals.num_rows, intervals.num_cols, dtype=torch.bool)
    for row, begin, end in torch.stack(intervals[:3], 1).tolist():
        assert begin < end
        assert not shown[row, max(begin - 1, 0) : end + 1].any(), "touches or overlaps another one"
        shown[row, begin:end] = True
    return shown


def check_intervals(case: Case):
    intervals, dense = intervals_of(case), case.slices().to_dense()
    assert torch.equal(dense_of(intervals), dense)
    begins = dense.int().diff(dim=1, prepend=torch.zeros(len(dense), 1, dtype=torch.int32)) > 0
    assert intervals.most == (int(begins.sum(1).max()) if dense.numel() else 0)
    key = intervals.row * (intervals.num_cols + 1) + intervals.begin
    assert torch.equal(key, key.sort().values)
    return intervals, dense


@many_masks
def test_intervals(case):
    check_intervals(case)


@settings(max_examples=150, deadline=None)
@given(random_masks)
def test_intervals_of_random_masks(case):
    check_intervals(case)


def test_intervals_of_keys():
    """Of transposed rects those of the queries that see a key."""
    case = random_disjoint(70, 90, seed=3)
    rects = case.slices().untrimmed_rects().trimmed().transposed()
    assert torch.equal(dense_of(intervals_of_rects(rects, 90, 70)), case.slices().to_dense().t())


def check_bounds(case: Case):
    intervals, dense = intervals_of(case), case.slices().to_dense()
    padded = intervals.num_rows + 5
    unrolled = unrolled_bounds(intervals, padded).view(padded, -1, 2)
    searched = searched_bounds(intervals, padded).tolist()
    assert unrolled.dtype == torch.int32
    column = torch.arange(intervals.num_cols)
    for row in range(padded):
        expected = dense[row] if row < len(dense) else torch.zeros(len(column), dtype=torch.bool)
        begin, end = unrolled[row, :, :1], unrolled[row, :, 1:]
        assert torch.equal(((column >= begin) & (column < end)).any(0), expected)
        found = torch.tensor(searched[searched[row] : searched[row + 1]], dtype=torch.int64)
        assert torch.equal(found, found.sort().values)
        assert torch.equal(torch.bucketize(column, found, right=True) % 2 == 1, expected)


@many_masks
def test_bounds(case):
    check_bounds(case)


@settings(max_examples=60, deadline=None)
@given(random_masks)
def test_bounds_of_random_masks(case):
    check_bounds(case)


def check_blocks(case: Case, block_rows: int, block_cols: int):
    intervals, dense = intervals_of(case), case.slices().to_dense()
    partial, full = blocks_of(intervals, block_rows, block_cols)
    down, across = -(-case.seqlen_q // block_rows), -(-case.seqlen_k // block_cols)
    assert partial.shape == full.shape == (down, across)
    for i in range(down):
        for j in range(across):
            block = dense[i * block_rows :, j * block_cols :][:block_rows, :block_cols]
            assert bool(full[i, j]) == bool(block.all())
            assert bool(partial[i, j]) == bool(block.any() and not block.all())
    check_lists(counts_and_order(blocks_of(intervals, block_rows, block_cols)), partial, full)
    by_column = counts_and_order(blocks_of(intervals, block_rows, block_cols).mT)
    check_lists(by_column, partial.t(), full.t())


def check_lists(lists, *blocks):
    counts, indices = lists
    assert counts.dtype == indices.dtype == torch.int32
    assert counts.is_contiguous()
    assert indices.is_contiguous()
    for count, index, listed in zip(counts, indices, blocks, strict=True):
        assert index.shape == listed.shape
        for number, row, expected in zip(count.tolist(), index, listed, strict=True):
            assert row[:number].tolist() == expected.nonzero().flatten().tolist()
            assert row.sort().values.tolist() == list(range(len(row)))


@pytest.mark.parametrize("blocks", [(128, 128), (256, 128), (64, 96)], ids=str)
@many_masks
def test_blocks(case, blocks):
    check_blocks(case, *blocks)


@settings(max_examples=100, deadline=None)
@given(random_masks, st.integers(1, 40), st.integers(1, 40))
def test_blocks_of_random_masks(case, block_rows, block_cols):
    check_blocks(case, block_rows, block_cols)


# What flash-attn-4 has itself


def native_of(case: Case, least_rows: int = 1):
    return native_mask(intervals_of(case), least_rows)


def shown_by(native, seqlen_q, seqlen_k):
    """The mask that flash-attn-4 documents for these arguments, dense."""
    cu_q = [0, seqlen_q] if native.cu_seqlens is None else native.cu_seqlens.tolist()
    cu_k = [0, seqlen_k] if native.cu_seqlens is None else native.cu_seqlens.tolist()
    window = native.left, native.right
    slices = AttnSlices.from_cu_seqlens(cu_q, cu_k, window=window)
    assert native.longest == max(end - begin for begin, end in itertools.pairwise(cu_q))
    return slices.to_dense()


@many_masks
def test_native_masks_are_exact(case):
    native = native_of(case)
    if native is not None:
        shown = shown_by(native, case.seqlen_q, case.seqlen_k)
        assert torch.equal(shown, case.slices().to_dense())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(0, 14)),
    st.one_of(st.none(), st.integers(0, 14)),
)
def test_windows_in_documents_are_native(lengths, left, right):
    total = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    slices = AttnSlices.from_cu_seqlens(ends, window=(left, right))
    rows = [(*item.q_range, *item.k_range, item.mask_type) for item in slices]
    case = Case("windows", total, total, rows)
    native = native_of(case)
    # Where no row looks back, every row begins like a document, and then it must end like one.
    assert native is not None or left == 0
    if native is not None:
        assert torch.equal(shown_by(native, total, total), slices.to_dense())


@settings(max_examples=150, deadline=None)
@given(random_masks)
def test_random_masks_are_native_only_if_they_are(case):
    native = native_of(case)
    if native is not None:
        shown = shown_by(native, case.seqlen_q, case.seqlen_k)
        assert torch.equal(shown, case.slices().to_dense())


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (one(CAUSAL, 300), (None, 300, None, 0)),
        (one(FULL, 300), (None, 300, None, None)),
        (one(FULL, 300, 200), (None, 300, None, None)),
        (one(CAUSAL, 200, 300), (None, 200, None, 0)),
        (windows("window", [300], 20, 0), (None, 300, 20, 0)),
        (windows("window", [300], 20, 10), (None, 300, 20, 10)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_single_documents(case, expected):
    assert native_of(case, least_rows=10_000) == expected


@pytest.mark.parametrize(
    "case",
    [
        one(CAUSAL, 300, 200),  # the first rows see nothing
        one(INV_CAUSAL, 300),
        random_disjoint(200, 200, seed=1),
        Case("prefix", 100, 100, [(0, 30, 0, 30, 0), (30, 100, 0, 100, 1)]),
        Case("padding", 100, 100, [(0, 90, 0, 90, 1)]),
    ],
    ids=lambda case: case.name,
)
def test_other_masks_are_not_native(case):
    assert native_of(case) is None


def test_short_documents_share_blocks_of_lists():
    case = varlen("documents", [100, 200, 300], CAUSAL)
    assert native_of(case, least_rows=200).cu_seqlens.tolist() == [0, 100, 300, 600]
    assert native_of(case, least_rows=201) is None
    assert native_of(replace(case, rows=case.rows[:1] + case.rows[2:])) is None
