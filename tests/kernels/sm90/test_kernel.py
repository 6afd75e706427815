"""What the Hopper kernel refuses, and why."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import HOPPER_HEAD_DIMS, forward_config, heads_per_section
from magi_compile.kernels.sm90.forward.launch import forward_variant

PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, 64, 8, 128, 128, 128**-0.5)


@pytest.fixture
def kernel():
    from magi_compile.kernels.sm90 import HopperKernel

    return HopperKernel()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_type": "cpu", "device_arch": None}, "CUDA device, got 'cpu'"),
        ({"device_arch": (8, 0)}, "compute capability 9.0, got (8, 0)"),
        ({"dtype": torch.float32}, "bfloat16 or float16, got torch.float32"),
        ({"head_dim_v": 100}, "multiples of 8 from 8 to 256, got 128 and 100"),
        ({"head_dim_v": 0}, "multiples of 8 from 8 to 256, got 128 and 0"),
        ({"head_dim": 264}, "multiples of 8 from 8 to 256, got 264 and 128"),
    ],
)
def test_refusals(kernel, change, reason):
    reasons = kernel.refusals(replace(PROBLEM, **change))
    assert any(reason in text for text in reasons), reasons


@pytest.mark.parametrize(
    ("head_dims", "runs_in"), [((192, 128), 192), ((80, 80), 96), ((8, 40), 64)]
)
def test_head_dimensions_in_between(kernel, head_dims, runs_in):
    problem = replace(PROBLEM, head_dim=head_dims[0], head_dim_v=head_dims[1])
    assert not kernel.refusals(problem)
    (note,) = kernel.notes(problem)
    assert f"run in tiles for {runs_in}," in note
    assert kernel.notes(PROBLEM) == []


def test_bits_in_one_pass(kernel):
    """It has bit blocks, but not in passes that overlap communication."""
    problem = replace(PROBLEM, has_bits=True)
    assert kernel.refusals(problem) == []
    for step in (
        lambda: kernel.early_plan(None, problem, 0),
        lambda: kernel.phased_backward(None, None, None, [], problem),
    ):
        with pytest.raises(
            NotImplementedError,
            match=r"bit-block masks cannot overlap communication, got `problem.has_bits`=True",
        ):
            step()


def test_a_variant_does_not_depend_on_heads_or_scale():
    other = replace(PROBLEM, nheads_q=4, nheads_kv=4, softmax_scale=1.0)
    config = forward_config(PROBLEM)
    assert forward_variant(PROBLEM, config) == forward_variant(other, config)


@pytest.mark.parametrize(("head_dim", "chooses"), [(64, "true"), (128, "false")])
def test_who_chooses_between_tensor_maps(head_dim, chooses):
    problem = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim)
    config = forward_config(problem)
    for is_early, expected in ((False, chooses), (True, "true")):
        defines = dict(forward_variant(problem, config, is_early=is_early).defines)
        assert defines["FFA_HAS_REMOTE_KEYS"] == expected
        assert defines["FFA_IS_EARLY"] == str(is_early).lower()


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
@pytest.mark.parametrize("seqlen_k", [0, 1000, 16384, 1 << 20])
@pytest.mark.parametrize("num_tiles", [0, 43, 5000])
@pytest.mark.parametrize(("nheads_q", "nheads_kv"), [(64, 8), (12, 12), (15, 5), (1, 1)])
def test_sections_are_whole_groups_that_divide_the_heads(
    head_dim, seqlen_k, num_tiles, nheads_q, nheads_kv
):
    problem = replace(PROBLEM, nheads_q=nheads_q, nheads_kv=nheads_kv)
    problem = replace(problem, head_dim=head_dim, head_dim_v=head_dim)
    heads = heads_per_section(problem, seqlen_k, num_tiles, num_sms=132)
    assert heads % problem.qhead_per_kvhead == 0
    assert nheads_q % heads == 0


@pytest.mark.parametrize(
    ("nheads_q", "nheads_kv", "seqlen_k", "num_tiles", "heads"),
    [
        *[(64, 8, 8192, 43, 64), (64, 8, 32768, 171, 16), (64, 8, 65536, 342, 8)],
        (64, 8, 1 << 20, 5462, 8),
        *[(64, 8, 65536, 43, 64), (64, 8, 131072, 86, 32)],  # of one rank among eight
        *[(64, 64, 8192, 43, 8), (64, 64, 65536, 43, 1), (64, 64, 1 << 20, 5462, 1)],
    ],
)
def test_sections_stay_in_the_cache_unless_they_are_short(
    nheads_q, nheads_kv, seqlen_k, num_tiles, heads
):
    problem = replace(PROBLEM, nheads_q=nheads_q, nheads_kv=nheads_kv, head_dim=128)
    assert heads_per_section(problem, seqlen_k, num_tiles, num_sms=132) == heads
