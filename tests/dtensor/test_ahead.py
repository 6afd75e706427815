"""Across ranks, the kernels that a run loads were begun before: by the fakes of a graph and the plans that were made,
whichever came last. On CPUs that think they are Hopper GPUs."""

from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import create_block_mask

from magi_compile import _compat
from magi_compile.dtensor import plan as plan_sequence
from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.call import ahead as of_ranks
from magi_compile.dtensor.call import execution
from magi_compile.dtensor.call.asked import Asked
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, PlanTensors, plan_rank
from magi_compile.kernels.sm90 import kernel as hopper
from magi_compile.kernels.sm90.runtime import ahead
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support import hopper_on_cpus
from tests.dtensor.support.masks import documents
from tests.support.deterministic import deterministic_algorithms

EARLY = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=1)
STAGES = replace(EARLY, degree=1, early=False)
ONE_CALL = replace(EARLY, backward_degree=0, early=False)
SCORE = (
    "score + t0[h];; def l0_t0_0(h):;;     return h;; def score(score, l0_t0):;;     return score + l0_t0;; "
    "def d_score(g):;;     return g;; def d_l0_t0(g):;;     return g"
)
SEQLEN = 2048


def packs():
    return documents([700, 1, 90, 1257], causal=True)


def short_documents():
    return documents([16] * 128, causal=True)  # more slices than tiles: rows have edges


def scattered(b, h, q, kv):
    return (q * 7 + kv * 3) % 5 > 1


def of_each_head():
    return create_block_mask(
        lambda b, h, q, kv: kv + 64 * h <= q, None, 4, SEQLEN, SEQLEN, device="cpu"
    )


CASES = {
    "early": {},
    "stages": {"options": STAGES},
    "one call": {"options": ONE_CALL},
    "short documents": {"mask": short_documents, "options": STAGES},
    "short documents early": {"mask": short_documents},
    "few heads": {"mask": lambda: AttnSlices.causal(SEQLEN * 16), "options": ONE_CALL},
    "capped": {"softcap": 3.0},
    "negative scale": {"scale": -0.125},
    "largest scores": {"largest": True},
    "bits": {"mask": lambda: scattered, "options": STAGES},
    "masks of heads": {"mask": of_each_head, "options": STAGES},
    "deterministic": {"deterministic": True, "options": STAGES},
    "score": {"score": SCORE},
    "score of a batch": {"score": SCORE, "batch": 2, "wanted": [0], "options": STAGES},
}


def run_ops(
    like, plan, group, *, scale=0.125, softcap=0.0, score="", wanted=(), largest=False, batch=1
):
    """A forward and a backward; `like(tensor)` gives each tensor."""
    rows = plan.seqlen_local
    q, k, v = (like(torch.zeros(rows, batch * n, 64).bfloat16()) for n in (4, 2, 2))
    names = (hopper_on_cpus.KERNEL, "emulated", group.group_name, group.group_name)
    options = (like(plan.meta), like(plan.data), scale, softcap, *names, batch)
    of_score = ([like(torch.zeros(4))], [], score, [-1, -1]) if score else ()
    more = of_score or (None, None, "", None)
    out, lse, _ = torch.ops.magi.cp_ffa_fwd(q, k, v, *options, *more, None, largest)
    torch.ops.magi.cp_ffa_bwd(out, None, q, k, v, out, lse, *options, *more, None, list(wanted))


@contextmanager
def idle_ranks(begun, loaded, siblings=None):
    """Hopper GPUs that know no plan and no call: lists of the kernels that they begin, and of those that they load;
    `siblings` are those that they begin for later, if nothing has begun them yet."""

    def begin(variants, *, later):
        if later and siblings is not None:
            siblings.extend(x for x in variants if x not in begun)
        else:
            begun.extend(variants)

    with (
        pytest.MonkeyPatch.context() as patch,
        hopper_on_cpus.idle_hopper(lambda variant, device: loaded.append(variant)),
    ):
        patch.setattr(ahead, "begin", begin)
        patch.setattr(_compat, "is_in_use", lambda device: True)
        patch.setattr(execution._device_plans, "plans", OrderedDict())
        hopper._begin_backward.cache_clear()
        of_ranks.forget()
        yield
    of_ranks.forget()
    hopper._begin_backward.cache_clear()


