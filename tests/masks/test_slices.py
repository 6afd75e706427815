"""AttnSlices against their dense masks."""

import dataclasses
import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_compile import flex_flash_attention
from magi_compile.masks import AttnSlice, AttnSlices, MaskType
from magi_compile.masks.evaluation.slice_checks import slice_checks

few = settings(max_examples=60, deadline=None)
sizes = st.integers(1, 14)
windows = st.tuples(*[st.one_of(st.none(), st.integers(-1, 16))] * 2)


@st.composite
def slice_lists(draw):
    """Slices that may overlap, with their sizes."""
    seqlen_q, seqlen_k = draw(sizes), draw(sizes)

    def ranges(length):
        return st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted).map(tuple)

    items = st.builds(AttnSlice, ranges(seqlen_q), ranges(seqlen_k), st.sampled_from(MaskType))
    return draw(st.lists(items, max_size=8)), seqlen_q, seqlen_k


@st.composite
def disjoint_slices(draw):
    items, seqlen_q, seqlen_k = draw(slice_lists())
    kept, seen = [], torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for item in items:
        mask = dense(item, seqlen_q, seqlen_k)
        if not bool((mask & seen).any()):
            kept.append(item)
            seen |= mask
    return AttnSlices.from_slices(kept, seqlen_q, seqlen_k)


def dense(item, seqlen_q, seqlen_k):
    """The definition, row by row."""
    (q_begin, q_end), (k_begin, k_end), mask_type = item
    mask = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for q in range(q_begin, q_end):
        moves_lo = mask_type in (MaskType.INV_CAUSAL, MaskType.BI_CAUSAL)
        moves_hi = mask_type in (MaskType.CAUSAL, MaskType.BI_CAUSAL)
        lo = k_begin + (q - q_begin if moves_lo else 0)
        hi = k_end - (q_end - 1 - q if moves_hi else 0)
        mask[q, max(lo, k_begin) : max(min(hi, k_end), lo, k_begin)] = True
    return mask


def test_unchecked_makes_what_the_constructor_makes():
    slices = AttnSlices.causal(5)
    fields = [field.name for field in dataclasses.fields(slices) if field.init]
    made = [make(*(getattr(slices, x) for x in fields)) for make in (AttnSlices, slices.unchecked)]
    assert vars(made[0]) == vars(made[1]) == vars(slices)
    same = made[1]
    assert torch.equal(same.to_dense(), slices.to_dense())


@few
@given(slice_lists())
def test_checks_without_a_wait_find_the_same(drawn):
    """As few slices as here are all compared with one another."""
    items, seqlen_q, seqlen_k = drawn
    if not items:
        return
    lists = [torch.tensor(x, dtype=torch.int32) for x in zip(*items, strict=True)]
    slices = AttnSlices.unchecked(*lists, seqlen_q, seqlen_k)
    *others, overlap = slice_checks(slices)
    assert all(bool(check.ok) for check in others)
    pairs = [
        (i, j)
        for (i, a), (j, b) in itertools.combinations(
            enumerate(dense(item, seqlen_q, seqlen_k) for item in items), 2
        )
        if bool((a & b).any())
    ]
    assert bool(overlap.ok) == (not pairs)
    if pairs:
        assert tuple(sorted(map(int, overlap.values))) in pairs


@few
@given(slice_lists())
def test_overlap_is_found_exactly(drawn):
    items, seqlen_q, seqlen_k = drawn
    masks = [dense(item, seqlen_q, seqlen_k) for item in items]
    overlaps = any(bool((a & b).any()) for a, b in itertools.combinations(masks, 2))
    if overlaps:
        with pytest.raises(ValueError, match="slices must not overlap, but these two do: "):
            AttnSlices.from_slices(items, seqlen_q, seqlen_k)
    else:
        slices = AttnSlices.from_slices(items, seqlen_q, seqlen_k)
        expected = sum(masks, torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool))
        assert torch.equal(slices.to_dense(), expected > 0)
        assert slices.area() == int((expected > 0).sum())


