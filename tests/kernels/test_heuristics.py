"""Tile sizes are pure functions of the problem."""

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import (
    CUDA_HEAD_DIMS,
    backward_config,
    backward_passes,
    backward_sections,
    forward_config,
    plan_tiles,
    table_gradients_config,
)
from magi_compile.masks.bits import BLOCK


def problem(nheads_q=8, nheads_kv=8, head_dim=128):
    return AttnProblem("cuda", (9, 0), torch.bfloat16, nheads_q, nheads_kv, head_dim, head_dim, 1.0)


@pytest.mark.parametrize("num_tiles", [0, 1, 32, 64, 96, 100, 128, 1000])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("nheads_kv", [1, 2, 3, 5, 6, 8, 64])
def test_sections_of_the_backward(nheads_kv, group, num_tiles):
    """Where heads are not few, a section fills the SMs, and so many at once do about once, about twice, or more often."""
    of_group = problem(group * nheads_kv, nheads_kv)
    heads, at_once = backward_sections(of_group, num_tiles, num_sms=132)
    assert nheads_kv % (heads * at_once) == 0
    if num_tiles * nheads_kv < 3 * 132:
        assert (heads, at_once) == (nheads_kv, 1)
        return

    def fills(heads):
        return num_tiles * heads >= (3 if group == 1 else 0.85) * 132

    def is_enough(at_once):
        waves = num_tiles * heads * at_once / 132
        return waves <= 1.13 or waves >= 1.87

    assert fills(heads)
    assert is_enough(at_once)
    assert not any(fills(n) for n in range(1, heads) if nheads_kv % n == 0)
    assert not any(is_enough(n) for n in range(1, at_once) if nheads_kv % (heads * n) == 0)


@pytest.mark.parametrize(
    ("num_tiles", "grouped", "single"),
    [
        *[(32, (8, 1), 8), (49, (8, 1), 8)],  # less than three waves in all
        # 8K, 16K, 32K and 64K keys
        *[(64, (2, 1), 8), (128, (1, 1), 4), (256, (1, 1), 2), (512, (1, 1), 1)],
        *[(60, (2, 1), 8), (55, (4, 2), 8)],  # 0.91 waves will do, not 0.83 nor 1.67
        *[(96, (2, 2), 8), (100, (2, 2), 4), (200, (1, 2), 2)],  # 1.5 are neither one nor two
        *[(79, (2, 2), 8), (179, (1, 2), 4), (283, (1, 1), 2)],  # from two on it does not matter
    ],
)
def test_sections_at_once_are_of_whole_waves(num_tiles, grouped, single):
    assert backward_sections(problem(64, 8), num_tiles, num_sms=132) == grouped
    assert backward_sections(problem(8, 8), num_tiles, num_sms=132) == (single, 1)


@pytest.mark.parametrize(("num_tiles", "heads"), [(49, 8), (60, 2), (112, 2), (113, 1), (200, 1)])
def test_sections_of_two_lists_keep_the_sms_busy(num_tiles, heads):
    assert backward_sections(problem(64, 8), num_tiles, 132, num_lists=2) == (heads, 1)


@pytest.mark.parametrize(
    ("heads", "num_tiles", "most_heads"),
    [
        *[((64, 8), 64, 1), ((64, 8), 128, 1), ((64, 8), 512, 4), ((64, 8), 2048, 8)],
        *[((2, 1), 2048, 2), ((8, 1), 112, 0), ((8, 1), 113, 1), ((64, 64), 2048, 0)],
    ],
)
def test_a_pass_has_as_many_heads_as_tiles_keep_the_sms_busy_times(heads, num_tiles, most_heads):
    """None where heads have keys of their own, or tiles do not once."""
    sections = backward_sections(problem(*heads), num_tiles, num_sms=132)
    passes = backward_passes(problem(*heads), num_tiles, sections, num_sms=132)
    assert passes.most_heads == most_heads


@pytest.mark.parametrize("head_dim", CUDA_HEAD_DIMS)
def test_blocks_of_queries_that_stay_in_the_cache(head_dim):
    """48 MiB of q and dout in 16 bits, and sums of dq in fp32."""
    of_dim = problem(64, 8, head_dim)
    passes = backward_passes(of_dim, 128, backward_sections(of_dim, 128, 132), 132)
    block_bytes = backward_config(of_dim).block_cols * head_dim * (2 + 2 + 4)
    assert (
        passes.cached_blocks * block_bytes <= 48 * 2**20 < (passes.cached_blocks + 1) * block_bytes
    )


@pytest.mark.parametrize("head_dim", CUDA_HEAD_DIMS)
def test_the_backward_walks_its_own_tiles(head_dim):
    tiles = plan_tiles(problem(head_dim=head_dim))
    config = backward_config(problem(head_dim=head_dim))
    assert (tiles.k_tile_rows, tiles.k_block_cols) == (config.tile_rows, config.block_cols)


@pytest.mark.parametrize("has_bits", [False, True])
@pytest.mark.parametrize("head_dim", CUDA_HEAD_DIMS)
def test_all_kernels_of_a_score_program_walk_one_plan(head_dim, has_bits):
    """Whatever the program does to the score, which a plan does not know."""
    scored = replace(problem(head_dim=head_dim), has_score=True, has_bits=has_bits)
    tiles = plan_tiles(scored)
    of_tables = table_gradients_config(scored)
    assert (tiles.q_tile_rows, tiles.q_block_cols) == (of_tables.tile_rows, of_tables.block_cols)
    for keeps_slopes in (False, True):
        config = backward_config(scored, keeps_slopes=keeps_slopes)
        assert (tiles.k_tile_rows, tiles.k_block_cols) == (config.tile_rows, config.block_cols)


@pytest.mark.parametrize("head_dim", CUDA_HEAD_DIMS)
def test_blocks_of_keys_lie_in_bit_blocks(head_dim):
    config = forward_config(replace(problem(head_dim=head_dim), has_bits=True))
    assert config.tile_rows == BLOCK
    assert BLOCK % config.block_cols == 0


def test_unknown_kernel():
    with pytest.raises(ValueError, match="`kernel` must be"):
        plan_tiles(problem(), "numpy")
