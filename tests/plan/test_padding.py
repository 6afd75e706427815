"""Room that follows from shapes alone."""

from hypothesis import given, settings

from magi_compile.plan.tiles import build_tile_plan
from tests.plan.test_tiles import FULL, SIZES, make_slices, masks


@settings(max_examples=30, deadline=None)
@given(masks(), masks())
def test_padded_sizes_follow_from_shapes_alone(mask, other):
    rows, seqlen_q, seqlen_k = mask
    empty = make_slices([(0, 0, 0, 0, FULL)] * len(rows), seqlen_q, seqlen_k)
    shapes = [t.shape for t in build_tile_plan(make_slices(*mask), **SIZES, exact=False)]
    assert shapes == [t.shape for t in build_tile_plan(empty, **SIZES, exact=False)]
