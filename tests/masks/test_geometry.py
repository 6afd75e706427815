"""Rects against the areas that they stand for, pair by pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_compile.masks import MaskType
from magi_compile.masks.geometry import NO_DIAG, Rects

SIZE = 9
few = settings(max_examples=200, deadline=None)
places = st.integers(0, SIZE)
ranges = st.tuples(places, places).map(sorted)
diagonals = st.integers(-SIZE - 2, SIZE + 2)


@st.composite
def some_rects(draw, min_size=0):
    """Rects of any kind, empty ones too."""

    def one():
        rows, columns = draw(ranges), draw(ranges)
        lo = draw(st.one_of(st.just(-NO_DIAG), diagonals))
        hi = draw(st.one_of(st.just(NO_DIAG), diagonals))
        return [*rows, *columns, lo, hi]

    table = [one() for _ in range(draw(st.integers(min_size, 5)))]
    return Rects(*torch.tensor(table, dtype=torch.int64).reshape(-1, 6).unbind(1))


def shown(rects: Rects) -> torch.Tensor:
    """bool `[num_rects, SIZE, SIZE]`, by the definition."""
    row, col = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    row_begin, row_end, col_begin, col_end, lo, hi = (field[:, None, None] for field in rects)
    inside = (row >= row_begin) & (row < row_end) & (col >= col_begin) & (col < col_end)
    return inside & (col >= row + lo) & (col < row + hi)


@few
@given(some_rects())
def test_trimmed_is_tight(rects):
    tight = rects.trimmed()
    assert torch.equal(shown(tight), shown(rects))
    area = shown(rects)
    assert torch.equal(tight.has_area(), area.flatten(1).any(1))
    for dim, (begin, end) in ((2, (0, 1)), (1, (2, 3))):
        assert torch.equal(area.any(dim).sum(1), tight[end] - tight[begin])
    assert tight.trimmed().equals(tight).all()


@few
@given(some_rects(), places, places)
def test_moved(rects, rows, columns):
    steps = [torch.full_like(rects.row_begin, step) for step in (rows, columns)]
    back = [-step for step in steps]
    assert rects.moved(*steps).moved(*back).equals(rects).all()
    padded = torch.nn.functional.pad(shown(rects), (columns, 0, rows, 0))
    assert torch.equal(shown(rects.moved(*steps)), padded[:, :SIZE, :SIZE])


@few
@given(some_rects())
def test_transposed(rects):
    assert torch.equal(shown(rects.transposed()), shown(rects).mT)
    assert rects.transposed().transposed().equals(rects).all()


@few
@given(some_rects(), ranges)
def test_clipped(rects, bounds):
    begin, end = bounds
    inside = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    inside[begin:end] = True
    assert torch.equal(shown(rects.clipped(begin, end)), shown(rects) & inside)
    assert torch.equal(shown(rects.clipped_to_columns(begin, end)), shown(rects) & inside.mT)


@few
@given(some_rects(min_size=1))
def test_intersected(rects):
    every, other = rects.select(torch.arange(len(rects[0]))[:, None]), rects.select(slice(0, 1))
    both = Rects(*(x.flatten() for x in every.intersected(other)))
    assert torch.equal(shown(both), shown(rects) & shown(other))


@few
@given(some_rects())
def test_area(rects):
    """Of trimmed rects, and of these cut by rows, which keep the bounds of the whole."""
    tight = rects.trimmed()
    assert torch.equal(tight.area(), shown(tight).sum((1, 2)))
    pieces, _ = tight.live().cut_at(torch.arange(2, SIZE, 3))
    assert torch.equal(pieces.area(), shown(pieces).sum((1, 2)))


@few
@given(some_rects())
def test_straight_rects_are_slices(rects):
    straight = rects.trimmed().straight()
    of_each = shown(straight).view(3, -1, SIZE, SIZE).sum(0)
    assert torch.equal(of_each, shown(rects).long())
    live = straight.live()
    back = Rects.from_ranges(*live.to_ranges())
    assert torch.equal(shown(back), shown(live))
    assert back.trimmed().equals(live).all()


@few
@given(some_rects(), st.sets(places).map(sorted))
def test_cut_at(rects, rows):
    pieces, owner = rects.trimmed().live().cut_at(torch.tensor(rows, dtype=torch.int64))
    whole = shown(rects.trimmed().live()).long()
    together = torch.zeros_like(whole).index_add_(0, owner, shown(pieces).long())
    assert torch.equal(together, whole)
    for row in rows:
        assert not ((pieces.row_begin < row) & (row < pieces.row_end)).any()


@few
@given(some_rects())
def test_by_row(rects):
    tight = rects.trimmed()
    row, lo, hi = tight.by_row()
    counts = torch.zeros(SIZE, SIZE, dtype=torch.int64)
    for r, begin, end in zip(row.tolist(), lo.tolist(), hi.tolist(), strict=True):
        assert begin < end
        counts[r, begin:end] += 1
    assert torch.equal(counts, shown(rects).sum(0))


@few
@given(some_rects())
def test_columns_of_a_row(rects):
    live = rects.trimmed().live()
    for row in range(SIZE):
        (lo, hi), has_row = (
            live.at(torch.tensor(row)),
            (live.row_begin <= row) & (row < live.row_end),
        )
        assert torch.equal(torch.where(has_row, hi - lo, 0), shown(live)[:, row].sum(1))
    common = (live.common_end() - live.common_begin()).clamp(min=0)
    seen_by_all = shown(live).sum(1) == (live.row_end - live.row_begin)[:, None]
    assert torch.equal(common, seen_by_all.sum(1))


@pytest.mark.parametrize("mask_type", list(MaskType), ids=lambda t: t.name)
def test_a_slice_of_one_row_has_no_diagonal(mask_type):
    lists = torch.tensor([[3, 4]]), torch.tensor([[2, 7]]), torch.tensor([int(mask_type)])
    rects = Rects.from_ranges(*lists).trimmed()
    assert [x.tolist() for x in rects.to_ranges()] == [[[3, 4]], [[2, 7]], [int(MaskType.FULL)]]
