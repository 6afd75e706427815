"""The choice of a degree: by hand where the answer is plain, by exhaustion elsewhere."""

from dataclasses import replace

import pytest
import torch

from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads
from magi_compile.dtensor.planning.cost import DEFAULT_COST, CostModel
from magi_compile.dtensor.planning.dispatch import dispatch
from magi_compile.dtensor.planning.rank_plan import plan_rank
from magi_compile.dtensor.planning.stages import (
    TIE,
    backward_seconds,
    choose_degree,
    early_seconds,
    forward_begins_early,
    forward_seconds,
)
from magi_compile.masks.library import MASKS as LIBRARY
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.masks import documents
from tests.support.packs import packs_of_corpus


def loads(area, local_area, rows, cp_size=2, query_rows=1):
    each = (torch.full((cp_size,), x) for x in (area, local_area, rows, rows))
    return StageLoads(*each, query_rows)


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
    uneven = StageLoads(*(torch.tensor(x) for x in ([100, 10], [100, 10], [0, 50], [50, 0])), 1)
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
    # Half of a wave of two idles, so the remote 500 take 25 % longer, and half of one of 200.
    assert backward_seconds(few, 1, waves) == 2000 + 500 * 1.25 + 10
    assert backward_seconds(few, 2, waves) == 2000 + 500 * 1.5 + 5
    assert backward_seconds(few, 0, waves) == backward_seconds(few, 0, cost())
    assert backward_seconds(many, 1, waves) == 2000 + 500 * 1.0025 + 1000
    assert choose_degree(few, cost(), backward=True) > 0
    assert choose_degree(few, waves, backward=True) == 0


def test_a_wave_of_wide_heads_is_half_as_many_keys():
    narrow, wide = (CostModel.of_heads(head_dim=n).backward_wave_rows for n in (128, 192))
    assert (narrow, wide) == (132 * 128 / 8, 132 * 64 / 8)


def test_nothing_moves():
    assert choose_degree(loads(100, 100, 0), cost()) == 1


@pytest.mark.parametrize("backward", [False, True])
def test_a_stage_costs_by_the_query_row(backward):
    few, many = (loads(100, 20, 30, query_rows=rows) for rows in (1, 100))
    assert choose_degree(few, cost(stage=1.0), backward=backward) > 0
    assert choose_degree(many, cost(stage=1.0), backward=backward) == 0


# Milliseconds of the slowest rank on 4 H200s over NCCL with 0, 1, 2 stages; 64:8 heads of 128.
FORWARD = {
    ("full", 8192): (13.35, 12.99, 13.83),
    ("causal", 8192): (7.12, 6.91, 8.00),
    ("document_full", 8192): (1.64, 1.95, 2.12),
    ("document_causal", 8192): (0.96, 1.14, 1.31),
    ("block_causal_document", 8192): (1.14, 1.38, 1.55),
    ("full", 16384): (54.62, 55.80, 57.40),
    ("causal", 16384): (27.23, 27.20, 30.36),
    ("document_full", 16384): (10.42, 12.67, 13.06),
    ("document_causal", 16384): (6.06, 6.69, 7.82),
}

# The same with 0 and 1, by later kernels: the mean over NCCL and by peers' reads, context_parallel_h200x4_2026-11-22.
BACKWARD = {
    ("full", 8192): (37.56, 38.11),
    ("causal", 8192): (18.92, 19.50),
    ("document_full", 8192): (4.45, 5.26),
    ("document_causal", 8192): (2.49, 3.19),
    ("block_causal_document", 8192): (3.06, 3.64),
    ("full", 16384): (146.6, 147.8),
    ("causal", 16384): (76.4, 75.5),
    ("document_full", 16384): (30.1, 35.6),
    ("document_causal", 16384): (15.78, 16.76),
    ("block_causal_document", 16384): (16.47, 18.25),
}

# What `calibrate` found there with 8192 and with 16384 rows of a rank.
CALIBRATED = [
    replace(
        DEFAULT_COST,
        seconds_per_area=area,
        seconds_per_row=1.17e-8,
        stage_seconds_per_row=2.5e-8,
        latency_seconds=latency,
        backward_area_factor=factor,
        backward_reduce_factor=1.69,
    )
    for area, factor, latency in ((4.05e-11, 3.32, 32e-6), (4.6e-11, 3.01, 49e-6))
]
CALIBRATED += [replace(DEFAULT_COST, backward_area_factor=3.0)]


def measured_loads(mask, tokens):
    (documents,) = packs_of_corpus(4 * tokens, 1, seed=42)
    slices = LIBRARY[mask](documents if "document" in mask else [4 * tokens]).slices
    return StageLoads.of(RankRows.of(dispatch(slices, 4)))


@pytest.mark.parametrize("seconds_per_area", [4.4e-11, DEFAULT_COST.seconds_per_area])
@pytest.mark.parametrize(("mask", "tokens"), FORWARD)
def test_forward_within_2_percent_of_the_fastest_measured(mask, tokens, seconds_per_area):
    rates = replace(DEFAULT_COST, seconds_per_area=seconds_per_area)
    times = FORWARD[mask, tokens]
    chosen = choose_degree(measured_loads(mask, tokens), rates, max_degree=2)
    assert times[chosen] <= 1.02 * min(times)


@pytest.mark.parametrize(("mask", "tokens"), BACKWARD)
def test_backward_within_3_percent_of_the_fastest_measured(mask, tokens):
    load, times = measured_loads(mask, tokens), BACKWARD[mask, tokens]
    for rates in CALIBRATED:
        for stage in (40e-9, 50e-9, 70e-9):  # whatever a measurement of small differences may give
            found = replace(rates, backward_stage_seconds_per_row=stage)
            chosen = choose_degree(load, found, backward=True, max_degree=1)
            assert times[chosen] <= 1.03 * min(times), (rates, found)


def loads_of(slices, cp_size):
    return StageLoads.of(RankRows.of(dispatch(slices, cp_size)))


@pytest.mark.parametrize(
    ("slices", "cp_size", "degree", "is_early"),
    [
        (documents([9000, 7000, 384], True), 2, 0, True),
        (AttnSlices.full(131072), 2, 0, False),
        (AttnSlices.full(131072), 8, 1, False),
    ],
    ids=["packed", "full", "full_8"],
)
def test_a_forward_begins_early_where_much_moves_for_what_is_computed(
    slices, cp_size, degree, is_early
):
    loads = loads_of(slices, cp_size)
    assert choose_degree(loads, DEFAULT_COST, early=True) == degree
    assert forward_begins_early(loads, DEFAULT_COST) == is_early
    assert plan_rank(slices, cp_size, 0).forward_is_early == is_early
    others = [forward_seconds(loads, degree, DEFAULT_COST) for degree in range(5)]
    if is_early:
        assert early_seconds(loads, DEFAULT_COST) < min(others)
    else:
        assert others[degree] <= min(others) * (1 + TIE)


def test_a_rank_without_local_keys_hides_nothing():
    each = (torch.full((2,), x) for x in (10**9, 0, 10**4, 10**4))
    loads = StageLoads(*each, 8192)
    assert not forward_begins_early(loads, DEFAULT_COST)
