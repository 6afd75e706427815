"""What the host hands to the forward kernel, with a driver that does nothing: no GPU needed. And threads that come to
the driver without a context."""

import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.sm90.forward import launch as module
from magi_compile.kernels.sm90.forward import overlap as early
from magi_compile.kernels.sm90.forward import split_kv
from magi_compile.kernels.sm90.params import EARLY_FORWARD, FORWARD, MERGE
from magi_compile.kernels.sm90.planner.tile_plan import planner_variant
from magi_compile.kernels.sm90.runtime import driver as launch
from magi_compile.kernels.sm90.runtime.driver import (
    check_remote_keys,
    is_tma_layout,
    load_function,
)
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan.stairs import NUM_LANES
from magi_compile.plan.tiles import Walk, build_tile_plan
from tests.kernels.support import idle_driver
from tests.kernels.support.idle_driver import fields
from tests.kernels.support.split_walk import SplitWalk

PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 64, 64, 0.125)
TILES, RUNS = (torch.zeros(n, m, dtype=torch.int32) for n, m in ((60, 4), (90, 12)))
EDGES = torch.zeros(256, NUM_LANES, 2, dtype=torch.int32)
WALK = Walk(TILES, RUNS, EDGES)


@pytest.fixture
def launches(monkeypatch):
    """The parameters of every launch; tensor maps begin with the address of their tensor."""
    yield idle_driver.install(monkeypatch)
    idle_driver.clear_caches()


def inputs():
    return [torch.randn(256, heads, 64).to(torch.bfloat16) for heads in (4, 2, 2)]


MAPS = ("q", "k[0]", "k[1]", "v[0]", "v[1]", "out")
OTHERS = ("wide_out", "wide_lse", "prior_out", "prior_lse", "wide_rows", "split_shifts")


def addresses(found, *names):
    return [found[name] for name in names]


def test_every_launch_has_the_addresses_of_its_tensors(launches):
    calls = []
    for _ in range(3):
        q, k, v = inputs()
        calls.append((q, k, v, *module.forward((q, k, v), WALK, PROBLEM)))
    assert module._call.cache_info().misses == 1
    for params, (q, k, v, out, lse) in zip(launches, calls, strict=True):
        found = fields(FORWARD, params)
        at_q, at_k, at_v, at_out = (x.data_ptr() for x in (q, k, v, out))
        assert addresses(found, *MAPS) == [at_q, at_k, 0, at_v, 0, at_out]
        assert addresses(found, "out_rows", "lse") == [at_out, lse.data_ptr()]
        assert addresses(found, "runs", "edges", "schedule.tiles") == [
            x.data_ptr() for x in (RUNS, EDGES, TILES)
        ]
        assert not any(addresses(found, *OTHERS))
        assert found["schedule.ticket"]  # 60 tiles of 4 heads are more than 132


def test_an_output_has_the_strides_of_q(launches):
    q, k, v = inputs()
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    out, _ = module.forward((q, k, v), WALK, PROBLEM)
    assert out.stride() == q.stride() == (64, 256 * 64, 1)
    (params,) = launches
    found = fields(FORWARD, params)
    assert addresses(found, "out_row_stride", "out_head_stride") == [64, 256 * 64]


def test_a_prior_and_a_wide_output(launches):
    q, k, v = inputs()
    prior = ForwardOutput(torch.zeros(256, 4, 64), torch.zeros(4, 256))
    out, _ = module.forward(
        *((q, k, v), Walk(TILES[:1], RUNS, EDGES), PROBLEM), prior=prior, out_dtype=torch.float32
    )
    (params,) = launches
    found = fields(FORWARD, params)
    assert found["out"] == 0  # a wide output does not leave through a tensor map
    assert addresses(found, "out_rows", "lse", "schedule.ticket") == [0, 0, 0]
    assert (found["wide_out"], out.dtype) == (out.data_ptr(), torch.float32)
    assert addresses(found, "prior_out", "prior_lse") == [x.data_ptr() for x in prior]
    assert found["wide_rows"] == 256


