"""Calibration agrees on all ranks and measures something."""

import math

import pytest
import torch

from magi_compile.dtensor.planning.cost import DEFAULT_COST
from magi_compile.dtensor.tools.calibrate import calibrate


def run_calibrate(group, hosts):
    shape = {"nheads_q": 4, "nheads_kv": 2, "head_dim": 32, "seqlen": 256}
    return calibrate(group, "cpu", torch.float32, repeats=2, hosts=hosts, **shape)


@pytest.mark.parametrize(
    ("size", "hosts"), [(1, None), (2, None), (2, (0, 1)), (3, (0, 0, 1)), (4, 2)]
)
def test_ranks_agree(ranks_of, size, hosts):
    models = ranks_of(size).run(run_calibrate, hosts)
    assert len(set(models)) == 1
    (model,) = set(models)
    assert 1e-12 < model.seconds_per_area < 1e-3
    assert 0 < model.seconds_per_row < 1e-2
    assert 0 < model.latency_seconds < 1
    assert 0 <= model.stage_seconds_per_row < 1e-3
    assert 0 <= model.backward_stage_seconds_per_row < 1e-3
    assert 0.1 < model.backward_area_factor < 100
    assert math.isfinite(model.backward_reduce_factor)
    assert not model.starts_early
    assert model.other_host_factor > 0
    assert math.isfinite(
        model.other_host_factor
    )  # a ratio of two times, of which a busy CPU may measure nothing
    if hosts is None:
        assert model.other_host_factor == DEFAULT_COST.other_host_factor