@few
@given(disjoint_slices(), st.data())
def test_restrict(slices, data):
    mask = slices.to_dense()
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, slices.seqlen_q)] * 2)))
    rows = torch.zeros_like(mask)
    rows[begin:end] = mask[begin:end]
    restricted = slices.restrict_q(begin, end)
    assert torch.equal(restricted.to_dense(), rows)
    assert len(restricted) == len(restricted.compact())
    restricted.validate()

    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, slices.seqlen_k)] * 2)))
    keys = torch.zeros_like(mask)
    keys[:, begin:end] = mask[:, begin:end]
    restricted = slices.restrict_k(begin, end)
    assert torch.equal(restricted.to_dense(), keys)
    assert len(restricted) == len(restricted.compact())
    restricted.validate()


@few
@given(disjoint_slices(), st.randoms(use_true_random=False))
def test_normal_form(slices, random):
    """It depends on the mask alone: not on the order, nor on how rows and keys were cut."""
    normal = slices.normalize()
    assert torch.equal(normal.to_dense(), slices.to_dense())
    assert list(normal.normalize()) == list(normal)
    assert list(normal) == sorted(normal, key=lambda item: (item.q_range[0], item.k_range[0]))
    assert len(normal) <= len(AttnSlices.from_dense(slices.to_dense()))
    assert list(AttnSlices.from_dense(slices.to_dense())) == list(normal)

    middle_q, middle_k = random.randint(0, slices.seqlen_q), random.randint(0, slices.seqlen_k)
    halves = [slices.restrict_q(0, middle_q), slices.restrict_q(middle_q, slices.seqlen_q)]
    quarters = [
        part.restrict_k(begin, end)
        for part in halves
        for begin, end in ((0, middle_k), (middle_k, slices.seqlen_k))
    ]
    items = [item for part in quarters for item in part]
    random.shuffle(items)
    again = AttnSlices.from_slices(items, slices.seqlen_q, slices.seqlen_k)
    assert list(again.normalize()) == list(normal)
    assert again.content_key() == slices.content_key()
    assert hash(again.content_key()) == hash(slices.content_key())


def test_content_key_differs():
    keys = {
        AttnSlices.causal(4).content_key(),
        AttnSlices.full(4).content_key(),
        AttnSlices.full(4, 5).content_key(),
        AttnSlices.from_slices([], 4, 4).content_key(),
    }
    assert len(keys) == 4


@few
@given(sizes, sizes, windows)
def test_windows(seqlen_q, seqlen_k, window):
    left, right = (None if side == -1 else side for side in window)
    row = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    expected = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        expected &= key >= row - left
    if right is not None:
        expected &= key <= row + right
    slices = AttnSlices.sliding_window(seqlen_q, seqlen_k, window)
    assert torch.equal(slices.to_dense(), expected)
    assert list(slices) == list(slices.normalize())


@few
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5), windows)
def test_documents(lengths, window):
    cu_q, cu_k = ([0, *itertools.accumulate(column)] for column in zip(*lengths, strict=True))
    slices = AttnSlices.from_cu_seqlens(cu_q, torch.tensor(cu_k), causal=True, window=window)
    left, right = window
    right = 0 if right in (None, -1) else min(right, 0)
    parts = [AttnSlices.sliding_window(q, k, (left, right)).to_dense() for q, k in lengths]
    assert torch.equal(slices.to_dense(), torch.block_diag(*(p.int() for p in parts)).bool())
    assert (slices.seqlen_q, slices.seqlen_k) == (cu_q[-1], cu_k[-1])


def test_constructors_need_few_slices():
    assert list(AttnSlices.full(7, 9)) == [((0, 7), (0, 9), MaskType.FULL)]
    assert list(AttnSlices.causal(7, 9)) == [((0, 7), (0, 9), MaskType.CAUSAL)]
    assert list(AttnSlices.sliding_window(100, None, (10, 10))) == [
        ((0, 11), (0, 21), MaskType.CAUSAL),
        ((11, 90), (1, 100), MaskType.BI_CAUSAL),
        ((90, 100), (80, 100), MaskType.INV_CAUSAL),
    ]
    cu_seqlens = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    slices = AttnSlices.from_cu_seqlens(cu_seqlens, causal=True)
    assert list(slices) == [
        ((0, 3), (0, 3), MaskType.CAUSAL),
        ((3, 9), (3, 9), MaskType.CAUSAL),
    ]


