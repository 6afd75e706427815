"""Rects that go on below one another are one, and stairs are rects by column: the same area with less to walk."""

import pytest
import torch
from hypothesis import given, settings

from magi_compile.masks import library
from magi_compile.masks.geometry import NO_DIAG, Rects
from magi_compile.plan.rects import down_the_steps, joined
from magi_compile.plan.tiles import build_tile_plan
from tests.plan.test_tiles import (
    BI_CAUSAL,
    CAUSAL,
    FULL,
    INV_CAUSAL,
    make_slices,
    masks,
)

NOTHING = (0, 0, 0, 0, -NO_DIAG, NO_DIAG)


def tuples(rects: Rects) -> list[tuple[int, ...]]:
    return list(zip(*(field.tolist() for field in rects), strict=True))


def trimmed(rows, seqlen_q=300, seqlen_k=300) -> Rects:
    return make_slices(rows, seqlen_q, seqlen_k).untrimmed_rects().trimmed()


def area(rects, seqlen_q, seqlen_k):
    """How many rects show a key to a query."""
    q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]
    counts = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    for row_begin, row_end, col_begin, col_end, diag_lo, diag_hi in rects:
        is_in = (q >= row_begin) & (q < row_end) & (k >= col_begin) & (k < col_end)
        counts += is_in & (k >= q + diag_lo) & (k < q + diag_hi)
    return counts


@pytest.mark.parametrize(
    ("rows", "rect"),
    [
        ([(0, 12, 0, 12, CAUSAL), (12, 90, 1, 90, BI_CAUSAL)], (0, 90, 0, 90, -11, 1)),
        (
            [(5, 9, 5, 12, CAUSAL), (9, 30, 6, 33, BI_CAUSAL), (30, 33, 27, 33, INV_CAUSAL)],
            (5, 33, 5, 33, -3, 4),
        ),
        (
            [(0, 8, 3, 9, FULL), (8, 9, 3, 9, FULL), (9, 20, 3, 9, FULL)],
            (0, 20, 3, 9, *NOTHING[4:]),
        ),
        ([(0, 4, 0, 4, CAUSAL), (4, 9, 0, 9, CAUSAL)], (0, 9, 0, 9, -NO_DIAG, 1)),
        ([(0, 4, 0, 4, CAUSAL), (4, 9, 0, 4, FULL)], (0, 9, 0, 4, -NO_DIAG, 1)),
        ([(0, 5, 2, 9, FULL), (5, 9, 3, 9, INV_CAUSAL)], (0, 9, 2, 9, -2, NO_DIAG)),
    ],
    ids=["window", "window both ways", "full", "causal", "causal and full", "full and inv"],
)
def test_what_goes_on_is_one(rows, rect):
    first, *others = tuples(joined(trimmed(rows)))
    assert first == rect
    assert set(others) <= {NOTHING}


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 4, 0, 4, CAUSAL), (4, 9, 4, 9, CAUSAL)],
        [(0, 4, 0, 4, FULL), (5, 9, 0, 4, FULL)],
        [(0, 4, 0, 4, FULL), (4, 9, 0, 9, CAUSAL)],
        [(0, 4, 0, 9, FULL), (4, 9, 0, 8, FULL)],
        [(4, 9, 0, 4, FULL), (0, 4, 0, 4, FULL)],
        [(0, 4, 0, 4, INV_CAUSAL), (4, 9, 3, 4, FULL)],
        [(0, 12, 0, 12, CAUSAL), (12, 90, 2, 90, BI_CAUSAL)],
        [(0, 4, 0, 4, FULL), (4, 4, 0, 4, FULL), (4, 9, 0, 4, FULL)],
    ],
    ids=[
        *(
            "documents",
            "a gap",
            "wider below",
            "narrower below",
            "other order",
            "an edge that stops",
        ),
        *("another diagonal", "nothing between"),
    ],
)
def test_what_does_not_go_on_stays(rows):
    rects = trimmed(rows)
    assert joined(rects).equals(rects).all()


@settings(max_examples=150, deadline=None)
@given(masks())
def test_the_area_is_the_same(mask):
    rows, seqlen_q, seqlen_k = mask
    rects = trimmed(sorted(rows), seqlen_q, seqlen_k)
    before = area(tuples(rects), seqlen_q, seqlen_k)
    for same in (joined(rects), down_the_steps(joined(rects))):
        assert torch.equal(area(tuples(same), seqlen_q, seqlen_k), before)
        assert same.trimmed().equals(same).all()


def stairs(num_steps):
    """Of 3 rows and 2 columns."""
    return [(3 * i, 3 * i + 3, 5, 7 + 2 * i, FULL) for i in range(num_steps)]


@pytest.mark.parametrize("most_steps", [None, 32])
@pytest.mark.parametrize("num_steps", [1, 2, 31, 32, 33, 64, 70])
def test_stairs_by_column(num_steps, most_steps):
    """Each rect sees the columns of its step, or all of them where a staircase begins, down to where it ends."""
    rects = down_the_steps(trimmed(stairs(num_steps)), most_steps)
    length = most_steps or num_steps
    ends = [min(i // length * length + length, num_steps) for i in range(num_steps)]
    assert tuples(rects) == [
        (3 * i, 3 * end, 5 if i % length == 0 else 5 + 2 * i, 7 + 2 * i, -NO_DIAG, NO_DIAG)
        for i, end in enumerate(ends)
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 4, 0, 4, CAUSAL), (4, 8, 0, 8, FULL)],
        [(0, 4, 0, 4, FULL), (4, 8, 0, 8, CAUSAL)],
        [(0, 4, 0, 4, FULL), (5, 8, 0, 8, FULL)],
        [(0, 4, 0, 4, FULL), (4, 8, 1, 8, FULL)],
        [(0, 4, 0, 4, FULL), (4, 8, 0, 3, FULL)],
    ],
    ids=["causal", "causal below", "a gap", "other columns", "fewer columns"],
)
def test_what_is_no_step_stays(rows):
    rects = trimmed(rows)
    assert down_the_steps(rects).equals(rects).all()


def test_common_columns_are_walked_once():
    """Blocks of 20 rows, of which tiles of 16 see no more columns than their last row does."""
    rows = [(20 * i, 20 * i + 20, 0, 20 * i + 20, FULL) for i in range(4)]
    plan = build_tile_plan(
        make_slices(rows, 80, 80), q_tile_rows=16, q_block_cols=20, k_tile_rows=16, k_block_cols=20
    )
    num_blocks = {
        begin: int(plan.q_runs[first:last, 7].sum())
        for begin, _, first, last in plan.q_tiles.tolist()
    }
    assert num_blocks == {0: 1, 16: 1, 20: 2, 36: 3, 52: 4, 68: 4}


@pytest.mark.parametrize("name", ["sliding_window_causal", "sliding_window_full"])
@pytest.mark.parametrize("length", [640, 1000])
def test_a_window_is_walked_as_one_band(name, length):
    """As many tiles as rows need, each with one run."""
    slices = getattr(library, name)([length], window=130).slices
    assert len(slices.mask_types) > 1
    plan = build_tile_plan(
        slices, q_tile_rows=128, q_block_cols=64, k_tile_rows=128, k_block_cols=64
    )
    tiles_and_runs = (plan.q_tiles, plan.q_runs, plan.k_tiles, plan.k_runs)
    assert [len(x) for x in tiles_and_runs] == [-(-length // 128)] * 4
