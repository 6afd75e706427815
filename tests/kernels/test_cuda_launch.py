"""What the host hands to the forward kernel, with a driver that does nothing: no GPU needed. And threads that come to
the driver without a context."""

import struct
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.cuda import early, launch, parts
from magi_compile.kernels.cuda import forward as module
from magi_compile.kernels.cuda.launch import (
    TENSOR_MAP_BYTES,
    check_far_keys,
    is_tma_layout,
    load_function,
)
from magi_compile.kernels.cuda.planner import planner_variant
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan.stairs import NUM_LANES
from magi_compile.plan.tiles import build_tile_plan
from tests.kernels import idle_driver
from tests.kernels.part_plan import PartPlan


class Pointers(NamedTuple):
    """The addresses in ForwardParams, and what is among them."""

    out: int
    lse: int
    wide_out: int
    wide_lse: int
    prior_out: int
    prior_lse: int
    wide_rows: int
    runs: int
    edges: int
    part_shifts: int
    tiles: int
    ticket: int


NOTHING = Pointers(*[0] * 12)
PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 64, 64, 0.125)
PARAMS_BYTES, EARLY_PARAMS_BYTES = 960, 1088  # as csrc/sm90/fwd_shared.cuh asserts
TILES, RUNS = (torch.zeros(n, m, dtype=torch.int32) for n, m in ((60, 4), (90, 12)))
EDGES = torch.zeros(256, NUM_LANES, 2, dtype=torch.int32)


@pytest.fixture
def launches(monkeypatch):
    """The parameters of every launch; tensor maps begin with the address of their tensor."""
    found = idle_driver.install(
        monkeypatch,
        module,
        zero_word=lambda stream, device: torch.zeros(1, dtype=torch.int32),
    )
    module._route.cache_clear()
    yield found
    module._route.cache_clear()


def inputs():
    return [torch.randn(256, heads, 64).to(torch.bfloat16) for heads in (4, 2, 2)]


def pointers(params):
    """The addresses in the tensor maps, and those behind them."""
    maps = [struct.unpack_from("<Q", params, i * TENSOR_MAP_BYTES)[0] for i in range(6)]
    return maps, Pointers(*struct.unpack_from("<12Q", params, 6 * TENSOR_MAP_BYTES))


def test_every_launch_has_the_addresses_of_its_tensors(launches):
    calls = []
    for _ in range(3):
        q, k, v = inputs()
        calls.append((q, k, v, *module.forward(q, k, v, TILES, RUNS, EDGES, PROBLEM)))
    assert module._route.cache_info().misses == 1
    for params, (q, k, v, out, lse) in zip(launches, calls, strict=True):
        assert len(params) == PARAMS_BYTES
        maps, found = pointers(params)
        at_q, at_k, at_v, at_out = (x.data_ptr() for x in (q, k, v, out))
        assert maps == [at_q, at_k, 0, at_v, 0, at_out]
        assert found._replace(ticket=0) == NOTHING._replace(
            out=at_out,
            lse=lse.data_ptr(),
            runs=RUNS.data_ptr(),
            edges=EDGES.data_ptr(),
            tiles=TILES.data_ptr(),
        )
        assert found.ticket  # 60 tiles of 4 heads are more than 132


def test_a_prior_and_a_wide_output(launches):
    q, k, v = inputs()
    prior = ForwardOutput(torch.zeros(256, 4, 64), torch.zeros(4, 256))
    out, _ = module.forward(
        *(q, k, v, TILES[:1], RUNS, EDGES, PROBLEM), prior=prior, out_dtype=torch.float32
    )
    (params,) = launches
    maps, found = pointers(params)
    assert maps[5] == 0  # a wide output does not leave through a tensor map
    assert (found.out, found.lse, found.ticket) == (0, 0, 0)
    assert (found.wide_out, out.dtype) == (out.data_ptr(), torch.float32)
    assert (found.prior_out, found.prior_lse) == tuple(x.data_ptr() for x in prior)
    assert found.wide_rows == 256
    assert len(params) == PARAMS_BYTES


