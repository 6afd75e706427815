"""The named masks: mask_mod, conversion and definition agree."""

import re

import pytest
import torch

from magi_compile.masks import (
    library,
    padded_slices_from_intervals,
    row_intervals,
    slices_from_intervals,
    trace_mask_mod,
)
from magi_compile.masks.library import MASKS, tree
from magi_compile.masks.slices import AttnSlices
from tests.masks.support.helpers import dense_mask, dynamo_program

LENGTHS = [[1], [63], [5, 1, 40, 17], [300, 1, 2, 129, 200], [700, 821]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("name", MASKS)
def test_library(name, lengths):
    """The mask_mod, its conversion, and the slices from the definition are one mask."""
    options = {"window": 37, "block": 16, "tile": 7, "width": 3, "height": 2}
    options = {k: v for k, v in options.items() if k in MASKS[name].__kwdefaults__}
    mask, total = MASKS[name](lengths, **options), sum(lengths)
    expected = dense_mask(mask.mask_mod, 1, total, total)[0]
    mask.slices.validate()
    assert torch.equal(mask.slices.to_dense(), expected)
    program, tables, _ = trace_mask_mod(mask.mask_mod)
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
    program, tables, _ = trace_mask_mod(mask.mask_mod)
    intervals = row_intervals(program, tables, batch=1, seqlen_q=180, seqlen_k=180)
    assert len(slices_from_intervals(intervals)) == count
    padded, _ = padded_slices_from_intervals(intervals, capacity=100)
    assert len(padded.compact()) == count


WRONG = [
    ("causal", ([5, -1, 3],), {}, ValueError, "`lengths` must hold positive .* got [5, -1, 3]"),
    ("causal", ([],), {}, ValueError, "`lengths` must hold positive document lengths, got []"),
    ("causal", (100,), {}, TypeError, "`lengths` must be a list of ints, got 100"),
    ("full", ([True, 4],), {}, TypeError, "`lengths` must be a list of ints, got [True, 4]"),
    ("document_causal", ([5.5],), {}, TypeError, "`lengths` must be a list of ints, got [5.5]"),
    *(
        (name, ([50],), {"window": -1}, ValueError, "`window` must be at least 0, got -1")
        for name in ("sliding_window_full", "sliding_window_causal", "global_sliding_window")
    ),
    (
        "sliding_window_causal",
        ([50],),
        {"window": None},
        TypeError,
        "`window` must be an int, got None",
    ),
    (
        "prefix_lm_causal",
        ([50],),
        {"prefix": -1},
        ValueError,
        "`prefix` must be at least 0, got -1",
    ),
    ("prefix_lm_document", ([50],), {"prefix": 2.5}, TypeError, "`prefix` must be an int, got 2.5"),
    (
        "block_causal_document",
        ([50],),
        {"block": 0},
        ValueError,
        "`block` must be at least 1, got 0",
    ),
    ("block_diffusion", ([50],), {"block": -1}, ValueError, "`block` must be at least 1, got -1"),
    ("sliding_tiles", ([50],), {"tile": 0}, ValueError, "`tile` must be at least 1, got 0"),
    ("sliding_tiles", ([50],), {"width": 0}, ValueError, "`width` must be at least 1, got 0"),
    (
        "causal",
        ([torch.tensor(5.5)],),
        {},
        TypeError,
        "`lengths` must be a list of ints, got [5.5]",
    ),
    ("tree", (10, [-1]), {}, TypeError, "`lengths` must be a list of ints, got 10"),
    ("tree", ([10, 5], 5), {}, TypeError, "`parents` must be a list of ints, got 5"),
    ("tree", ([10, 5], None), {}, TypeError, "`parents` must be a list of ints, got None"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "error", "message"), WRONG)
def test_wrong_numbers(name, arguments, options, error, message):
    pattern = ".*".join(map(re.escape, message.split(".* ")))
    with pytest.raises(error, match=pattern):
        getattr(library, name)(*arguments, **options)


def test_numbers_of_other_kinds():
    """Tensors, and the ints of other packages."""
    of_ints = library.tree([10, 5], [-1, 0]).slices
    for lengths in (torch.tensor([10, 5]), [torch.tensor(10), torch.tensor(5)], (10, 5)):
        found = library.tree(lengths, torch.tensor([-1, 0])).slices
        assert found.content_key() == of_ints.content_key()


def test_lengths_must_be_positive():
    with pytest.raises(ValueError, match=r"`lengths` must hold positive .* got \[3, 0\]"):
        MASKS["document_causal"]([3, 0])


TREES = {
    "root": ([70], [-1]),
    "chain": ([5, 1, 40, 17], [-1, 0, 1, 2]),
    "answers": ([40, 7, 1, 30], [-1, 0, 0, 0]),
    "deep": ([20, 9, 1, 33, 5, 12, 8], [-1, 0, 1, 1, 0, 4, 5]),
    "several": ([10, 20, 3, 40, 6], [-1, 0, -1, 2, -1]),
}


@pytest.mark.parametrize("name", TREES)
def test_tree(name):
    lengths, parents = TREES[name]
    mask, total = tree(lengths, parents), sum(lengths)
    node = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    is_above = torch.eye(len(lengths), dtype=torch.bool)
    for child, parent in enumerate(parents):
        if parent >= 0:
            is_above[child] |= is_above[parent]
    expected = is_above[node[:, None], node] & torch.ones(total, total, dtype=torch.bool).tril()
    assert torch.equal(dense_mask(mask.mask_mod, 1, total, total)[0], expected)
    mask.slices.validate()
    assert torch.equal(mask.slices.to_dense(), expected)
    assert len(mask.slices) <= 2 * len(lengths)


def test_a_chain_is_one_slice():
    assert list(tree([1] * 20000, range(-1, 19999)).slices) == list(AttnSlices.causal(20000))


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ([3, 4], [-1], "one entry for each of the 2 nodes, got 1"),
        ([3, 4], [-1, 1], "parent, or -1, got 1"),
        ([3, 4], [0, -1], "node 0 or one above that"),
        ([3, 4, 5, 6], [-1, 0, 0, 1], "node 3 or one above that as its parent, or -1, got 1"),
        ([3, 4], [-1, -2], "got -2"),
        ([3, 0], [-1, 0], "positive document lengths"),
    ],
)
def test_trees_are_depth_first(lengths, parents, message):
    with pytest.raises(ValueError, match=message):
        tree(lengths, parents)


HUGE = {
    "sliding_window_full": ("window",),
    "sliding_window_causal": ("window",),
    "global_sliding_window": ("window",),
    "prefix_lm_causal": ("prefix",),
    "prefix_lm_document": ("prefix",),
    "block_causal_document": ("block",),
    "block_diffusion": ("block",),
    "sliding_tiles": ("tile", "width", "height"),
}


@pytest.mark.parametrize("name", HUGE)
def test_sizes_beyond_the_tokens_mean_all_of_them(name):
    index = torch.arange(16, dtype=torch.int32)
    for number in (2**31 - 1, 2**31, 2**63 - 1):
        for one in HUGE[name]:
            mask = MASKS[name]([10, 6], **{one: number})
            expected = MASKS[name]([10, 6], **{one: 16})
            shown = mask.mask_mod(0, 0, index[:, None], index).expand(16, 16)
            assert torch.equal(shown, mask.slices.to_dense())
            assert torch.equal(shown, expected.slices.to_dense())


def test_too_many_tokens():
    with pytest.raises(ValueError, match=r"`lengths` must add up to less than 2\*\*30 tokens"):
        MASKS["document_full"]([2**29, 2**29])
