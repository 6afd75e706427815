"""Tile sizes are pure functions of the problem."""

import pytest
import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import (
    BACKWARD_HEAD_DIMS,
    backward_config,
    backward_heads_per_section,
    backward_shares,
    plan_tiles,
)


def problem(nheads_q=8, nheads_kv=8, head_dim=128):
    return AttnProblem("cuda", (9, 0), torch.bfloat16, nheads_q, nheads_kv, head_dim, head_dim, 1.0)


@pytest.mark.parametrize("num_tiles", [0, 1, 32, 64, 1000])
@pytest.mark.parametrize("nheads_kv", [1, 2, 3, 5, 6, 8, 64])
def test_sections_of_the_backward_divide_the_heads_and_fill_the_gpu(nheads_kv, num_tiles):
    heads = backward_heads_per_section(problem(nheads_kv, nheads_kv), num_tiles, num_sms=132)
    assert nheads_kv % heads == 0
    assert heads == nheads_kv or num_tiles * heads >= 132


@pytest.mark.parametrize(("num_tiles", "heads"), [(32, 8), (64, 8), (128, 4), (256, 2), (512, 1)])
def test_sections_are_small_on_long_sequences(num_tiles, heads):
    assert backward_heads_per_section(problem(64, 8), num_tiles, num_sms=132) == heads


@pytest.mark.parametrize(
    ("num_tiles", "shares"), [(512, 132), (256, 66), (128, 33), (64, 11), (16, 11)]
)
def test_shares_of_a_section(num_tiles, shares):
    # 8 heads at a time are all: then only tiles of more than 1.5 shares are divided.
    assert backward_shares(problem(64, 8), num_tiles, num_sms=132) == shares


@pytest.mark.parametrize("head_dim", BACKWARD_HEAD_DIMS)
def test_the_backward_walks_its_own_tiles(head_dim):
    tiles = plan_tiles(problem(head_dim=head_dim))
    config = backward_config(problem(head_dim=head_dim))
    assert (tiles.k_tile_rows, tiles.k_block_cols) == (config.tile_rows, config.block_cols)


def test_unknown_kernel():
    with pytest.raises(ValueError, match="`kernel` must be"):
        plan_tiles(problem(), "numpy")
