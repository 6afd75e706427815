"""Tile sizes are pure functions of the problem."""

import pytest
import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import (
    CUDA_HEAD_DIMS,
    backward_config,
    backward_heads_per_section,
    plan_tiles,
)


def problem(nheads_q=8, nheads_kv=8, head_dim=128):
    return AttnProblem("cuda", (9, 0), torch.bfloat16, nheads_q, nheads_kv, head_dim, head_dim, 1.0)


@pytest.mark.parametrize("num_tiles", [0, 1, 32, 64, 96, 100, 128, 1000])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("nheads_kv", [1, 2, 3, 5, 6, 8, 64])
def test_sections_of_the_backward(nheads_kv, group, num_tiles):
    """They divide the heads, and where those are not few, fill the SMs: about once, about twice, or more often."""
    of_group = problem(group * nheads_kv, nheads_kv)
    heads = backward_heads_per_section(of_group, num_tiles, num_sms=132)
    assert nheads_kv % heads == 0
    if num_tiles * nheads_kv < 3 * 132:
        assert heads == nheads_kv
        return

    def is_enough(heads):
        waves = num_tiles * heads / 132
        if group == 1:
            return waves >= 3
        return num_tiles * heads >= 0.85 * 132 and (waves <= 1.13 or waves >= 1.87)

    assert is_enough(heads)
    assert not any(is_enough(n) for n in range(1, heads) if nheads_kv % n == 0)


@pytest.mark.parametrize(
    ("num_tiles", "grouped", "single"),
    [
        *[(32, 8, 8), (49, 8, 8)],  # less than three waves in all
        *[(64, 2, 8), (128, 1, 4), (256, 1, 2), (512, 1, 1)],  # 8K, 16K, 32K and 64K keys
        *[(60, 2, 8), (55, 8, 8)],  # 0.91 waves will do, not 0.83 nor 1.67
        *[(96, 4, 8), (100, 4, 4), (200, 2, 2)],  # 1.5 waves are neither one nor two
        *[(79, 4, 8), (179, 2, 4), (283, 1, 2)],  # from two on it does not matter
    ],
)
def test_sections_are_of_whole_waves(num_tiles, grouped, single):
    assert backward_heads_per_section(problem(64, 8), num_tiles, num_sms=132) == grouped
    assert backward_heads_per_section(problem(8, 8), num_tiles, num_sms=132) == single


@pytest.mark.parametrize(("num_tiles", "heads"), [(49, 8), (60, 2), (112, 2), (113, 1), (200, 1)])
def test_sections_of_two_lists_keep_the_sms_busy(num_tiles, heads):
    assert backward_heads_per_section(problem(64, 8), num_tiles, 132, num_lists=2) == heads


@pytest.mark.parametrize("head_dim", CUDA_HEAD_DIMS)
def test_the_backward_walks_its_own_tiles(head_dim):
    tiles = plan_tiles(problem(head_dim=head_dim))
    config = backward_config(problem(head_dim=head_dim))
    assert (tiles.k_tile_rows, tiles.k_block_cols) == (config.tile_rows, config.block_cols)


def test_unknown_kernel():
    with pytest.raises(ValueError, match="`kernel` must be"):
        plan_tiles(problem(), "numpy")
