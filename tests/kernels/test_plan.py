"""A plan says which tile sizes it was made for, and no kernel walks one that was made for others."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.overlap import SavedQueries
from magi_compile.kernels.plan import Plan, pack, unpack
from magi_compile.kernels.sm90 import HopperKernel
from magi_compile.kernels.triton import TritonKernel
from magi_compile.masks.slices import AttnSlices
from magi_compile.ops import library
from tests.kernels.support import idle_driver

ROWS, HEADS = 300, (4, 2, 64, 64)
PLAIN = AttnProblem("cuda", (9, 0), torch.bfloat16, *HEADS, 0.125)
CAPPED = replace(PLAIN, softcap=5.0)  # its backward walks in other blocks


@pytest.fixture
def slices():
    return AttnSlices.from_lists([(0, 200), (100, 300)], [(0, 200), (201, 300)], [1, 0], ROWS, ROWS)


def inputs():
    q, out, dout = (torch.zeros(ROWS, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.zeros(ROWS, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    return Grads(dout, None), Saved(q, k, v, out, torch.zeros(4, ROWS))


def refused():
    made_for, walked = (tuple(plan_tiles(x)) for x in (PLAIN, CAPPED))
    sizes = ", ".join(f"{k}={v}" for k, v in plan_tiles(CAPPED)._asdict().items())
    assert made_for != walked
    message = rf"`plan` must be made for PlanTiles\({sizes}\), got one for PlanTiles\(q_tile_rows={made_for[0]}, "
    return pytest.raises(ValueError, match=message)


def tensors_of(plan):
    return [*(plan.q_walk or ()), *(plan.k_walk or ()), plan.splits, plan.pieces, *plan.others]


def test_plans_are_packed(slices):
    """In memory where kernels read 16 bytes at a time, and beside it a shape, which is there on the host."""
    of_pieces = CpuKernel().plan(slices, replace(PLAIN, device_type="cpu"))
    of_walks = HopperKernel().plan(slices, PLAIN)
    others = Plan(others=(torch.ones(3), torch.zeros(2, dtype=torch.int64)))
    for plan in (of_walks, of_pieces, others):
        packed = pack(plan)
        assert packed[1].numel() == 0
        found = unpack(packed)
        assert found.tiles == plan.tiles
        for x, y in zip(tensors_of(found), tensors_of(plan), strict=True):
            assert torch.equal(x, y) if y is not None else x is None
            assert x is None or not x.numel() or plan is others or x.data_ptr() % 16 == 0
        assert all(x is y for x, y in zip(pack(found), packed, strict=True))
    assert len(pack(of_walks)) == len(pack(of_pieces)) == 2
    assert pack(Plan()) == []
    assert unpack([]) == Plan()


def test_forward_and_backward(slices):
    kernel, (grads, saved) = HopperKernel(), inputs()
    plan = kernel.plan(slices, PLAIN)
    q, k, v, out, lse = saved
    with refused():
        kernel.forward(q, k, v, slices, plan, CAPPED)
    with refused():
        kernel.backward(grads, saved, slices, plan, CAPPED)
    with refused():
        kernel.phased_backward(grads, SavedQueries(q, out, lse), slices, plan, CAPPED)


def test_a_forward_that_begins_early(slices, monkeypatch):
    idle_driver.install(monkeypatch)
    kernel, (_, saved) = HopperKernel(), inputs()
    q, k, v, *_ = saved
    plan = kernel.early_plan(slices, PLAIN, 201)
    with refused():
        kernel.early_forward(q, (k, v), (k, v), plan, CAPPED)


def test_triton(slices):
    kernel, (grads, saved) = TritonKernel(), inputs()
    wide = replace(PLAIN, head_dim=256, head_dim_v=256)
    plan = kernel.plan(slices, replace(PLAIN, device_type="cpu"))
    with pytest.raises(ValueError, match="`plan` must be made for PlanTiles"):
        kernel.forward(*saved[:3], slices, plan, wide)
    with pytest.raises(ValueError, match="`plan` must be made for PlanTiles"):
        kernel.backward(grads, saved, slices, plan, wide)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_op_plans_for_the_soft_cap(softcap, slices, monkeypatch):
    """For a GPU, with slices on a CPU."""
    problem = replace(PLAIN, softcap=softcap)

    def problem_on(device, dtype, heads, softmax_scale, softcap):
        return AttnProblem("cuda", (9, 0), dtype, *heads, softmax_scale, softcap)

    monkeypatch.setattr(library, "problem_on", problem_on)
    library.chosen_for.cache_clear()
    plan = torch.ops.magi.plan(*slices.lists, ROWS, ROWS, torch.bfloat16, *HEADS, softcap, "hopper")
    library.chosen_for.cache_clear()
    assert unpack(plan).tiles == plan_tiles(problem)
