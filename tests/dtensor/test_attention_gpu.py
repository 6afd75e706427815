"""Attention across GPUs over NCCL, with every collective: against the oracle, compiled, and again and again."""

from dataclasses import replace

import pytest
import torch

from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.call.backward import backward
from magi_compile.dtensor.call.execution import Execution, Prepared, unpack
from magi_compile.dtensor.call.forward import forward
from magi_compile.dtensor.planning.dispatch import STRATEGIES
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, PlanTensors, plan_rank
from magi_compile.dtensor.sequence.make_plan import plan, plan_ahead
from magi_compile.dtensor.transport.collectives import COLLECTIVES, HIERARCHICAL, select
from magi_compile.kernels import select as kernels
from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.select import problem_of
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.across_ranks import OPTIONS, run_on_ranks
from tests.dtensor.support.masks import SQUARE, documents
from tests.support.cases import HeadShape
from tests.support.deterministic import deterministic_algorithms
from tests.support.poison import poisoned_empty
from tests.support.waits import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("collective", [x for x in COLLECTIVES if x != HIERARCHICAL]),
    pytest.mark.parametrize("size", [1, 2, 4, 8], ids=lambda size: f"{size}gpus"),
]

GQA = HeadShape(8, 2, 128, 128)
OPTIONS = replace(OPTIONS, degree=2, backward_degree=1)
# What moves takes so long that a forward pass begins early.
MERGED = replace(
    OPTIONS, degree=0, backward_degree=0, cost=replace(OPTIONS.cost, latency_seconds=1.0)
)


@pytest.fixture
def run(gpu_ranks_of, size, collective):
    """Runs a function on all ranks with this test's collective, unless that cannot serve here."""
    ranks = gpu_ranks_of(size)
    for refusals in ranks.run(refusals_of, collective):
        if refusals:
            pytest.skip(refusals)

    def run(function, *arguments, **options):
        return ranks.run(call, function, arguments, {"collective": collective, **options})

    return run


def refusals_of(group, collective):
    try:
        select(collective, group, torch.device("cuda", torch.cuda.current_device()))
    except NotImplementedError as error:
        return str(error)
    return ""


def call(group, function, arguments, options):
    return function(group, *arguments, **options)


def check(run, case, options=OPTIONS, **more):
    run(run_on_ranks, case, options, torch.bfloat16, device="cuda", **more)


@pytest.mark.parametrize("name", SQUARE)
def test_every_mask(run, name):
    check(run, replace(SQUARE[name], heads=GQA))


@pytest.mark.parametrize("name", SQUARE)
def test_every_mask_merged(run, name):
    check(run, replace(SQUARE[name], heads=GQA), MERGED)


