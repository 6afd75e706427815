"""The choice of a degree: by hand where the answer is plain, by exhaustion elsewhere."""

from dataclasses import replace

import pytest
import torch

from magi_compile.dtensor.comm_plan import StageLoads
from magi_compile.dtensor.cost import CostModel
from magi_compile.dtensor.stages import TIE, backward_seconds, choose_degree, forward_seconds


def loads(area, local_area, rows, cp_size=2):
    return StageLoads(*(torch.full((cp_size,), x) for x in (area, local_area, rows, rows)))


def cost(per_area=1.0, per_row=1.0, stage=0.0, latency=0.0):
    return CostModel(per_area, per_row, stage, stage, latency)


def test_one_stage_is_cast_then_compute():
    assert forward_seconds(loads(100, 20, 30), 0, cost()) == 30 + 100
    assert backward_seconds(loads(100, 20, 30), 0, cost()) == 30 + 250 + 30


def test_local_compute_hides_the_cast():
    assert forward_seconds(loads(100, 40, 30), 1, cost()) == 100
    assert forward_seconds(loads(100, 20, 30), 1, cost()) == 30 + 80


def test_two_stages_hide_what_one_exposes():
    # The first half arrives at 15 and the second at 30, while 20 + 40 are being computed.
    assert forward_seconds(loads(100, 20, 30), 2, cost()) == 100


def test_the_last_reduce_is_exposed():
    assert backward_seconds(loads(100, 20, 30), 1, cost()) == 50 + 200 + 30
    assert backward_seconds(loads(100, 20, 30), 2, cost()) == 50 + 200 + 15


def test_the_slowest_rank_counts():
    uneven = StageLoads(*(torch.tensor(x) for x in ([100, 10], [100, 10], [0, 50], [50, 0])))
    assert forward_seconds(uneven, 1, cost()) == 100


@pytest.mark.parametrize("backward", [False, True])
def test_a_dear_stage_is_not_worth_it(backward):
    assert choose_degree(loads(100, 20, 1), cost(stage=10), backward=backward) == 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 100, 1000])
@pytest.mark.parametrize("stage", [0.0, 1.0, 10.0])
def test_the_fastest_degree_wins(rows, stage, backward):
    model, load = cost(stage=stage, latency=1.0), loads(400, 50, rows)
    seconds = backward_seconds if backward else forward_seconds
    chosen = choose_degree(load, model, backward=backward)
    times = [seconds(load, degree, model) for degree in range(5)]
    assert times[chosen] <= min(times) * (1 + TIE) < min([*times[:chosen], torch.inf])


def test_directions_differ():
    model, load = cost(stage=5.0), loads(1000, 200, 260)
    assert choose_degree(load, model) == 2
    assert choose_degree(load, model, backward=True) == 4


def test_few_keys_make_backward_stages_slow():
    few, many = loads(1000, 800, 10), loads(1000, 800, 1000)
    waves = replace(cost(), backward_wave_rows=5.0)
    # Half a wave beyond what is free: the remote 500 take 30 % longer.
    assert backward_seconds(few, 1, waves) == 2000 + 500 * 1.3 + 10
    assert backward_seconds(few, 0, waves) == backward_seconds(few, 0, cost())
    assert backward_seconds(many, 1, waves) == backward_seconds(many, 1, cost())
    assert choose_degree(few, cost(), backward=True) > 0
    assert choose_degree(few, waves, backward=True) == 0


def test_nothing_moves():
    assert choose_degree(loads(100, 100, 0), cost()) == 1
