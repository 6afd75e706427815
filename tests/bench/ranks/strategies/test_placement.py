"""Who holds which tokens, and masks between the tokens of two owners."""

import random

import pytest
import torch

from magi_bench.ranks.strategies.placement import (
    between,
    contiguous,
    count,
    positions,
    spans_of,
    split,
    zigzag,
)
from magi_compile.masks.library import MASKS

LENGTHS = [45, 80, 1, 9, 13, 2, 100]


@pytest.mark.parametrize("owners", [1, 2, 3, 5, 8])
def test_a_zigzag_gives_every_token_once_and_all_owners_as_many(owners):
    rng = random.Random(owners)
    lengths = [rng.choice((1, 2, 5, 30, 75, 150)) for _ in range(40)]
    lengths.append(-sum(lengths) % owners or owners)
    placed = zigzag(spans_of(lengths), owners)
    rows = torch.cat([positions(spans, "cpu") for spans in placed])
    assert torch.equal(rows.sort().values, torch.arange(sum(lengths)))
    assert {count(spans) for spans in placed} == {sum(lengths) // owners}


def test_a_zigzag_of_one_document():
    assert zigzag([(0, 16)], 2) == [[(0, 4), (12, 16)], [(4, 12)]]
    assert zigzag([(0, 8), (8, 16)], 2) == [
        [(0, 2), (6, 10), (14, 16)],
        [(2, 6), (10, 14)],
    ]


def test_numbers_differ_by_one_after_any_document():
    lengths = [5, 1, 1, 7, 23, 2, 9]
    for end in range(1, len(lengths)):
        counts = [count(spans) for spans in zigzag(spans_of(lengths[:end]), 4)]
        assert max(counts) - min(counts) <= 1


def test_equal_parts_of_an_owner():
    spans = [(0, 3), (10, 14), (20, 21)]
    assert split(spans, 2) == [[(0, 3), (10, 11)], [(11, 14), (20, 21)]]
    assert contiguous(12, 3) == [[(0, 4)], [(4, 8)], [(8, 12)]]


@pytest.mark.parametrize(
    "name", [x for x in MASKS if x not in ("block_diffusion", "sliding_tiles")]
)
def test_masks_between_owners(name):
    more = {
        "sliding_window_full": {"window": 17},
        "sliding_window_causal": {"window": 17},
        "global_sliding_window": {"window": 5},
        "prefix_lm_causal": {"prefix": 30},
        "prefix_lm_document": {"prefix": 7},
        "block_causal_document": {"block": 8},
    }
    slices = MASKS[name](LENGTHS, **more.get(name, {})).slices
    dense, total = slices.to_dense(), sum(LENGTHS)
    owners = [*zigzag(spans_of(LENGTHS), 3), *zigzag([(0, total)], 2), *contiguous(total, 2)]
    for queries in owners:
        for keys in owners:
            found = between(slices, queries, keys)
            rows, columns = positions(queries, "cpu"), positions(keys, "cpu")
            assert torch.equal(found.to_dense(), dense[rows][:, columns])
            found.validate()