@pytest.mark.parametrize("degree", [0, 1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_degree(run, strategy, degree):
    options = ContextParallelOptions(
        strategy=strategy, chunk_size=32, degree=degree, backward_degree=4 - degree
    )
    check(run, replace(SQUARE["varlen_causal"], heads=GQA), options)


@pytest.mark.parametrize(
    "heads",
    [
        HeadShape(2, 2, 128, 128),
        HeadShape(8, 1, 128, 128),
        HeadShape(4, 2, 64, 64),
        HeadShape(4, 2, 192, 192),
        HeadShape(4, 2, 256, 256),
    ],
    ids=lambda h: h.id,
)
def test_heads(run, heads):
    check(run, replace(SQUARE["varlen_full"], heads=heads))


@pytest.mark.parametrize("options", [OPTIONS, MERGED], ids=["stages", "merged"])
@pytest.mark.parametrize(
    "heads", [HeadShape(4, 2, 80, 80), HeadShape(4, 2, 192, 128)], ids=lambda h: h.id
)
def test_other_head_dims(run, heads, options):
    """Keys arrive while a forward is under way, and their rows are narrower than the kernel's."""
    check(run, replace(SQUARE["varlen_causal"], heads=heads), options)


@pytest.mark.parametrize("name", ["varlen_causal", "causal_129x129"])
def test_compiled(run, name):
    check(run, replace(SQUARE[name], heads=GQA), is_compiled=True)


@pytest.mark.parametrize("options", [MERGED, replace(MERGED, degree=2)], ids=["merged", "stages"])
@pytest.mark.parametrize("name", ["varlen_causal", "holes"])
def test_max_scores(run, name, options):
    check(run, replace(SQUARE[name], heads=GQA), options, return_max_scores=True)


def inputs_of(rows, device, seed, head_dim=128):
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(rows, heads, head_dim) for heads in (8, 2, 2)]
    return [torch.randn(x, device=device, generator=generator).bfloat16() for x in shapes]


def run_late_ranks(group, collective):
    """Every rank is late in its turn, by more than the others need for all they can do without it."""
    device, rank, size = torch.device("cuda", group.rank()), group.rank(), group.size()
    slices = documents([700, 1, 90, 1257, 2048], causal=True)
    results = {}
    for early in (True, False):
        plan = plan_rank(slices, size, rank, replace(MERGED, early=early))
        tensors = plan.tensors(device)
        for step in range(20):
            q, k, v = inputs_of(plan.dispatch.seqlen_local, device, 100 * rank + step)
            if early and step % size == rank:
                torch.cuda._sleep(3_000_000)
            results[early, step] = context_parallel_attention(
                q, k, v, tensors, group, collective=collective
            )
    for step in range(20):
        (out, lse, _), (expected, expected_lse, _) = results[True, step], results[False, step]
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.01)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_late_ranks(run):
    run(run_late_ranks)


def run_without_waits(group, collective):
    """A forward and a backward of a plan that was used before."""
    device, rank, size = torch.device("cuda", group.rank()), group.rank(), group.size()
    plan = plan_rank(documents([700, 1, 90, 1257, 2048], causal=True), size, rank, OPTIONS)
    tensors = plan.tensors(device)
    rows = inputs_of(plan.dispatch.seqlen_local, device, rank)
    q, k, v = (x.requires_grad_() for x in rows)

    def step():
        context_parallel_attention(
            q, k, v, tensors, group, collective=collective
        ).out.sum().backward()

    step()
    step()
    with no_waits():
        step()


def test_no_waits(run):
    run(run_without_waits)


def run_new_plans(group, collective):
    """A step plans a mask of its own, here or on a thread, and the host goes on while the GPU runs the step before."""
    device, rank = torch.device("cuda", group.rank()), group.rank()

    def step(made):
        assert made.positions.device == made.data.device == device
        assert torch.equal(made.positions.cpu(), made.placement.positions(rank))
        with no_waits():
            run(made)

    def run(made):
        q, k, v = (x.requires_grad_() for x in inputs_of(made.seqlen_local, device, rank))
        tensors = PlanTensors(made.meta, made.data)
        context_parallel_attention(
            q, k, v, tensors, group, collective=collective
        ).out.sum().backward()

    masks = [documents([700 + 64 * i, 1, 90, 1257, 2048 - 64 * i], causal=True) for i in range(6)]
    # Rows of all ranks, so that windows need not grow later: then the host does wait.
    run(plan(AttnSlices.full(4096), group, options=OPTIONS))
    run(plan(masks[0], group, options=OPTIONS))
    with no_waits():
        made = [plan(mask, group, options=OPTIONS) for mask in masks[1:4]]
    ahead = [plan_ahead(mask, group, options=OPTIONS) for mask in masks[4:]]
    for future in ahead:
        future.exception()  # it is there
    with no_waits():
        made += [future.result() for future in ahead]
    for one in made:
        step(one)


def test_new_plans(run):
    run(run_new_plans)


def run_in_a_graph(group, collective, deterministic):
    """A replay and a call outside of it; bit by bit, where nothing is to depend on when remote keys come. The largest
    scores never do: nothing adds up in them."""
    with deterministic_algorithms(deterministic):
        in_a_graph(group, collective, deterministic)
        in_a_graph(group, collective, deterministic, return_max_scores=True)