def test_two_launches_of_one_output(launches, monkeypatch):
    order = []
    here, beside = (
        SimpleNamespace(wait_stream=lambda other, name=name: order.append((name, "waits")))
        for name in ("here", "beside")
    )
    monkeypatch.setattr(early, "_stream", lambda device: beside)
    monkeypatch.setattr(early, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(order.append(stream)))
    q, k, v = inputs()
    far = [torch.randn(100, 2, 64).to(torch.bfloat16) for _ in range(2)]
    slices = AttnSlices.from_lists([(0, 256), (100, 256)], [(0, 256), (257, 357)], [1, 0])
    walk = build_tile_plan(slices, **plan_tiles(PROBLEM)._asdict())
    plan = early.split_plan(
        walk.q_tiles, walk.q_runs, walk.q_edges, plan_tiles(PROBLEM), far_begin=257
    )
    arrive = lambda: order.append(len(launches))  # noqa: E731
    out, lse = early.forward_early(q, k, v, far, arrive, plan, PROBLEM)
    assert order == [("beside", "waits"), beside, 1, ("here", "waits")]
    for params in launches:
        maps, found = pointers(params)
        assert maps == [x.data_ptr() for x in (q, k, far[0], v, far[1], out)]
        assert (found.out, found.lse) == (out.data_ptr(), lse.data_ptr())
        assert (found.tiles, found.runs) == (plan.far_tiles.data_ptr(), plan.runs.data_ptr())
        assert 0 not in (found.wide_out, found.wide_lse)
        assert (found.wide_out, found.wide_lse) == (found.prior_out, found.prior_lse)
        assert found.wide_rows == plan.num_part_rows
        assert (found.part_shifts, found.ticket) == (0, 0)
        assert len(params) == EARLY_PARAMS_BYTES
    first, second = launches
    assert first[:-4] == second[:-4]
    assert [struct.unpack("<i", x[-4:]) for x in launches] == [(2**31 - 1,), (0,)]
    assert lse.untyped_storage().nbytes() == lse.nbytes  # kept for the backward, without the parts'


def test_far_keys_that_tma_can_not_read_are_refused():
    x = torch.zeros(101, 2, 72, dtype=torch.bfloat16)
    check_far_keys(x[..., :64], x[1:, :, 8:])
    with pytest.raises(ValueError, match=r"`k` .* got 2 beyond one"):
        check_far_keys(x[..., 1:65], x)
    with pytest.raises(ValueError, match=r"`v` .* strides of \(65, 65, 1\)"):
        check_far_keys(x, torch.zeros(101, 1, 65, dtype=torch.bfloat16)[..., :64])


def test_a_walk_in_parts_and_what_merges_them(launches, monkeypatch):
    for name in ("launch", "load_function", "num_sms", "current_stream"):
        monkeypatch.setattr(parts, name, getattr(module, name))
    parts._route.cache_clear()
    q, k, v = inputs()
    size = parts.PartLayout.of(num_tiles=3, num_runs=5, num_parts=6).size
    words = torch.zeros(size, dtype=torch.int32)
    plan = PartPlan.of(TILES[:3], RUNS[:5], words)
    assert plan.num_parts == 6
    out, lse = parts.forward_in_parts(q, k, v, TILES[:3], RUNS[:5], EDGES, words, PROBLEM)
    walked, merged = launches
    maps, found = pointers(walked)
    assert maps[5] == found.out == out.data_ptr()
    assert (found.tiles, found.runs) == (plan.tiles.data_ptr(), plan.runs.data_ptr())
    assert (found.lse, found.part_shifts) == (lse.data_ptr(), plan.shifts.data_ptr())
    addresses = parts._MERGE_ADDRESSES.unpack_from(merged)
    scalars = parts._MERGE_SCALARS.unpack_from(merged, parts._MERGE_ADDRESSES.size)
    assert addresses == (
        *(found.wide_out, found.wide_lse, found.out, found.lse),
        plan.cuts.data_ptr(),
    )
    num_cuts, tile_rows, nheads, total_q, part_rows = scalars
    assert (num_cuts, tile_rows, nheads, total_q) == (3, 192, 4, 256)
    assert part_rows == found.wide_rows == 6 * 192
    assert found.wide_lse - found.wide_out == 4 * part_rows * 4 * 64
    assert (found.prior_out, found.prior_lse) == (0, 0)
    assert lse.untyped_storage().nbytes() == lse.nbytes  # kept for the backward, without the parts'


@pytest.mark.parametrize("what", ["address", "stride", "inner"])
def test_what_tma_can_not_read_is_copied(what, launches):
    q, k, v = inputs()
    k = {
        "address": torch.empty(k.numel() + 1).to(k)[1:].view(k.shape),
        "stride": torch.empty(256, 2, 65).to(k)[..., :64],
        "inner": torch.empty(256, 64, 2).to(k).transpose(1, 2),
    }[what]
    module.forward(q, k, v, TILES, RUNS, EDGES, PROBLEM)
    (params,) = launches
    assert pointers(params)[0][1] != k.data_ptr()


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
out = flex_flash_attention(*leaves, slices, kernel="cuda").out
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
def test_what_a_launch_says_of_its_grid(may_start_early, cluster):
    ids = launch.driver.CUlaunchAttributeID
    config = launch._config(6, 1, 512, 1024, 0, may_start_early, cluster)
    found = {attribute.id: attribute.value for attribute in config.attrs}
    early = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dimension = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert config.numAttrs == len(found) == may_start_early + (cluster > 1)
    assert (early in found) == may_start_early
    assert (dimension in found) == (cluster > 1)
    if cluster > 1:
        dims = found[dimension].clusterDim
        assert (dims.x, dims.y, dims.z) == (cluster, 1, 1)