def begun_and_loaded(group, case, is_plan_last):
    """What fakes and a plan begin, and what the run behind them loads."""
    case = {**CASES[case]}
    mask, options = case.pop("mask", packs)(), case.pop("options", EARLY)
    deterministic = case.pop("deterministic", False)
    seqlen = SEQLEN if mask is scattered else None
    begun, loaded = [], []
    mode = FakeTensorMode(shape_env=ShapeEnv() if is_plan_last else None)

    def trace():
        with mode:
            run_ops(
                lambda x: mode.from_tensor(x, static_shapes=not is_plan_last), plan, group, **case
            )

    with (
        idle_ranks(begun, loaded),
        deterministic_algorithms(deterministic),
        torch.no_grad(),
    ):
        plan = plan_sequence(mask, group, seqlen=seqlen, options=options)
        of_ranks.forget()
        planned = plan._planned
        planned._packed.clear()
        steps = [trace, lambda: planned.tensors("cpu")]
        first, last = steps if is_plan_last else reversed(steps)
        first()
        assert begun == []
        last()
        assert loaded == []
        before = set(begun)
        run_ops(lambda x: x, plan, group, **case)
    return before, set(loaded)


@pytest.mark.parametrize("is_plan_last", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_begun_is_what_is_loaded(ranks_of, name, is_plan_last):
    for begun, loaded in ranks_of(2).run(begun_and_loaded, name, is_plan_last):
        assert len(loaded) >= 5
        assert loaded <= begun
        if name != "masks of heads":  # nobody has counted how many slices each has
            assert begun == loaded


def in_eager_code(group):
    """The kernels that the first forward begins, those that it loads, and those of its backward; and what a plan of
    another kind begins when it is made."""
    begun, loaded = [], []
    with idle_ranks(begun, loaded):
        plan = plan_sequence(packs(), group, options=STAGES)
        q, k, v = (
            torch.zeros(plan.seqlen_local, n, 64, dtype=torch.bfloat16, requires_grad=True)
            for n in (4, 2, 2)
        )
        options = {"kernel": hopper_on_cpus.KERNEL, "collective": "emulated"}
        tensors = plan.meta, plan.data
        out = context_parallel_attention(q, k, v, PlanTensors(*tensors), group, **options).out
        of_forward, before = set(loaded), set(begun)
        out.sum().backward()
        of_backward = set(loaded) - of_forward
        begun.clear()
        plan_rank(documents([8] * 256, causal=True), 2, group.rank(), EARLY).tensors("cpu")
        return before, of_forward, of_backward, set(begun)


def test_eager_code(ranks_of):
    for begun, of_forward, of_backward, of_plan in ranks_of(2).run(in_eager_code):
        assert {x.entry for x in of_forward} == {"ffa_tile_plan", "ffa_forward"}
        assert len(of_backward) == 3
        assert begun == of_forward | of_backward
        assert any(("FFA_HAS_STAIRS", "true") in x.defines for x in of_plan - begun)


def without_gradients(group):
    begun, loaded = [], []
    with idle_ranks(begun, loaded), torch.no_grad():
        plan = plan_sequence(packs(), group, options=STAGES)
        run_ops(lambda x: x, plan, group)
    return begun


def test_a_forward_without_gradients_begins_no_backward(ranks_of):
    for begun in ranks_of(2).run(without_gradients):
        assert {x.entry for x in begun} == {"ffa_tile_plan", "ffa_forward"}


COST = CostModel.of_heads(64, 64, 64)
RUNS = {
    "any plan": ContextParallelOptions(cost=COST),
    "never early": ContextParallelOptions(cost=COST, early=False),
    "one call": ContextParallelOptions(cost=COST, degree=0, backward_degree=0),
    "two stages": ContextParallelOptions(cost=COST, degree=2),
}


def random_documents(random):
    """From two long ones to hundreds of short ones."""
    lengths, longest = [], 2 ** random.uniform(4, 14)
    while (left := 4 * SEQLEN - sum(lengths)) > 0:
        lengths.append(min(left, int(random.uniform(0.1, 1) * longest) + 1))
    return documents(lengths, causal=random.random() < 0.7)


def kernels_of_a_run(group, options, num_masks, num_steps):
    """The kernels that were begun before the plan of each step, and those that it loads; then the siblings that were
    begun, and those of them that were begun in front of a kernel that a plan needs."""
    begun, loaded, siblings, steps, in_front = [], [], [], [], set()
    random, mode = Random(5), FakeTensorMode()
    masks = [random_documents(random) for _ in range(num_masks)]
    with idle_ranks(begun, loaded, siblings), torch.no_grad():
        for step in range(num_steps):
            before, num_siblings = {*begun, *siblings}, len(siblings)
            plan = plan_sequence(masks[step % num_masks], group, options=options)
            if step == 0:
                with mode:
                    run_ops(mode.from_tensor, plan, group)
            in_front |= set(siblings[num_siblings:]) & set(begun) - before
            run_ops(lambda x: x, plan, group)
            steps.append((before, set(loaded)))
            loaded.clear()
    return steps, set(siblings), in_front


def is_early(variant):
    return variant.entry == "ffa_early_tiles" or ("FFA_IS_EARLY", "true") in variant.defines


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_many_masks_begins_all_kernels_by_its_second_plan(ranks_of, name):
    options, later = RUNS[name], set()
    for steps, siblings, in_front in ranks_of(2).run(kernels_of_a_run, options, 24, 24):
        (_, of_first), (_, of_second), *others = steps
        for before, loaded in others:
            assert loaded <= before
            later |= loaded - of_first - of_second
        assert not in_front
        assert len(siblings - of_first) <= 6
        assert any(map(is_early, siblings)) == (name in ("any plan", "one call"))
    assert later  # so that this test says something


def test_a_run_of_one_mask_begins_no_siblings(ranks_of):
    for steps, siblings, _ in ranks_of(2).run(kernels_of_a_run, RUNS["any plan"], 1, 3):
        assert not siblings
        assert [loaded - before for before, loaded in steps[1:]] == [set()] * 2


SIBLINGS = {  # the most
    "bits": [],  # whose kernels look up edges anyway
    "score": ["ffa_forward"],  # with edges, or without
    "masks of heads": ["ffa_forward", "ffa_split_tiles", "ffa_forward_merge"],
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_are_kernels_that_such_plans_may_take(ranks_of, name):
    found = ranks_of(2).run(siblings_of, name)
    for siblings in found:
        assert set(siblings) <= set(SIBLINGS[name])
    assert sorted(max(found, key=len)) == sorted(SIBLINGS[name])


def siblings_of(group, name):
    """The kernels that are begun as siblings for a case, when it has another plan than before."""
    case, begun, siblings = {**CASES[name]}, [], []
    mask, options = case.pop("mask", packs)(), case.pop("options", EARLY)
    seqlen = SEQLEN if mask is scattered else None
    with idle_ranks(begun, [], siblings), torch.no_grad():
        for chunk_size in (16, 32):
            of_step = replace(options, chunk_size=chunk_size)
            plan = plan_sequence(mask, group, seqlen=seqlen, options=of_step)
            run_ops(lambda x: x, plan, group, **case)
    return [x.entry for x in dict.fromkeys(siblings)]


def test_calls_and_plans_of_another_time(monkeypatch):
    """What kernels say under deterministic algorithms is kept for calls under these alone."""
    device, begun = torch.device("cpu"), []
    numbers = ((2, 2, 64, 64), 0.125, 0.0, hopper_on_cpus.KERNEL, 1, False, SCORE)
    tables = ((torch.float32, 1),)
    asked = Asked(device, torch.bfloat16, *numbers, tables, (0,), (), True, is_backward=True)
    plan, other = (plan_rank(packs(), 2, 0, x) for x in (STAGES, ONE_CALL))
    monkeypatch.setattr(_compat, "is_in_use", lambda device: True)
    monkeypatch.setattr(
        of_ranks, "_begin", lambda call, plan, *, later: later or begun.append(call)
    )
    of_ranks.forget()
    of_ranks.begin_call(asked)
    of_ranks.begin_plan(plan, device)
    assert not begun
    with deterministic_algorithms():
        of_ranks.begin_plan(other, device)
    assert begun == [asked]
    of_ranks.forget()


def test_nothing_is_begun_for_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(ahead, "begin", lambda variants, *, later=False: pytest.fail("begun"))
    of_ranks.forget()
    on_cpu = plan_rank(packs(), 2, 0, STAGES).tensors("cpu")
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(torch.zeros(1024, n, 64).bfloat16()) for n in (4, 2, 2))
        tensors = [mode.from_tensor(x) for x in on_cpu]
        torch.ops.magi.cp_ffa_fwd(q, k, v, *tensors, 0.125, 0.0, "", "auto", "", "")