def test_two_launches_of_one_output(launches, monkeypatch):
    order = []
    here, beside = (
        SimpleNamespace(wait_stream=lambda other, name=name: order.append((name, "waits")))
        for name in ("here", "beside")
    )
    monkeypatch.setattr(early, "_stream", lambda device: beside)
    monkeypatch.setattr(_compat, "current_stream", lambda device: here)
    monkeypatch.setattr(_compat, "on_stream", lambda stream: nullcontext(order.append(stream)))
    q, k, v = inputs()
    remote = [torch.randn(100, 2, 64).to(torch.bfloat16) for _ in range(2)]
    slices = AttnSlices.from_lists([(0, 256), (100, 256)], [(0, 256), (257, 357)], [1, 0])
    walk = build_tile_plan(slices, **plan_tiles(PROBLEM)._asdict())
    plan = early.early_plan(walk.q_walk, plan_tiles(PROBLEM), remote_begin=257)
    launches.clear()
    steps = early.EarlyForward(q, (k, v), remote, plan, PROBLEM)
    steps.begin()
    with steps.beside():
        order.append(len(launches))
        steps.main()
    out, lse = steps.finish()
    assert order == [("beside", "waits"), beside, 1, ("here", "waits")]
    for params in launches:
        found = fields(EARLY_FORWARD, params)
        tensors = (q, k, remote[0], v, remote[1], out)
        assert addresses(found, *MAPS) == [x.data_ptr() for x in tensors]
        assert addresses(found, "out_rows", "lse") == [out.data_ptr(), lse.data_ptr()]
        lists = ("remote_tiles", "local_tiles", "split_tiles")
        for i, name in enumerate(lists):
            assert found[f"lists[{i}].tiles"] == getattr(plan, name).data_ptr()
        assert found["schedule.tiles"] == plan.remote_tiles.data_ptr()
        assert found["runs"] == plan.runs.data_ptr()
        assert found["remote_tiles"] == plan.remote_splits.data_ptr()
        assert 0 not in addresses(found, "wide_out", "wide_lse")
        assert addresses(found, "wide_out", "wide_lse") == addresses(
            found, "prior_out", "prior_lse"
        )
        assert found["wide_rows"] == plan.split_tiles.shape[0] * plan.tiles.q_tile_rows
        assert addresses(found, "split_shifts", "schedule.ticket") == [0, 0]
        counters = [found[f"lists[{i}].ticket"] for i in range(3)]
        counters += addresses(found, "num_begun_splits", "num_stored")
        assert counters == [counters[0] + 4 * i for i in range(5)]
    first, second = (fields(EARLY_FORWARD, params) for params in launches)
    assert (first.pop("first_behind"), second.pop("first_behind")) == (2**31 - 1, 0)
    assert first == second
    # Kept for the backward, without the splits'.
    assert lse.untyped_storage().nbytes() == lse.nbytes


def test_remote_keys_that_tma_can_not_read_are_refused():
    x = torch.zeros(101, 2, 72, dtype=torch.bfloat16)
    check_remote_keys(x[..., :64], x[1:, :, 8:])
    with pytest.raises(ValueError, match=r"`k` .* got an address of 16 n \+ 2 "):
        check_remote_keys(x[..., 1:65], x)
    with pytest.raises(ValueError, match=r"`v` .* strides \(65, 65, 1\)"):
        check_remote_keys(x, torch.zeros(101, 1, 65, dtype=torch.bfloat16)[..., :64])


