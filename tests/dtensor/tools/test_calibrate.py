"""Calibration agrees on all ranks and measures something."""

import math

import pytest
import torch

from magi_compile.dtensor.tools.calibrate import calibrate


def run_calibrate(group):
    shape = {"nheads_q": 4, "nheads_kv": 2, "head_dim": 32, "seqlen": 256}
    return calibrate(group, "cpu", torch.float32, repeats=2, **shape)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_agree(ranks_of, size):
    models = ranks_of(size).run(run_calibrate)
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
