"""Plans of calls: of the slices as they are when the call runs, whatever was written where."""

import pytest
import torch

from magi_compile import AttnSlices, flex_flash_attention
from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.kernels.plan import Plan, PlanTiles
from magi_compile.kernels.reference import ReferenceKernel, exact_backward, exact_forward
from magi_compile.ops import library
from magi_compile.plan.stairs import NUM_LANES
from magi_compile.plan.tiles import Walk

TOTAL = 64


@pytest.fixture(autouse=True)
def fresh():
    """Nothing is kept from another test."""
    library._by_content.clear()
    torch._dynamo.reset()


@pytest.fixture
def planned(monkeypatch):
    """What was planned."""
    found = []
    plan = CpuKernel.plan

    def record(self, slices, problem):
        found.append(slices.q_ranges.tolist())
        return plan(self, slices, problem)

    monkeypatch.setattr(CpuKernel, "plan", record)
    return found


def inputs():
    torch.manual_seed(0)
    return [torch.randn(TOTAL, 2, 16, requires_grad=True) for _ in range(3)]


def check(out, lse, q, k, v, slices):
    exact = exact_forward(q, k, v, slices, 0.25)
    torch.testing.assert_close(out.double(), exact.out, atol=1e-5, rtol=1e-5)
    dout = torch.randn(out.shape)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    dlse = torch.zeros(exact.lse.shape)
    expected = exact_backward(Grads(dout, dlse), Saved(q, k, v, *exact), slices, 0.25)
    for grad, expect in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), expect, atol=2e-5, rtol=2e-5)


def full(ranges):
    return AttnSlices.from_lists(ranges, [(0, TOTAL)], [0], TOTAL, TOTAL)


def test_a_plan_is_kept_until_somebody_writes_to_the_slices(planned):
    q, k, v = inputs()
    slices = full([(10, 60)])
    for _ in range(2):
        check(*flex_flash_attention(q, k, v, slices)[:2], q, k, v, slices)
    slices.q_ranges.copy_(torch.tensor([[5, 20]]))
    check(*flex_flash_attention(q, k, v, slices)[:2], q, k, v, slices)
    assert planned == [[[10, 60]], [[5, 20]]]


def test_slices_that_go_leave_nothing_behind():
    q, k, v = inputs()
    before = len(library._plans)
    slices = full([(10, 60)])
    flex_flash_attention(q, k, v, slices)
    assert len(library._plans) == before + 1
    del slices
    assert len(library._plans) == before


def test_slices_of_inference_mode_that_are_written_to():
    """Nobody counts how often."""
    q, k, v = inputs()
    with torch.inference_mode():
        slices = full([(10, 60)])
        for ranges in ([(10, 60)], [(5, 20)]):
            slices.q_ranges.copy_(torch.tensor(ranges))
            out = flex_flash_attention(q, k, v, slices).out
            expected = exact_forward(q, k, v, full(ranges), 0.25).out
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_plan_made_in_inference_mode_serves_training():
    q, k, v = inputs()
    slices = full([(10, 60)])
    with torch.inference_mode():
        flex_flash_attention(q, k, v, slices)
    check(*flex_flash_attention(q, k, v, slices)[:2], q, k, v, slices)


def test_the_backward_walks_the_plan_of_its_forward(planned):
    q, k, v = inputs()
    out = flex_flash_attention(q, k, v, full([(10, 60)])).out
    library._by_content.clear()
    torch.autograd.grad(out.sum(), (q, k, v))
    assert len(planned) == 1


def test_equal_slices_of_two_objects_share_a_plan(planned):
    q, k, v = inputs()
    for _ in range(2):
        flex_flash_attention(q, k, v, full([(10, 60)]))
    assert len(planned) == 1


def test_what_is_kept_by_content_is_bounded():
    q, k, v = inputs()
    for end in range(1, library._MOST_BY_CONTENT + 10):
        flex_flash_attention(q, k, v, full([(0, end)]))
    assert len(library._by_content) == library._MOST_BY_CONTENT


