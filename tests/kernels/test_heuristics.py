"""Tile sizes are pure functions of the problem."""

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import (
    HOPPER_HEAD_DIMS,
    backward_config,
    backward_passes,
    backward_sections,
    forward_config,
    map_passes,
    plan_tiles,
    table_gradients_config,
)
from magi_compile.kernels.plan import BlockMap
from magi_compile.masks.bits import BLOCK


def problem(nheads_q=8, nheads_kv=8, head_dim=128):
    return AttnProblem("cuda", (9, 0), torch.bfloat16, nheads_q, nheads_kv, head_dim, head_dim, 1.0)


@pytest.mark.parametrize("num_tiles", [0, 1, 32, 64, 96, 100, 128, 1000])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("nheads_kv", [1, 2, 3, 5, 6, 8, 64])
def test_sections_of_the_backward(nheads_kv, group, num_tiles):
    """Where heads are not few, as few as fill the SMs."""
    heads = backward_sections(problem(group * nheads_kv, nheads_kv), num_tiles, num_sms=132)
    assert nheads_kv % heads == 0
    if num_tiles * nheads_kv < 3 * 132:
        assert heads == nheads_kv
        return

    def fills(heads):
        return num_tiles * heads >= (3 if group == 1 else 0.85) * 132

    assert fills(heads)
    assert not any(fills(n) for n in range(1, heads) if nheads_kv % n == 0)


@pytest.mark.parametrize(
    ("num_tiles", "grouped", "single"),
    [
        *[(32, 8, 8), (49, 8, 8)],  # less than three waves in all
        *[(64, 2, 8), (128, 1, 4), (256, 1, 2), (512, 1, 1)],  # 8K, 16K, 32K and 64K keys
        *[(60, 2, 8), (55, 4, 8)],  # 0.91 waves will do, not 0.83
    ],
)
def test_sections_keep_the_sms_busy(num_tiles, grouped, single):
    assert backward_sections(problem(64, 8), num_tiles, num_sms=132) == grouped
    assert backward_sections(problem(8, 8), num_tiles, num_sms=132) == single


@pytest.mark.parametrize("num_tiles", [1, 64, 2048])
@pytest.mark.parametrize("heads", [(8, 8), (64, 8), (64, 64)])
def test_sections_of_a_block_map_have_one_head(heads, num_tiles):
    """Few tiles too: items of the next head fill the SMs. Every pass over tiles has its number in 16 bits."""
    listed = replace(problem(*heads), block_map=BlockMap(1, 1, 128, 128))
    assert backward_sections(listed, num_tiles, num_sms=132) == 1
    passes = map_passes(listed, total_q=2**22, l2_bytes=50 * 2**20)
    assert passes * listed.nheads_kv < 2**15


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
    passes = backward_passes(problem(*heads), num_tiles, sections, num_sms=132, l2_bytes=60 * 2**20)
    assert passes.most_heads == most_heads


@pytest.mark.parametrize(
    ("l2_bytes", "cached"), [(50 * 2**20, 24 * 2**20), (60 * 2**20, 48 * 2**20)]
)
@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_blocks_of_queries_that_stay_in_the_cache(head_dim, l2_bytes, cached):
    """Of q and dout in 16 bits, and sums of dq in fp32: 24 MiB on an H100 and 48 on an H200."""
    of_dim = problem(64, 8, head_dim)
    sections = backward_sections(of_dim, 128, 132)
    passes = backward_passes(of_dim, 128, sections, 132, l2_bytes)
    block_bytes = backward_config(of_dim).block_cols * head_dim * (2 + 2 + 4)
    assert passes.cached_blocks * block_bytes <= cached < (passes.cached_blocks + 1) * block_bytes


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_the_backward_walks_its_own_tiles(head_dim):
    tiles = plan_tiles(problem(head_dim=head_dim))
    config = backward_config(problem(head_dim=head_dim))
    assert (tiles.k_tile_rows, tiles.k_block_cols) == (config.tile_rows, config.block_cols)


@pytest.mark.parametrize("has_bits", [False, True])
@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_all_kernels_of_a_score_program_walk_one_plan(head_dim, has_bits):
    """Whatever the program does to the score, which a plan does not know."""
    scored = replace(problem(head_dim=head_dim), has_score=True, has_bits=has_bits)
    tiles = plan_tiles(scored)
    of_tables = table_gradients_config(scored)
    assert (tiles.q_tile_rows, tiles.q_block_cols) == (of_tables.tile_rows, of_tables.block_cols)
    for keeps_slopes in (False, True):
        config = backward_config(scored, keeps_slopes=keeps_slopes)
        assert (tiles.k_tile_rows, tiles.k_block_cols) == (config.tile_rows, config.block_cols)


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_blocks_of_keys_lie_in_bit_blocks(head_dim):
    config = forward_config(replace(problem(head_dim=head_dim), has_bits=True))
    assert config.tile_rows == BLOCK
    assert BLOCK % config.block_cols == 0


def test_unknown_kernel():
    with pytest.raises(ValueError, match="`kernel` must be"):
        plan_tiles(problem(), "numpy")