def in_a_graph(group, collective, deterministic, **options):
    device, rank, size = torch.device("cuda", group.rank()), group.rank(), group.size()
    plan = plan_rank(documents([700, 1, 90, 1257], causal=True), size, rank, MERGED)
    tensors = plan.tensors(device)
    q, k, v = inputs_of(plan.dispatch.seqlen_local, device, rank)

    def step():
        found = context_parallel_attention(
            q, k, v, tensors, group, collective=collective, **options
        )
        return [x for x in found if x is not None]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for seed in range(6):
        for x, new in zip((q, k, v), inputs_of(len(q), device, 10 * seed + rank), strict=True):
            x.copy_(new)
        if seed % size == rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        out, lse, *others = (x.clone() for x in recorded)
        expected, expected_lse, *expected_others = step()
        assert all(map(torch.equal, others, expected_others))
        if deterministic:
            assert torch.equal(out, expected)
            assert torch.equal(lse, expected_lse)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.01)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph(run, deterministic):
    run(run_in_a_graph, deterministic=deterministic)


def run_in_expandable_segments(group, collective):
    """NCCL cannot exchange what a graph has there; what does not go through it can."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        if collective == "all_to_all" and group.size() > 1:
            with pytest.raises(RuntimeError, match="set NCCL_GRAPH_REGISTER=0"):
                in_a_graph(group, collective, deterministic=False)
        else:
            in_a_graph(group, collective, deterministic=False)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_graph_in_expandable_segments(run):
    run(run_in_expandable_segments)


def backward_of(group, collective, options, slices, head_dim=128):
    """`run(inputs, kernel)`, the gradients of this rank's rows, and how to make inputs."""
    device, rank = torch.device("cuda", group.rank()), group.rank()
    plan = plan_rank(slices, group.size(), rank, options)
    ready = unpack(*plan.tensors(device))
    q, k, v = inputs_of(ready.rows, device, rank, head_dim)
    problem = problem_of(q, k, v, head_dim**-0.5, 0.0)
    moving = select(collective, group, device)
    prepared = Prepared(ready, kernels.select(problem).kernel, problem, moving)
    execution = Execution(prepared, group, group)

    def inputs(seed):
        q, k, v = inputs_of(ready.rows, device, 100 * rank + seed, head_dim)
        dout, _, _ = inputs_of(ready.rows, device, 100 * rank + seed + 50, head_dim)
        results = forward(q, k, v, execution)
        return Grads(dout, None), Saved(q, k, v, *results)

    def run(tensors, kernel=prepared.kernel):
        other = Prepared(ready, kernel, problem, moving)
        return backward(*tensors, execution._replace(prepared=other))

    return run, inputs, prepared.kernel


class InOneCall:
    """A kernel without phases."""

    def __init__(self, kernel):
        for name in ("name", "plans_in_graph", "plan", "plan_key", "forward", "backward"):
            setattr(self, name, getattr(kernel, name))


def assert_close(grads, expected):
    """Gradients of one backward and of another, whose parts are rounded elsewhere."""
    for grad, right in zip(grads, expected, strict=True):
        atol = 2.0**-7 * float(right.abs().max())
        torch.testing.assert_close(grad, right, rtol=2.0**-6, atol=atol)


def run_phases(group, options, head_dim, collective):
    """Late ranks, whose gradients are to be those of a kernel that waits for keys before it begins. Memory that nothing
    was written to is no number."""
    slices, rank, size = documents([700, 1, 90, 1257, 2048], True), group.rank(), group.size()
    run, inputs, kernel = backward_of(group, collective, options, slices, head_dim)
    given = [inputs(step) for step in range(12)]
    found = []
    for step, tensors in enumerate(given):
        if step % size == rank:
            torch.cuda._sleep(3_000_000)
        with poisoned_empty():
            found.append(run(tensors))
    for tensors, (dq, dk, dv) in zip(given, found, strict=True):
        expected = run(tensors, InOneCall(kernel))
        assert torch.equal(dk, expected.dk)
        assert torch.equal(dv, expected.dv)
        # With a stage of its own for what is remote, dq is a sum of rounded parts, which may be small beside them.
        if options.backward_degree:
            assert_close([dq], [expected.dq])
        else:
            torch.testing.assert_close(dq, expected.dq)


