"""The plan, walked by a plain interpreter, gives back the mask bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from magi_compile._checks import MaskDataError
from magi_compile.masks.geometry import NO_DIAG
from magi_compile.masks.slices import AttnSlices, MaskType
from magi_compile.plan.padding import MAX_OVERLAP
from magi_compile.plan.tiles import RUN_FIELDS, build_tile_plan
from tests.plan.walked import seen

FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL = MaskType
SIZES = {"q_tile_rows": 16, "q_block_cols": 8, "k_tile_rows": 8, "k_block_cols": 4}


def make_slices(rows, seqlen_q, seqlen_k):
    """`rows` of (q_begin, q_end, k_begin, k_end, mask_type)."""
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, 5)
    return AttnSlices(table[:, 0:2], table[:, 2:4], table[:, 4], seqlen_q, seqlen_k)


def area_of(slice_, seqlen_q, seqlen_k):
    """The dense mask of one slice, from its definition."""
    q_begin, q_end, k_begin, k_end, mask_type = slice_
    q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]
    lo = k_begin + (q - q_begin if mask_type in (INV_CAUSAL, BI_CAUSAL) else 0)
    hi = k_end - (q_end - 1 - q if mask_type in (CAUSAL, BI_CAUSAL) else 0)
    return (q >= q_begin) & (q < q_end) & (k >= k_begin) & (k < k_end) & (k >= lo) & (k < hi)


def dense(rows, seqlen_q, seqlen_k):
    mask = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    for row in rows:
        mask += area_of(row, seqlen_q, seqlen_k)
    return mask


def without_overlap(rows, seqlen_q, seqlen_k):
    """`rows` less those that overlap an earlier one."""
    kept, mask = [], torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for row in rows:
        area = area_of(row, seqlen_q, seqlen_k)
        if not (mask & area).any():
            kept.append(row)
            mask |= area
    return kept


def assert_order(rows, costs, documents):
    """Of the tiles at `rows`: the most expensive first, each with its neighbours of the same document."""
    by_row = sorted(range(len(rows)), key=lambda i: (rows[i], i))
    order = []
    for _, group in itertools.groupby(by_row, key=lambda i: documents[i]):
        tiles = list(group)
        order += [(-max(costs[i] for i in tiles), rows[i], i) for i in tiles]
    assert [i for _, _, i in sorted(order)] == list(range(len(costs)))


def walk(tiles, runs, edges, num_rows, num_cols, tile_rows, block_cols, is_by_document):
    """Walks half a plan as a kernel does, checks its promises on the way, returns dense counts."""
    counts = torch.zeros(num_rows, num_cols, dtype=torch.int32)
    owners = torch.zeros(num_rows, dtype=torch.int32)
    costs, first_ends = [], []
    for row_begin, row_end, run_begin, run_end in tiles.tolist():
        assert 0 <= row_end - row_begin <= tile_rows
        owners[row_begin:row_end] += 1
        cost = 0
        for fields in runs[run_begin:run_end].tolist():
            run = dict(zip(RUN_FIELDS, fields, strict=True))
            assert row_begin <= run["row_begin"] < run["row_end"] <= row_end
            assert run["num_lead"] + run["num_trail"] <= run["num_blocks"]
            assert run["diag_lo"] == -NO_DIAG or abs(run["diag_lo"]) < num_rows + num_cols
            assert run["diag_hi"] == NO_DIAG or abs(run["diag_hi"]) < num_rows + num_cols
            cost += 100 * run["num_blocks"] + 15 * (run["num_lead"] + run["num_trail"])
            width = run["first"] + run["num_blocks"] * block_cols
            visible = seen(fields, torch.arange(row_begin, row_end), width, edges)
            for block in range(run["num_blocks"]):
                cols = run["first"] + block * block_cols + torch.arange(block_cols)[None]
                sees = visible[:, cols[0]]
                assert sees.any(), "a block that no row sees"
                is_masked = block < run["num_lead"] or block >= run["num_blocks"] - run["num_trail"]
                assert is_masked == (not sees.all()), "a block in the wrong class"
                at_row, at_col = sees.nonzero(as_tuple=True)
                counts[row_begin + at_row, cols[0, at_col]] += 1
        costs.append(cost - (row_begin == row_end))  # padding comes after tiles that see nothing
        has_runs = run_begin < run_end
        first_ends.append(int(runs[run_begin, RUN_FIELDS.index("col_end")]) if has_runs else -1)
    assert (owners == 1).all(), "a row with no tile or with several"
    has_rows = tiles[:, 0] < tiles[:, 1]
    assert has_rows[: has_rows.sum()].all(), "padding before a tile"
    assert_order(tiles[:, 0].tolist(), costs, first_ends if is_by_document else range(len(costs)))
    return counts


def check(rows, seqlen_q, seqlen_k, sizes=None, **kwargs):
    sizes = sizes or SIZES
    slices = make_slices(rows, seqlen_q, seqlen_k)
    plan = build_tile_plan(slices, **sizes, **kwargs)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in plan)
    expected = dense(rows, seqlen_q, seqlen_k)
    by_q = walk(
        plan.q_tiles,
        plan.q_runs,
        plan.q_edges,
        seqlen_q,
        seqlen_k,
        sizes["q_tile_rows"],
        sizes["q_block_cols"],
        is_by_document=False,
    )
    by_k = walk(
        plan.k_tiles,
        plan.k_runs,
        plan.k_edges,
        seqlen_k,
        seqlen_q,
        sizes["k_tile_rows"],
        sizes["k_block_cols"],
        is_by_document=True,
    )
    torch.testing.assert_close(by_q, expected, rtol=0, atol=0)
    torch.testing.assert_close(by_k.T, expected, rtol=0, atol=0)
    return plan


def documents(lengths, mask_type):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - n, end, end - n, end, mask_type) for n, end in zip(lengths, ends, strict=True)]


NAMED = {
    "nothing": ([], 40, 33),
    "no_rows": ([], 0, 5),
    "no_keys": ([], 5, 0),
    "empty_slices": ([(3, 3, 0, 9, FULL), (0, 9, 4, 4, CAUSAL), (0, 0, 0, 0, FULL)], 20, 20),
    "full": ([(0, 64, 0, 64, FULL)], 64, 64),
    "causal": ([(0, 64, 0, 64, CAUSAL)], 64, 64),
    "ragged_causal": ([(0, 61, 0, 61, CAUSAL)], 61, 61),
    "causal_more_keys": ([(0, 30, 0, 61, CAUSAL)], 30, 61),
    "causal_more_queries": ([(0, 61, 0, 30, CAUSAL)], 61, 30),
    "inv_causal": ([(0, 50, 0, 50, INV_CAUSAL)], 50, 50),
    "inv_causal_more_queries": ([(5, 50, 3, 23, INV_CAUSAL)], 50, 40),
    "bi_causal": ([(0, 40, 0, 57, BI_CAUSAL)], 40, 57),
    "bi_causal_of_nothing": ([(0, 40, 0, 30, BI_CAUSAL)], 40, 30),
    "window": ([(0, 12, 0, 12, CAUSAL), (12, 90, 1, 90, BI_CAUSAL)], 90, 90),
    "one_row": ([(7, 8, 3, 40, FULL)], 20, 40),
    "one_key": ([(7, 40, 3, 4, FULL)], 40, 20),
    "tiny_documents": (documents([1, 3, 2, 5, 1, 1, 4, 7, 2], CAUSAL), 26, 26),
    "long_documents": (documents([40, 17, 33, 16, 50], CAUSAL), 156, 156),
    "equal_documents": (documents([32] * 5, CAUSAL), 160, 160),
    "mixed_documents": (documents([3, 40, 2, 1, 70, 9, 16, 15, 1], FULL), 157, 157),
    "unseen_rows_between": ([(5, 20, 0, 9, FULL), (41, 60, 9, 30, CAUSAL)], 70, 50),
    "two_runs_a_row": ([(0, 40, 0, 5, FULL), (0, 40, 20, 60, CAUSAL)], 40, 60),
    "shared_prefix": (
        [(0, 60, 0, 4, FULL), (0, 25, 4, 29, CAUSAL), (25, 60, 29, 64, CAUSAL)],
        60,
        64,
    ),
    "block_causal": ([(i * 10, i * 10 + 10, 0, i * 10 + 10, FULL) for i in range(6)], 60, 60),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "padded"])
@pytest.mark.parametrize("name", NAMED)
def test_named_masks(name, exact):
    check(*NAMED[name], exact=exact)


@st.composite
def masks(draw):
    seqlen_q = draw(st.integers(1, 70))
    seqlen_k = draw(st.integers(1, 70))
    rows = []
    for _ in range(draw(st.integers(0, 7))):
        q = sorted(draw(st.tuples(st.integers(0, seqlen_q), st.integers(0, seqlen_q))))
        k = sorted(draw(st.tuples(st.integers(0, seqlen_k), st.integers(0, seqlen_k))))
        rows.append((*q, *k, draw(st.sampled_from(list(MaskType)))))
    return without_overlap(rows, seqlen_q, seqlen_k), seqlen_q, seqlen_k


@settings(max_examples=150, deadline=None)
@given(
    masks(),
    st.fixed_dictionaries({name: st.sampled_from([1, 4, 7, 16]) for name in SIZES}),
    st.booleans(),
)
def test_random_masks(mask, sizes, exact):
    check(*mask, sizes=sizes, exact=exact)


@settings(max_examples=50, deadline=None)
@given(masks())
def test_padded_is_exact_after_dropping_the_padding(mask):
    slices = make_slices(*mask)
    exact = build_tile_plan(slices, **SIZES, exact=True)
    padded = build_tile_plan(slices, **SIZES, exact=False)
    for kept, longer in zip(exact, padded, strict=True):
        assert torch.equal(kept, longer[: len(kept)])
    for tiles in (padded.q_tiles[len(exact.q_tiles) :], padded.k_tiles[len(exact.k_tiles) :]):
        assert (tiles[:, 0] == tiles[:, 1]).all()
        assert (tiles[:, 2] == tiles[:, 3]).all()
    for runs in (padded.q_runs[len(exact.q_runs) :], padded.k_runs[len(exact.k_runs) :]):
        assert not runs[:, RUN_FIELDS.index("num_blocks")].any()


def test_padded_plan_under_dynamic_shapes():
    """One graph serves all lengths and numbers of slices: sizes stay symbolic."""
    rows, seqlen_q, seqlen_k = NAMED["mixed_documents"]
    slices = make_slices(rows, seqlen_q, seqlen_k)
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)

    def fake(tensor):
        dynamic = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (tensor.dim() - 1)
        context = StatelessSymbolicContext(dynamic_sizes=dynamic)
        return mode.from_tensor(tensor, symbolic_context=context)

    with mode:
        fake_slices = AttnSlices(
            fake(slices.q_ranges),
            fake(slices.k_ranges),
            fake(slices.mask_types),
            fake(torch.empty(seqlen_q)).shape[0],
            fake(torch.empty(seqlen_k)).shape[0],
        )
        plan = build_tile_plan(fake_slices, **SIZES, exact=False)
    expected = build_tile_plan(slices, **SIZES, exact=False)
    for symbolic, real in zip(plan, expected, strict=True):
        # Of the edges the lengths themselves.
        if real is not expected.q_edges and real is not expected.k_edges:
            assert not isinstance(symbolic.shape[0], int)
            assert not symbolic.shape[0].node.expr.is_number
        assert [int(size) for size in symbolic.shape] == list(real.shape)


def test_order_of_slices_does_not_matter():
    rows, seqlen_q, seqlen_k = NAMED["mixed_documents"]
    plan = build_tile_plan(make_slices(rows, seqlen_q, seqlen_k), **SIZES)
    reversed_plan = build_tile_plan(make_slices(rows[::-1], seqlen_q, seqlen_k), **SIZES)
    assert all(torch.equal(a, b) for a, b in zip(plan, reversed_plan, strict=True))


def test_long_documents_start_their_own_tiles():
    rows, seqlen_q, seqlen_k = NAMED["long_documents"]
    plan = check(rows, seqlen_q, seqlen_k)
    tile_starts = set(plan.q_tiles[:, 0].tolist())
    assert tile_starts >= {q_begin for q_begin, *_ in rows}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "padded"])
@pytest.mark.parametrize(
    ("lengths", "by_q", "by_k"),
    [
        # The last tile of queries and the first one of keys are a document's longest.
        (
            [32] * 3,
            [16, 48, 80, 0, 32, 64],
            [*range(0, 32, 8), *range(32, 64, 8), *range(64, 96, 8)],
        ),
        ([16, 32, 16], [32, 0, 16, 48], [*range(16, 48, 8), *range(0, 16, 8), *range(48, 64, 8)]),
    ],
    ids=["equal", "different"],
)
def test_tiles_of_keys_come_document_by_document(lengths, by_q, by_k, exact):
    """The one with the longest tile first; tiles of queries by their own length alone."""
    plan = check(documents(lengths, CAUSAL), sum(lengths), sum(lengths), exact=exact)
    for tiles, expected in ((plan.q_tiles, by_q), (plan.k_tiles, by_k)):
        assert tiles[: len(expected), 0].tolist() == expected


def test_short_documents_share_tiles():
    plan = check(*NAMED["tiny_documents"])
    assert len(plan.q_tiles) == 2


def test_full_and_causal_neighbours_are_one_run():
    rows = [(0, 32, 0, 20, FULL), (0, 32, 20, 52, CAUSAL)]
    merged = check(rows, 32, 52)
    whole = check([(0, 32, 0, 52, CAUSAL)], 32, 52)
    assert all(torch.equal(a, b) for a, b in zip(merged[:3], whole[:3], strict=True))


def test_size_does_not_grow_with_blocks():
    length = 1 << 20
    slices = make_slices([(0, length, 0, length, CAUSAL)], length, length)
    plan = build_tile_plan(
        slices, q_tile_rows=128, q_block_cols=128, k_tile_rows=128, k_block_cols=64
    )
    tiles_and_runs = (plan.q_tiles, plan.q_runs, plan.k_tiles, plan.k_runs)
    assert [len(tensor) for tensor in tiles_and_runs] == [length // 128] * 4
    assert plan.q_tiles[0].tolist()[:2] == [length - 128, length]
    assert plan.k_tiles[0].tolist()[:2] == [0, 128]


def test_long_documents_start_a_tile():
    """Of 16 queries, and of 8 keys."""
    plan = build_tile_plan(make_slices(documents([20, 37, 9], CAUSAL), 66, 66), **SIZES)
    assert sorted(plan.q_tiles[:, 0].tolist()) == [0, 16, 20, 36, 52]
    assert sorted(plan.k_tiles[:, 0].tolist()) == [0, 8, 16, 20, 28, 36, 44, 52, 57, 65]


@pytest.mark.parametrize(
    ("num_common", "starts"), [(16, [0, 16, 20, 36, 52]), (17, [0, 16, 32, 48])]
)
def test_long_documents_that_see_more_in_common_do_not(num_common, starts):
    """Two blocks of keys in common, as many as the first tile of a document sees of it, or three."""
    rows = [*documents([20, 37], CAUSAL), (0, 57, 100, 100 + num_common, FULL)]
    plan = check(rows, 57, 130)
    assert sorted(plan.q_tiles[:, 0].tolist()) == starts


def test_a_prefix_that_ends_within_a_tile_starts_none():
    """The keys behind it are seen by fewer queries than those of it are."""
    rows = [(0, 100, 0, 100, FULL), (100, 512, 0, 512, CAUSAL)]
    sizes = {name: 16 for name in SIZES}
    plan = check(rows, 512, 512, sizes=sizes)
    assert sorted(plan.k_tiles[:, 0].tolist()) == list(range(0, 512, 16))


def test_too_many_crossings_are_detected():
    """Thirteen borders and more in each of twenty slices that are no steps:
    more than `max_overlap` and `MAX_CROSSINGS`."""
    slices = make_slices([(i, i + 1, 0, 128 - i, FULL) for i in range(20)], 20, 128)
    build_tile_plan(slices, **SIZES, exact=False, max_overlap=20)
    message = (
        "room for 8 slices across the average border between tiles, or for 8 borders in the average slice, "
        "and the mask needs more"
    )
    with pytest.raises(MaskDataError, match=message):
        build_tile_plan(slices, **SIZES, exact=False, max_overlap=8)


@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
def test_block_masks_of_many_heads_fit(density):
    """Heads as rows: hundreds of short slices cross the average border between tiles of keys."""
    block, num_blocks, nheads_kv, group = 16, 64, 2, 8
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand(nheads_kv, num_blocks, num_blocks, generator=generator) < density
    change = torch.nn.functional.pad(visible.int(), (1, 1)).diff(dim=-1)
    head, q_block, first = (change > 0).nonzero().unbind(1)
    last = (change < 0).nonzero()[:, 2]
    rows = []
    for member in range(group):
        q = (head * group + member) * num_blocks + q_block
        k = torch.stack([first, last], 1) + head[:, None] * num_blocks
        rows.append(torch.cat([q[:, None], q[:, None] + 1, k], 1) * block)
    table = torch.nn.functional.pad(torch.cat(rows), (0, 1), value=int(FULL))
    seqlen_q, seqlen_k = nheads_kv * group * num_blocks * block, nheads_kv * num_blocks * block
    slices = make_slices(table.tolist(), seqlen_q, seqlen_k)
    sizes = dict.fromkeys(SIZES, block)
    exact = build_tile_plan(slices, **sizes, exact=True)
    padded = build_tile_plan(slices, **sizes, exact=False)
    for kept, longer in zip(exact, padded, strict=True):
        assert torch.equal(kept, longer[: len(kept)])
    crossings = int((last - first - 1).sum()) * group
    num_borders = nheads_kv * num_blocks - 1
    assert (crossings > MAX_OVERLAP * num_borders) == (density >= 0.5)


@pytest.mark.parametrize("name", [*SIZES, "max_overlap"])
def test_sizes_must_be_positive(name):
    slices = make_slices([(0, 4, 0, 4, FULL)], 4, 4)
    with pytest.raises(ValueError, match=f"`{name}` must be positive, got 0"):
        build_tile_plan(slices, **{**SIZES, name: 0})