def test_padding():
    lists = ([[0, 4], [0, 0], [4, 8]], [[0, 4], [0, 0], [5, 5]], [1, 0, 0])
    padded = AttnSlices.from_lists(*lists, 8, 8)
    assert len(padded) == 3
    assert list(padded.compact()) == [((0, 4), (0, 4), MaskType.CAUSAL)]
    assert padded.area() == 10
    assert padded[2] == ((4, 8), (5, 5), MaskType.FULL)
    assert "3 slices, seqlen_q=8, seqlen_k=8" in repr(padded)


def test_from_lists_takes_tensors_and_infers_lengths():
    ranges = torch.tensor([[0, 4], [4, 9]])
    slices = AttnSlices.from_lists(ranges, ranges, torch.tensor([1, 3]))
    assert (slices.seqlen_q, slices.seqlen_k) == (9, 9)
    assert slices.q_ranges.dtype == torch.int32
    empty = AttnSlices.from_lists([], [], [])
    assert (len(empty), empty.seqlen_q, empty.area()) == (0, 0, 0)


def test_larger_than_int32():
    slices = AttnSlices.causal(1 << 20)
    assert slices.area() == (1 << 20) * ((1 << 20) + 1) // 2


BROKEN = [
    ([[0, 4], [4, 9]], [[0, 4], [0, 8]], [0, 0], r"`q_ranges\[1\]` must .* seqlen_q = 8, got \[4, 9\]"),
    ([[0, 4]], [[3, 2]], [0], r"`k_ranges\[0\]` must satisfy .* got \[3, 2\]"),
    ([[-1, 4]], [[0, 4]], [0], r"`q_ranges\[0\]` must satisfy 0 <= start .* got \[-1, 4\]"),
    ([[0, 4]], [[0, 4]], [7], r"`mask_types\[0\]` must be a MaskType .* got 7"),
    ([[0, 4], [2, 8]], [[0, 4], [3, 8]], [0, 0], "slices must not overlap, .*: 0: .* and 1: "),
]  # fmt: skip


@pytest.mark.parametrize(("q_ranges", "k_ranges", "mask_types", "message"), BROKEN)
def test_the_constructor_looks_at_values(q_ranges, k_ranges, mask_types, message):
    lists = [int32(*x) for x in (q_ranges, k_ranges, mask_types)]
    with pytest.raises(ValueError, match=message):
        AttnSlices(*lists, 8, 8)
    unseen = AttnSlices(*(x.to("meta") for x in lists), 8, 8)
    assert not unseen.is_checked
    assert AttnSlices.unchecked(*lists, 8, 8).is_checked


def test_what_is_made_of_slices_nobody_looked_at_is_not_checked_either():
    unseen = AttnSlices(*(int32(*x).to("meta") for x in ([[0, 4]], [[0, 4]], [0])), 8, 8)
    assert not unseen.to("meta").is_checked
    seen = AttnSlices.causal(8)
    assert seen.to("meta").is_checked
    assert seen.compact().is_checked


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q_ranges": [[0, 4]]}, TypeError, "`q_ranges` must be a tensor, got list"),
        ({"q_ranges": torch.zeros(1, 2)}, TypeError, "`q_ranges` must have dtype torch.int32, got"),
        ({"k_ranges": int32([0, 1]).long()}, TypeError, "`k_ranges` must have dtype torch.int32"),
        ({"q_ranges": int32(0, 1)}, ValueError, r"`q_ranges` must have shape \[2, 2\], got \[2\]"),
        ({"k_ranges": int32([0, 1], [1, 2])}, ValueError, r"`k_ranges` must have shape \[1, 2\]"),
        ({"mask_types": int32(0, 1)}, ValueError, r"`mask_types` must have shape \[1\], got \[2\]"),
        (
            {"mask_types": torch.zeros(1, dtype=torch.int32, device="meta")},
            ValueError,
            r"`mask_types` must be on the device of `q_ranges` \(cpu\), got meta",
        ),
        ({"seqlen_q": 4.0}, TypeError, "`seqlen_q` must be an int, got float"),
        ({"seqlen_k": True}, TypeError, "`seqlen_k` must be an int, got bool"),
        (
            {"seqlen_k": 1 << 30},
            ValueError,
            r"`seqlen_k` must be in \[0, 2\*\*30\), got 1073741824",
        ),
        ({"seqlen_q": -1}, ValueError, r"`seqlen_q` must be in \[0, 2\*\*30\), got -1"),
    ],
)
def test_wrong_shapes_and_types(arguments, error, message):
    good = {
        "q_ranges": int32([0, 4]),
        "k_ranges": int32([0, 4]),
        "mask_types": int32(0),
        "seqlen_q": 4,
        "seqlen_k": 4,
    }
    with pytest.raises(error, match=message):
        AttnSlices(**{**good, **arguments})


