"""Functions of a program on grids give what they give for each pair alone, in the same dtype."""

import pytest
import torch

from magi_compile.score.evaluate import Tile, on_grid
from magi_compile.score.read import trace_score_program

CPU = torch.device("cpu")


def grid(heads=2, rows=3, keys=4):
    return {
        "score": torch.randn(heads, rows, keys),
        "b": torch.zeros(1, rows, 1, dtype=torch.int32),
        "h": torch.arange(heads, dtype=torch.int32)[:, None, None],
        "q": torch.arange(rows, dtype=torch.int32)[None, :, None],
        "kv": torch.arange(keys, dtype=torch.int32)[None, None],
    }


@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 1)])
def test_shapes(sizes):
    values = grid(*sizes)
    assert on_grid(lambda score, h, kv: score * h + kv, values).shape == sizes
    assert on_grid(lambda q: q + 1, values).shape == (1, sizes[1], 1)
    assert on_grid(lambda: 3, values).shape == (1, 1, 1)


def test_dtypes_are_those_of_numbers():
    """An int64 tensor of no dimensions beside an int32 index: together int64, as for each pair alone."""
    values = {**grid(), "l0_t0": torch.tensor(2**40)}
    result = on_grid(lambda q, l0_t0: q + l0_t0, values)
    assert result.dtype == torch.int64
    assert result.flatten().tolist() == [2**40, 2**40 + 1, 2**40 + 2]


def tile(score_mod, visible=None, heads=2):
    program, tables = trace_score_program(score_mod, CPU)
    return Tile(program, [x.detach() for x in tables], grid(heads), visible)


def test_gradients_of_look_ups_add_up_in_the_accumulator():
    """4096 times 1 in bf16 would stay at 256."""
    table = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    found = tile(lambda score, b, h, q, kv: score + table[h])
    total = torch.zeros(2)
    (look,) = found.program.looks
    for _ in range(512):
        found.add_gradient(look, found.run(look.derivative, g=torch.ones(2, 3, 4)), total)
    assert total.tolist() == [512 * 12] * 2


def test_gradients_of_equal_places_add_up():
    table = torch.zeros(4, requires_grad=True)
    found = tile(lambda score, b, h, q, kv: score + table[(q + kv) % 4 - 4])
    total = torch.zeros(4)
    (look,) = found.program.looks
    found.add_gradient(look, torch.ones(2, 3, 4), total)
    assert total.tolist() == [6.0] * 4


def test_out_of_bounds_where_it_is_hidden_and_where_not():
    table = torch.arange(3.0)

    def score_mod(score, b, h, q, kv):
        return score * 0 + table[kv]

    visible = torch.ones(3, 4, dtype=torch.bool)
    visible[:, 3] = False
    assert tile(score_mod, visible).run("score")[0, 0, :3].tolist() == [0, 1, 2]
    visible[1, 3] = True
    with pytest.raises(
        IndexError, match="index 3 is out of bounds for dimension 0 of t0 with size 3"
    ):
        tile(score_mod, visible)