def two_calls(q, k, v, q_ranges, k_ranges, mask_types):
    """The second call's ranges follow from the first one's output, so that memory of the first may be theirs."""
    first = q_ranges + 1
    slices = AttnSlices(first, k_ranges, mask_types, TOTAL, TOTAL)
    one = flex_flash_attention(q, k, v, slices, kernel="cpu").out
    second = first // 2 + (one.detach().sum() * 0).int()
    slices = AttnSlices(second, k_ranges, mask_types, TOTAL, TOTAL)
    two = flex_flash_attention(q, k, v, slices, kernel="cpu").out
    return one, two


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "magi"])
def test_two_calls_of_one_graph(backend):
    q, k, v = inputs()
    compiled = torch.compile(two_calls, backend=backend, fullgraph=True)
    k_ranges, mask_types = torch.tensor([[0, TOTAL]]), torch.tensor([0])
    for begin, end in ((9, 59), (19, 39)):
        q_ranges = torch.tensor([[begin, end]])
        lists = [x.int() for x in (q_ranges, k_ranges, mask_types)]
        outs = compiled(q, k, v, *lists)
        dout, dlse = torch.randn(q.shape), torch.zeros(2, TOTAL)
        grads = torch.autograd.grad(outs[0] + outs[1], (q, k, v), dout)
        sums = [torch.zeros(q.shape).double() for _ in grads]
        for ranges, out in zip((q_ranges + 1, (q_ranges + 1) // 2), outs, strict=True):
            slices = full(ranges.tolist())
            exact = exact_forward(q, k, v, slices, 0.25)
            torch.testing.assert_close(out.double(), exact.out, atol=1e-5, rtol=1e-5)
            found = exact_backward(Grads(dout, dlse), Saved(q, k, v, *exact), slices, 0.25)
            sums = [x + y for x, y in zip(sums, found, strict=True)]
        for grad, expected in zip(grads, sums, strict=True):
            torch.testing.assert_close(grad.double(), expected, atol=3e-5, rtol=3e-5)


@torch.no_grad()
def test_two_calls_where_inductor_writes_one_table_over_the_other():
    q, k, v = inputs()
    k_ranges, mask_types = torch.tensor([[0, TOTAL]]).int(), torch.tensor([0]).int()
    compiled = torch.compile(two_calls, fullgraph=True)
    outs = compiled(q, k, v, torch.tensor([[9, 59]]).int(), k_ranges, mask_types)
    for ranges, out in zip(([(10, 60)], [(5, 30)]), outs, strict=True):
        expected = exact_forward(q, k, v, full(ranges), 0.25).out
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_plan_is_a_value_of_the_graph():
    """Of kernels whose plans can be; the CPU's is found in each call."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    q, k, v = inputs()
    slices = full([(10, 60)])
    torch.compile(flex_flash_attention, backend=keep, fullgraph=True)(q, k, v, slices)
    targets = [node.target for node in graphs[0].graph.nodes]
    assert torch.ops.magi.plan in targets
    assert torch.ops.magi.plan(*slices.lists, TOTAL, TOTAL, q.dtype, 2, 2, 16, 16, 0.0, "cpu") == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_kernel_whose_plans_are_values_of_the_graph(dynamic, monkeypatch):
    """The plan that comes is that of the slices beside it, forward and backward, and says its tile sizes."""
    sizes = PlanTiles(192, 112, 128, 64)
    forward, backward = ReferenceKernel.forward, ReferenceKernel.backward

    def plan(self, slices, problem):
        walk = Walk(*(slices.q_ranges.new_zeros(0, *row) for row in ((4,), (12,), (NUM_LANES, 2))))
        return Plan(sizes, walk, walk, slices.q_ranges.flatten() + 1)

    def check_plan(slices, plan):
        plan.walks(sizes)
        assert torch.equal(plan.splits, slices.q_ranges.flatten() + 1)

    def checked_forward(self, q, k, v, slices, plan, problem, **options):
        check_plan(slices, plan)
        return forward(self, q, k, v, slices, Plan(), problem, **options)

    def checked_backward(self, grads, saved, slices, plan, problem, **options):
        check_plan(slices, plan)
        return backward(self, grads, saved, slices, Plan(), problem, **options)

    for name, function in (("forward", checked_forward), ("backward", checked_backward)):
        monkeypatch.setattr(ReferenceKernel, name, function)
    monkeypatch.setattr(ReferenceKernel, "plan", plan)
    monkeypatch.setattr(ReferenceKernel, "plans_in_graph", True)

    def attend(q, k, v, q_ranges):
        outs = []
        for ranges in (q_ranges, q_ranges // 2):
            zeros = torch.zeros_like(ranges[:, 0])
            slices = AttnSlices(ranges, q_ranges, zeros, q.shape[0], k.shape[0])
            outs.append(flex_flash_attention(q, k, v, slices, kernel="reference").out)
        return outs[0] + outs[1]

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for total in (TOTAL, TOTAL + 16):
        q, k, v = (torch.randn(total, 2, 16, requires_grad=True) for _ in range(3))
        ranges = torch.tensor([[10, 60]]).int()
        found = []
        for function in (compiled, attend):
            out = function(q, k, v, ranges)
            found.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
        torch.testing.assert_close(*found)