@pytest.mark.parametrize(
    ("lists", "error", "message"),
    [
        (
            ([[0, 5]], [[0, 4]], [0]),
            ValueError,
            r"`q_ranges\[0\]` must .* seqlen_q = 4, got \[0, 5\]",
        ),
        (([[0, 4]], [[3, 2]], [0]), ValueError, r"`k_ranges\[0\]` must satisfy .* got \[3, 2\]"),
        (([[-1, 4]], [[0, 4]], [0]), ValueError, r"`q_ranges\[0\]` must satisfy 0 <= start"),
        (([[0, 4]], [[0, 4]], [4]), ValueError, r"`mask_types\[0\]` must be a MaskType .* got 4"),
        (([[0.0, 4.0]], [[0, 4]], [0]), TypeError, "`q_ranges` must hold int32 or int64 values"),
        (([[0, 4], [5]], [[0, 4]], [0]), ValueError, "`q_ranges` must be a list of ints: "),
        (
            (torch.zeros(1, 2), [[0, 4]], [0]),
            TypeError,
            "`q_ranges` must hold int32 or int64 values",
        ),
        (([[0, 1 << 31]], [[0, 4]], [0]), ValueError, r"`q_ranges` must stay below 2\*\*30, got"),
        (
            ([[0, 2], [1, 4]], [[0, 2], [0, 4]], [0, 2]),
            ValueError,
            r"0: \[0, 2\) x \[0, 2\) FULL and 1: \[1, 4\) x \[0, 4\) INV_CAUSAL",
        ),
    ],
)
def test_wrong_values(lists, error, message):
    with pytest.raises(error, match=message):
        AttnSlices.from_lists(*lists, 4, 4)


def test_wrong_lengths_and_items():
    with pytest.raises(ValueError, match=r"`seqlen_q` must be an int in \[0, 2\*\*30\), got -3"):
        AttnSlices.full(-3)
    with pytest.raises(ValueError, match=r"`seqlen_q` must be an int in .* got None"):
        AttnSlices.full(None)
    with pytest.raises(TypeError, match="`seqlen_q` must be an int, got type"):
        AttnSlices.from_lists([], [], [], int, 4)
    with pytest.raises(ValueError, match=r"`seqlen_k` must be an int in .* got 2\.5"):
        AttnSlices.causal(3, 2.5)
    with pytest.raises(ValueError, match=r"hold \(q_range, k_range, mask_type\), got \(\(0, 4\)"):
        AttnSlices.from_slices([((0, 4), (0, 4))])
    with pytest.raises(TypeError, match=r"`begin` and `end` must be ints, got 1\.5, 3"):
        AttnSlices.full(4).restrict_q(1.5, 3)


def test_wrong_dense_masks_and_ranges():
    with pytest.raises(TypeError, match="`mask` must be a tensor, got list"):
        AttnSlices.from_dense([[True]])
    with pytest.raises(TypeError, match=r"`mask` must have dtype torch\.bool"):
        AttnSlices.from_dense(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"`mask` must have shape .* got \[1, 2, 2\]"):
        AttnSlices.from_dense(torch.ones(1, 2, 2, dtype=torch.bool))
    with pytest.raises(
        ValueError, match=r"`begin` and `end` must satisfy .* seqlen_q = 4, got 3, 5"
    ):
        AttnSlices.full(4).restrict_q(3, 5)
    with pytest.raises(
        ValueError, match=r"`begin` and `end` must satisfy .* seqlen_k = 4, got 3, 2"
    ):
        AttnSlices.full(4).restrict_k(3, 2)


