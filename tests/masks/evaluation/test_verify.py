"""The points at which masks are looked at again."""

import torch

from magi_compile.masks.evaluation import verify
from magi_compile.masks.evaluation.bit_blocks import slices_with_bits
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.evaluation.verify import (
    check_bits,
    points_of_slices,
    random_points,
)
from magi_compile.masks.program.read import read_mask_mod
from magi_compile.masks.slices import AttnSlices

CPU = torch.device("cpu")


def test_points_are_inside():
    sizes = MaskSizes(1, 50, 70, Heads(2, 1))
    points = random_points(3000, sizes, CPU)
    for point, size in zip(points, (2, 50, 70), strict=True):
        assert set(point.tolist()) == set(range(size))


def test_points_of_slices_are_beside_their_edges():
    slices = AttnSlices.from_lists([(3, 9), (9, 20)], [(0, 8), (2, 30)], [1, 0], 20, 30)
    points = points_of_slices(1000, slices.lists, MaskSizes(1, 20, 30))
    assert {0, 1, 2, 7, 8, 29} <= set(points.kv.tolist())
    assert set(points.q.tolist()) == set(range(3, 20))


def test_other_points_every_time_and_the_numbers_of_the_program_are_its_own():
    state = torch.get_rng_state()
    first, second = (verify._random(1000, CPU) for _ in range(2))
    assert len(first.unique()) == 1000
    assert not torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())


def test_bits_are_looked_at_again():
    """Of every head; a block that is not as the mask_mod says is seen."""

    def mask_mod(b, h, q, kv):
        return (q + h >= kv) & ((q ^ kv) % 4 != b)

    program, sizes = read_mask_mod(mask_mod).program, MaskSizes(2, 200, 300, Heads(2, 2))
    slices = slices_with_bits(mask_mod, sizes, None, CPU)
    assert all(check.ok for check in check_bits(program, [], [], slices, sizes))
    slices.bits[slices.mask_types.max() - 4] ^= -1
    shows, hides = check_bits(program, [], [], slices, sizes)
    assert not shows.ok
    assert not hides.ok
    _, _, row, _ = shows.values
    assert int(row) >= 128
