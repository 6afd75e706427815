"""The named masks: mask_mod, conversion and definition agree."""

import pytest
import torch

from magi_compile.masks import (
    padded_slices_from_intervals,
    row_intervals,
    slices_from_intervals,
    trace_mask_mod,
)
from magi_compile.masks.library import MASKS
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


def test_lengths_must_be_positive():
    with pytest.raises(ValueError, match=r"`lengths` must hold positive .* got \[3, 0\]"):
        MASKS["document_causal"]([3, 0])