WRITES = {
    "k_ranges": ((0, 1), 10**6, r"`k_ranges\[0\]` must satisfy"),
    "q_ranges": ((0, 0), -5, r"`q_ranges\[0\]` must satisfy"),
    "mask_types": ((0,), 77, r"`mask_types\[0\]` must be a MaskType"),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_written_slices_are_checked_again(name, called):
    place, value, message = WRITES[name]
    x, slices = torch.randn(16, 2, 8), AttnSlices.causal(16)
    if called:
        flex_flash_attention(x, x, x, slices)
    getattr(slices, name)[place] = value
    for use in (
        lambda: flex_flash_attention(x, x, x, slices),
        slices.area,
        lambda: slices.to("cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    getattr(slices, name)[place] = {"k_ranges": 16, "q_ranges": 0, "mask_types": 1}[name]
    assert slices.area() == 136


def test_slices_written_to_overlap():
    x, slices = torch.randn(8, 1, 8), AttnSlices.from_cu_seqlens([0, 4, 8])
    flex_flash_attention(x, x, x, slices)
    slices.q_ranges[1, 0] = 2
    slices.k_ranges[1, 0] = 2
    with pytest.raises(ValueError, match="slices must not overlap"):
        flex_flash_attention(x, x, x, slices)


def test_uncounted_writes_stay_in_memory():
    with torch.inference_mode():
        x, slices = torch.randn(8, 1, 8), AttnSlices.causal(8)
        flex_flash_attention(x, x, x, slices)
        slices.k_ranges[0, 1] = 10**6
        with pytest.raises(ValueError, match="`k_ranges"):
            flex_flash_attention(x, x, x, slices)


def test_numbers_near_the_ends_of_their_dtypes():
    for side in (sys.maxsize, 2**31 - 1, 2**31, 2**62):
        assert AttnSlices.sliding_window(16, None, (side, 0)).area() == 136
        assert AttnSlices.sliding_window(16, 8, (side, side)).area() == 128
    for end in (2**30, 2**31, 2**32 + 5, 2**63 - 1):
        with pytest.raises(ValueError, match=r"`cu_seqlens_q` must stay below 2\*\*30"):
            AttnSlices.from_cu_seqlens([0, end])
    for number in (-(2**63), 2**63 - 1, 2**31, -(2**31)):
        with pytest.raises(ValueError, match=r"`q_ranges` must stay below 2\*\*30"):
            AttnSlices.from_lists(torch.tensor([[number, 8]]), [[0, 8]], [0], 16, 16)
    with pytest.raises(ValueError, match=r"`q_ranges` must stay below 2.*, got 1844"):
        AttnSlices.from_lists([[0, 2**64]], [[0, 8]], [0], 16, 16)
    with pytest.raises(TypeError, match="`device` must be a device"):
        AttnSlices.full(257).to(torch.bfloat16)
    numpy = pytest.importorskip("numpy")
    assert AttnSlices.sliding_window(16, None, (numpy.int64(3), numpy.int32(0))).area() == 58
    lists = AttnSlices.full(16)
    made = AttnSlices(lists.q_ranges, lists.k_ranges, lists.mask_types, numpy.int64(16), 16)
    assert type(made.seqlen_q) is int


def test_rects_follow_what_is_written_to_slices():
    slices = AttnSlices.from_lists([(0, 4), (4, 8)], [(0, 4), (4, 8)], [1, 1]).normalize()
    before = slices.rects()
    assert slices.to("cpu").rects().row_end.tolist() == before.row_end.tolist() == [4, 8]
    slices.k_ranges[1, 0] = 5
    assert (
        slices.rects().col_begin.tolist() == slices.to("cpu").rects().col_begin.tolist() == [0, 5]
    )