@pytest.mark.parametrize(
    ("degree", "head_dim"),
    [(0, 128), (1, 128), (2, 128), (0, 192), (1, 192), (0, 256), (1, 256)],
)
def test_phases(run, degree, head_dim):
    run(run_phases, replace(OPTIONS, backward_degree=degree, early=False), head_dim)


def run_backward_in_a_graph(group, collective):
    """Replays and calls outside of the graph in turns:
    gradients are those of a kernel that waits for keys before it begins."""
    rank, size = group.rank(), group.size()
    run, inputs, kernel = backward_of(
        group, collective, MERGED, documents([700, 1, 90, 1257], True)
    )
    tensors = inputs(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run(tensors)
    for seed in range(6):
        for old, drawn in zip(tensors, inputs(seed), strict=True):
            for x, new in zip(old, drawn, strict=True):  # Saved or Grads
                if x is not None:
                    x.copy_(new)
        if seed % size == rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        replayed = [x.clone() for x in recorded]
        outside, expected = run(tensors), run(tensors, InOneCall(kernel))
        for dq, dk, dv in (replayed, outside):
            torch.testing.assert_close(dq, expected.dq)
            assert torch.equal(dk, expected.dk)
            assert torch.equal(dv, expected.dv)


def test_backward_graph(run):
    run(run_backward_in_a_graph)


def run_again_and_again(group, steps, collective, options, deterministic):
    """The largest differences between gradients and outputs of equal inputs, for alternating masks."""
    with deterministic_algorithms(deterministic):
        return again_and_again(group, steps, collective, options)


def again_and_again(group, steps, collective, options):
    device = torch.device("cuda", group.rank())
    masks = [documents([700, 1, 90, 1257], causal=True), AttnSlices.full(2048)]
    first, differences = [], []
    for step in range(steps):
        plan = plan_rank(masks[step % 2], group.size(), group.rank(), options)
        generator = torch.Generator(device).manual_seed(group.rank())
        q, k, v, dout = (
            torch.randn(plan.dispatch.seqlen_local, heads, 128, device=device, generator=generator)
            .bfloat16()
            .requires_grad_()
            for heads in (8, 2, 2, 8)
        )
        out, lse, _ = context_parallel_attention(
            q, k, v, plan.tensors(device), group, collective=collective
        )
        results = [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]
        if step < 2:
            first.append(results)
            continue
        # Left on the device until the end, so that steps follow each other as they do in training.
        pairs = zip(results, first[step % 2], strict=True)
        differences.append(torch.stack([(x.float() - y.float()).abs().max() for x, y in pairs]))
    return torch.stack(differences).amax(0).tolist()


@pytest.mark.parametrize(
    ("options", "deterministic"),
    [(OPTIONS, False), (MERGED, False), (MERGED, True)],
    ids=["stages", "merged", "deterministic"],
)
def test_200_steps(run, options, deterministic):
    """Equal inputs give equal bits, but for dq, whose sum has no fixed order; and where a forward begins early, but for
    tiles that are merged of two parts or not. Without these two, in all."""
    for out, lse, dq, dk, dv in run(
        run_again_and_again, 200, options=options, deterministic=deterministic
    ):
        assert dq == 0 if deterministic else dq < 0.05
        if options is OPTIONS or deterministic:
            assert out == lse == dk == dv == 0
        else:
            assert max(out, dk, dv) < 0.05
            assert lse < 1e-4