def test_a_walk_in_splits_and_what_merges_them(launches):
    q, k, v = inputs()
    size = split_kv.SplitLayout.of(num_tiles=3, num_runs=5, num_splits=6).size
    words = torch.zeros(size, dtype=torch.int32)
    plan = SplitWalk.of(TILES[:3], RUNS[:5], words)
    assert plan.num_splits == 6
    out, lse = split_kv.forward_in_splits(
        (q, k, v), Walk(TILES[:3], RUNS[:5], EDGES), words, PROBLEM
    )
    found, merged = (
        fields(layout, params) for layout, params in zip((FORWARD, MERGE), launches, strict=True)
    )
    assert found["out"] == found["out_rows"] == out.data_ptr()
    assert addresses(found, "schedule.tiles", "runs", "lse", "split_shifts") == [
        x.data_ptr() for x in (plan.tiles, plan.runs, lse, plan.shifts)
    ]
    assert addresses(merged, "split_out", "split_lse", "out", "lse") == addresses(
        found, "wide_out", "wide_lse", "out_rows", "lse"
    )
    assert merged["cuts"] == plan.cuts.data_ptr()
    scalars = addresses(merged, "num_cuts", "tile_rows", "num_heads", "total_q")
    assert scalars == [3, 192, 4, 256]
    split_rows = merged["split_rows"]
    assert split_rows == found["wide_rows"] == 6 * 192
    assert found["wide_lse"] - found["wide_out"] == 4 * split_rows * 4 * 64
    assert addresses(found, "prior_out", "prior_lse") == [0, 0]
    strides = ("out_row_stride", "out_head_stride")
    assert addresses(merged, *strides) == addresses(found, *strides) == [256, 64]
    # Kept for the backward, without the splits'.
    assert lse.untyped_storage().nbytes() == lse.nbytes


@pytest.mark.parametrize("what", ["address", "stride", "inner"])
def test_what_tma_can_not_read_is_copied(what, launches):
    q, k, v = inputs()
    k = {
        "address": torch.empty(k.numel() + 1).to(k)[1:].view(k.shape),
        "stride": torch.empty(256, 2, 65).to(k)[..., :64],
        "inner": torch.empty(256, 64, 2).to(k).transpose(1, 2),
    }[what]
    module.forward((q, k, v), WALK, PROBLEM)
    (params,) = launches
    assert fields(FORWARD, params)["k[0]"] != k.data_ptr()


def test_a_stride_of_a_dimension_of_size_one_does_not_matter():
    assert is_tma_layout(torch.Size((1, 3, 64)), (1, 64, 1), torch.bfloat16)
    assert not is_tma_layout(torch.Size((2, 3, 64)), (1, 64, 1), torch.bfloat16)
    assert not is_tma_layout(torch.Size((2, 3, 64)), (0, 64, 1), torch.bfloat16)


@pytest.mark.gpu
def test_a_thread_without_a_context_loads_kernels():
    loaded = []
    load = load_function.__wrapped__  # past the cache
    thread = threading.Thread(target=lambda: loaded.append(load(planner_variant(), 0)))
    thread.start()
    thread.join()
    assert loaded


FIRST_BACKWARD = """
import torch
from magi_compile import AttnSlices, flex_flash_attention

q, k, v = (torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
leaves = [x.requires_grad_() for x in (q, k, v)]
slices = AttnSlices.from_lists([(0, 300)], [(0, 300)], [1], device="cuda")
out = flex_flash_attention(*leaves, slices, kernel="hopper").out
grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
assert all(bool(x.isfinite().all()) for x in grads)
"""


@pytest.mark.gpu
def test_the_first_call_in_a_thread_of_autograd_is_our_backward():
    """In a process of its own: nothing else has given that thread a context."""
    done = subprocess.run([sys.executable, "-c", FIRST_BACKWARD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("may_start_early", [False, True])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("is_cooperative", [False, True])
def test_what_a_launch_says_of_its_grid(may_start_early, cluster, is_cooperative):
    options = launch.LaunchOptions(1024, may_start_early, cluster, is_cooperative)
    ids = launch.driver.CUlaunchAttributeID
    config = launch._config(6, 1, 512, 0, options)
    found = {attribute.id: attribute.value for attribute in config.attrs}
    early = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dimension = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert config.numAttrs == len(found) == may_start_early + (cluster > 1) + is_cooperative
    assert (early in found) == may_start_early
    assert (dimension in found) == (cluster > 1)
    if is_cooperative:
        assert found[ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE].cooperative == 1
    if cluster > 1:
        dims = found[dimension].clusterDim
        assert (dims.x, dims.y, dims.z) == (cluster, 1, 1)
