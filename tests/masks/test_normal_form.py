"""Overlaps and the normal form, of rects cut anyhow."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_compile.masks.geometry import Rects
from magi_compile.masks.normal_form import find_overlap, normal_form
from tests.masks.test_geometry import SIZE, shown, some_rects

few = settings(max_examples=150, deadline=None)
cuts = st.sets(st.integers(0, SIZE)).map(lambda rows: torch.tensor(sorted(rows), dtype=torch.int64))


def disjoint(rects: Rects) -> Rects:
    """Those of trimmed rects that overlap none in front of them."""
    kept, seen = [], torch.zeros(SIZE, SIZE, dtype=torch.bool)
    for index, area in enumerate(shown(rects)):
        if not (area & seen).any():
            kept.append(index)
            seen |= area
    return rects.select(torch.tensor(kept, dtype=torch.int64))


@few
@given(some_rects())
def test_finds_an_overlap_where_there_is_one(rects):
    straight = rects.trimmed().straight()
    found = find_overlap(straight)
    if found is None:
        assert (shown(straight).sum(0) <= 1).all()
    else:
        first, second = found
        assert first < second
        assert (shown(straight)[first] & shown(straight)[second]).any()


@few
@given(some_rects(), cuts)
def test_is_canonical(rects, rows):
    """The same area in other pieces and another order has the same normal form."""
    rects = disjoint(rects.trimmed())
    whole = normal_form(rects.straight())
    assert torch.equal(shown(whole).sum(0), shown(rects).sum(0))
    assert whole.trimmed().equals(whole).all()
    pieces, _ = rects.live().cut_at(rows)
    pieces = pieces.trimmed().straight().select(torch.arange(3 * len(pieces.row_begin)).flip(0))
    again = normal_form(pieces)
    assert len(again.row_begin) == len(whole.row_begin)
    assert again.equals(whole).all()
