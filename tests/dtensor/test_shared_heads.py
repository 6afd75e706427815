"""Groups of ranks that share the heads of their tokens, and tokens over groups: what one process has."""

import datetime
import inspect
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import AuxRequest

from magi_compile import AttnSlices
from magi_compile.dtensor import ContextParallelOptions, CostModel, plan, plan_ahead
from magi_compile.dtensor.context.positions import with_given_positions
from magi_compile.dtensor.planning.chunks import Placement
from magi_compile.dtensor.planning.hosts import neighbours_on_hosts
from magi_compile.kernels.reference import exact_forward
from tests.dtensor import test_any_mask as any_mask
from tests.dtensor import test_packing_with_context_parallel as packing
from tests.dtensor.support.ranks import Ranks
from tests.dtensor.test_packing_with_context_parallel import mesh_of

S, HEADS, D = 160, 4, 8
TWO = ContextParallelOptions(chunk_size=16, head_ranks=2)


# Any mask, any score_mod, any way to call


def run_eager(group, name):
    make, score_mod = any_mask.CASES[name]
    two = [replace(x, head_ranks=2) for x in (any_mask.SPREAD, any_mask.AT_ONCE, any_mask.UNEVEN)]
    any_mask.step(group, make(), score_mod, two[0])
    any_mask.step(group, make(), score_mod, two[1], any_mask.eagerly)
    any_mask.step(group, make(1), score_mod, two[2], any_mask.ours)


@pytest.mark.parametrize("name", any_mask.CASES)
def test_eager(ranks_of, name):
    ranks_of(4).run(run_eager, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows of heads, relative", "entries, relative"])
def test_eager_over_eight_ranks(ranks_of, name):
    ranks_of(8).run(run_eager, name)


@pytest.mark.parametrize("name", ["scattered, alibi", "windows of heads, relative"])
def test_compiled_it_is_one_graph_for_all_masks(ranks_of, name):
    options = replace(any_mask.SPREAD, head_ranks=2)
    ranks_of(4).run(any_mask.run_compiled, name, False, None, options)


@pytest.mark.parametrize(
    ("attention", "backend"),
    [
        *(("flex_attention", x) for x in (None, "aot_eager")),
        *((x, None) for x in ("our_flex_attention", "flex_flash_attention")),
    ],
)
def test_loss_and_gradients_of_a_model_as_it_is(ranks_of, attention, backend):
    given = (packing.MASKS[:3], attention, packing.ODD, backend, TWO)
    assert ranks_of(4).run(packing.train_inside, *given) == [0 if backend is None else 1] * 4


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_causal_sdpa(ranks_of, backend):
    given = (["causal"], "causal_sdpa", packing.ODD, backend, TWO)
    ranks_of(4).run(packing.train_inside, *given)


def run_four_of_one_key(group, options):
    """Four ranks share the heads of all tokens, and two key-value heads are fewer than these."""
    for name in ("scattered, alibi", "windows of heads, relative"):
        make, score_mod = any_mask.CASES[name]
        any_mask.step(group, make(), score_mod, options)


def test_fewer_key_value_heads_than_ranks(ranks_of):
    ranks_of(4).run(run_four_of_one_key, replace(TWO, head_ranks=4))


@pytest.mark.parametrize("name", ["scattered, alibi"])
def test_checkpointed(ranks_of, name):
    options = replace(any_mask.SPREAD, head_ranks=2)
    ranks_of(4).run(any_mask.run_compiled, name, True, None, options)


def run_by_inductor(group, heads):
    """One head of queries or keys on each rank."""
    torch._dynamo.reset()
    p = plan(AttnSlices.causal(128), mesh_of(group), options=TWO)
    generator, found = torch.Generator().manual_seed(0), []
    q, k = (torch.randn(1, n, 128, 16, generator=generator) for n in heads)
    dout = torch.randn(1, heads[0], 128, 16, generator=generator)

    def attend(q, k):
        return p.attention(q, k, k)

    for f in (attend, torch.compile(attend, backend="inductor", fullgraph=True)):
        leaves = [p.shard(x, 2).requires_grad_() for x in (q, k)]
        out = f(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, p.shard(dout, 2))])
    return [torch.allclose(x, y, atol=1e-5) for x, y in zip(*found, strict=True)]


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (4, 1)])
def test_compiled_by_inductor(ranks_of, heads):
    assert ranks_of(2).run(run_by_inductor, heads) == [[True] * 3] * 2


def run_transforms(group):
    p = plan(AttnSlices.causal(128), mesh_of(group), options=TWO)
    x = torch.randn(1, HEADS, 64, D)

    def loss(x):
        return p.attention(x, x, x).sum()

    with pytest.raises(NotImplementedError, match="attention has no forward-mode derivatives"):
        torch.func.jvp(loss, (x,), (x,))
    with pytest.raises(NotImplementedError, match="attention has no rules for the transforms"):
        torch.func.grad(loss)(x)
    with pytest.raises(NotImplementedError, match="attention has no rules for the transforms"):
        torch.func.vmap(loss)(x[None])
    with pytest.raises(TypeError, match="`score_mod` must be a function or None, got 3"):
        p.attention(x, x, x, score_mod=3)
    with pytest.raises(ValueError, match=r"`v` must have .* `k`, \[64, 4\], got \[64, 2\]"):
        p.attention(x, x, x[:, :2])


def test_transforms_and_wrong_arguments(ranks_of):
    ranks_of(2).run(run_transforms)


def run_split_heads(group):
    """Half of the heads on each rank of "tp", of which the ranks of "cp" share each half."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("tp", "cp"))
    make, score_mod = any_mask.CASES["windows of heads, relative"]
    (q, k, v, *learned), *_ = any_mask.inputs()
    out, lse, _ = any_mask.on_one_process(make(), score_mod)
    p = plan(make(), mesh["cp"], options=replace(any_mask.SPREAD, head_ranks=2))
    half = mesh.get_local_rank("tp")
    local = [p.shard(x.chunk(2, 1)[half], 2) for x in (q, k, v)]
    given = [DTensor.from_local(x, mesh, [Shard(1), Shard(2)]) for x in local]
    found = p.attention(*given, score_mod=score_mod(*learned), return_lse=True)
    wanted = (x.chunk(2, 1)[half] for x in (out, lse))
    pairs = zip((p.unshard(x.to_local(), 2) for x in found), wanted, strict=True)
    return [torch.allclose(x, y, atol=1e-5) for x, y in pairs]


def test_heads_that_tensor_parallelism_splits(ranks_of):
    assert ranks_of(4).run(run_split_heads) == [[True, True]] * 4


def run_rest(group, dtype):
    """Sinks, a soft cap, the largest scores, and autocast; only some ranks need a gradient of the log-sum-exp."""
    slices, generator = AttnSlices.from_cu_seqlens([0, 70, 160], causal=True), torch.Generator()
    q, k, v = torch.randn(3, 160, HEADS, D, generator=generator.manual_seed(0))
    sinks, found = torch.randn(HEADS, generator=generator), []
    for options in (TWO, replace(TWO, head_ranks=1)):
        p = plan(slices, mesh_of(group), options=options)
        leaves = [p.shard(x, 0).requires_grad_() for x in (q, k, v)]
        learned = sinks.clone().requires_grad_()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            out, aux = p.attention(
                *leaves,
                sinks=learned,
                softcap=5.0,
                return_aux=AuxRequest(lse=True, max_scores=True),
            )
        loss = p.sum(torch.zeros(())) + out.float().square().sum()
        if p.rank % 2:
            loss = loss + aux.lse[:, : p.seqlen_local // 2].sum()
        grads = torch.autograd.grad(loss, [*leaves, learned])
        wholes = [p.unshard(x, 0) for x in (out, *grads[:3])]
        rows = [p.unshard(x, 1) for x in (aux.lse, aux.max_scores)]
        found.append((out.dtype, [*wholes, *rows], grads[3]))
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sinks_and_what_else_attention_gives(ranks_of, dtype):
    """As without shared heads, but for the gradient of lse, which other tokens have."""
    for ours, without in ranks_of(4).run(run_rest, dtype):
        assert ours[0] == without[0] == (dtype or torch.float32)
        for i, (x, y) in enumerate(zip(ours[1], without[1], strict=True)):
            if i not in (1, 2, 3):  # gradients
                torch.testing.assert_close(x, y, atol=2e-2 if dtype else 1e-5, rtol=1e-2)
            assert x.isfinite().all()


# Tokens


def run_tokens(group):
    p = plan(AttnSlices.causal(201), mesh_of(group), options=TWO)
    x = torch.arange(2 * 201.0).view(2, 201)
    whole = p.unshard(p.shard(x, 1), 1)
    rolled = p.unshard(p.roll(p.shard(x, 1), -1, 1), 1)
    labels = p.unshard(p.labels(torch.arange(201)), 0)
    return (
        [torch.equal(whole, x), torch.equal(rolled, x.roll(-1, 1)), labels.tolist()],
        p.positions.tolist(),
        (p.cp_size, p.rank, p.head_ranks, p.seqlen_local),
    )


def test_every_token_is_on_one_rank(ranks_of):
    found = ranks_of(4).run(run_tokens)
    for rank, (checks, _, numbers) in enumerate(found):
        assert checks == [True, True, [*range(1, 201), -100]]
        assert numbers[:3] == (4, rank, 2)
    rows = numbers[3]
    assert all(len(positions) == rows for _, positions, _ in found)
    # Padding is at position 0, as that of any plan.
    assert sorted(x for _, positions, _ in found for x in positions if x) == [*range(1, 201)]


def test_parts_of_a_placement():
    whole = Placement(90, 12, torch.tensor([[0, 3, 4, 7], [1, 2, 5, 6]]))
    for number in (2, 3, 4, 6, 16):
        parts = whole.parted(number)
        assert (parts.cp_size, parts.total, parts.total_padded) == (2 * number, 90, 96)
        assert torch.equal(parts.positions(), whole.positions())


def test_rates_of_a_share():
    whole = CostModel.of_heads(64, 8)
    shared, direct = whole.of_share(8), CostModel.of_heads(8, 1)
    assert shared.heads == (64, 8)  # all
    for name, rate in vars(replace(direct, heads=(64, 8))).items():
        assert getattr(shared, name) == pytest.approx(rate), name
    assert whole.of_share(1) is whole


def run_cross(group):
    """Two sequences, of which the ranks of a group hold equal parts."""
    slices, generator = AttnSlices.full(160, 64), torch.Generator().manual_seed(0)
    p = plan(slices, mesh_of(group), options=TWO)
    q, k, v = (torch.randn(n, HEADS, D, generator=generator) for n in (160, 64, 64))
    out, lse = p.attention(p.shard(q, 0), p.keys.shard(k, 0), p.keys.shard(v, 0), return_lse=True)
    exact, exact_lse = exact_forward(q, k, v, slices, D**-0.5)
    errors = (p.unshard(out, 0) - exact, p.unshard(lse, 1) - exact_lse)
    return [float(x.abs().max()) for x in errors]


def test_cross_attention(ranks_of):
    for errors in ranks_of(4).run(run_cross):
        assert max(errors) < 1e-5


def run_other_plans(group):
    """The tokens of a plan serve plans with groups and without."""
    mesh, slices = mesh_of(group), AttnSlices.from_cu_seqlens([0, 70, 160], causal=True)
    alone = plan(slices, mesh, options=replace(TWO, head_ranks=1, chunk_size=8))
    p = plan(slices, mesh, options=TWO)
    others = [
        *(
            (plan(slices, mesh, permutation=p, options=replace(TWO, head_ranks=x)), p)
            for x in (1, 2, 4)
        ),
        (plan(slices, mesh, permutation=alone, options=TWO), alone),
    ]
    x = torch.randn(3, 160, HEADS, D, generator=torch.Generator().manual_seed(0))
    first, *rest = (
        made.unshard(made.attention(*(made.shard(y, 0) for y in x)), 0)
        for made in (p, *(made for made, _ in others))
    )
    same = [torch.equal(made.positions, other.positions) for made, other in others]
    return same + [torch.allclose(first, y, atol=1e-5) for y in rest]


def test_tokens_of_other_plans(ranks_of):
    assert ranks_of(4).run(run_other_plans) == [[True] * 8] * 4


def run_held_keys(group):
    """Keys that lie where another plan has its tokens; both sequences are padded."""
    mesh, generator = mesh_of(group), torch.Generator().manual_seed(0)
    options = ContextParallelOptions(head_ranks=2)
    encoder = plan(AttnSlices.full(77, 77), mesh, options=options)
    slices, found = AttnSlices.full(1000, 77), []
    q, k, v = (torch.randn(n, HEADS, D, generator=generator) for n in (1000, 77, 77))
    exact = exact_forward(q, k, v, slices, D**-0.5)[0]
    for keys in (None, encoder):
        p = plan(slices, mesh, keys=keys, options=options)
        out = p.attention(p.shard(q, 0), p.keys.shard(k, 0), p.keys.shard(v, 0))
        found.append(float((p.unshard(out, 0) - exact).abs().max()))
    return found


def test_keys_of_another_plan(ranks_of):
    assert all(max(errors) < 1e-5 for errors in ranks_of(4).run(run_held_keys))


@pytest.mark.parametrize("head_ranks", [3, 6])
def test_odd_numbers_of_ranks_that_share_heads(head_ranks):
    options = ContextParallelOptions(head_ranks=head_ranks)
    for lengths in ((77, 77), (5000, 5000), (4096, 100), (4096, 1000)):
        made = plan(AttnSlices.full(*lengths), ranks=(12, 7), options=options).planned
        assert made.rows % head_ranks == made.key_rows % head_ranks == 0


def test_hosts_where_groups_do_not_fit(monkeypatch):
    """All ranks have the same hosts, those of the first rank of each group."""
    for name, value in (("LOCAL_WORLD_SIZE", 6), ("WORLD_SIZE", 12), ("GROUP_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    options = ContextParallelOptions(head_ranks=4)
    found = [plan(AttnSlices.causal(4096), ranks=(12, i), options=options) for i in range(12)]
    assert {x.planned.hosts for x in found} == {(0, 0, 1)}
    assert len({x.planned.digest for x in found}) == 1


def run_host_plan(group):
    """A worker's plan, by groups."""
    mesh = mesh_of(group)
    slices = AttnSlices.from_cu_seqlens([0, 70, 160], causal=True)
    ranks = (4, mesh.get_local_rank())
    made = pickle.loads(pickle.dumps(plan(slices, ranks=ranks, options=TWO))).on(mesh)
    direct = plan(slices, mesh, options=TWO)
    return torch.equal(made.meta, direct.meta) and torch.equal(made.positions, direct.positions)


def test_plans_of_workers(ranks_of):
    assert ranks_of(4).run(run_host_plan) == [True] * 4


# Costs

# Links between hosts are slow: what crosses them decides, and a row does so for every rank that needs it.
SLOW = CostModel(1e-12, 1e-9, 0.0, 0.0, 0.0, other_host_factor=1e3, heads=(HEADS, HEADS))
CHOOSES = ContextParallelOptions(chunk_size=8, hosts=2, cost=SLOW, hierarchical=False)


def shared(slices, size, **options):
    """How many ranks share heads if the cost model chooses."""
    options = ContextParallelOptions(**{"cost": CostModel.of_heads(), "hosts": 8, **options})
    return {
        plan(slices, ranks=(size, i), options=options).planned.head_ranks for i in (0, size - 1)
    }


def test_the_cost_model_chooses():
    size = 128
    whole, tokens = AttnSlices.causal(1024 * size), 8192 * size
    short = AttnSlices.from_cu_seqlens([*range(0, tokens, 700), tokens], causal=True)
    assert shared(whole, size) == {8}
    assert shared(short, size) == {1}  # what would be exchanged is more than what travels
    assert shared(whole, 8) == {1}  # one host
    assert shared(whole, size, hosts=None) == {1}
    assert shared(whole, size, cost=replace(CostModel.of_heads(), heads=None)) == {1}
    assert shared(whole, size, cost=CostModel.of_heads(12, 12)) == {4}
    assert shared(whole, size, cost=CostModel.of_heads(9, 9)) == {1}
    assert shared(whole, size, chunk_size=257) == {1}  # a rank could not hold a part of a chunk
    assert shared(whole, size, chunk_size=260) == {4}
    assert shared(whole, size, chunk_size=256) == {8}
    assert shared(whole, size, head_ranks=1) == {1}
    assert shared(whole, size, head_ranks=4) == {4}
    assert ContextParallelOptions().cost.heads is None


def test_hosts_that_torchrun_tells(monkeypatch):
    for name, value in (("LOCAL_WORLD_SIZE", 8), ("WORLD_SIZE", 128), ("GROUP_WORLD_SIZE", 16)):
        monkeypatch.setenv(name, str(value))
    assert shared(AttnSlices.causal(1 << 17), 128, hosts=None) == {8}


@pytest.mark.parametrize(
    ("hosts", "number"),
    [
        (None, 1),
        ((0, 0, 1, 1), 2),
        ((0, 0, 1, 1, 1, 1, 0, 0), 2),
        ((0, 0, 0, 1, 1, 1, 1, 1), 1),
        ((0, 1) * 4, 1),
    ],
)
def test_neighbours_on_hosts(hosts, number):
    assert neighbours_on_hosts(hosts) == number


def test_whatever_is_chosen_divides():
    """Any number of tokens and keys, without an error."""
    options, found = (
        replace(CHOOSES, chunk_size=None, hosts=4, cost=replace(SLOW, heads=(8, 2))),
        set(),
    )
    for lengths in ((77, 77), (5000, 5000), (4096, 100), (4099, 1000), (3, 70)):
        for size in (8, 12):
            made = plan(AttnSlices.full(*lengths), ranks=(size, 7), options=options).planned
            assert made.rows % made.head_ranks == made.key_rows % made.head_ranks == 0
            found.add(made.head_ranks)
    assert 4 in found


def run_chosen(group):
    """What one process has, by plans that choose, together and after each other, from workers, and for their tokens."""
    mesh, found = mesh_of(group), []
    whole, short = AttnSlices.full(S), AttnSlices.from_cu_seqlens([0, 80, 160])
    p = plan(whole, mesh, options=CHOOSES)
    of_both = plan(mesh=mesh, masks=[whole, short], weights=[3, 1], options=CHOOSES)
    of_worker = plan(whole, ranks=(4, mesh.get_local_rank()), options=CHOOSES).on(mesh)
    again = plan(short, mesh, options=CHOOSES, permutation=p)
    crossing = plan(AttnSlices.full(40, S), mesh, options=CHOOSES, keys=p)
    ahead = plan_ahead(whole, mesh, options=CHOOSES).result()
    alone = plan(short, mesh, options=CHOOSES)
    made = [(whole, p), (whole, of_both[0]), (short, of_both[1]), (whole, of_worker)]
    made += [(short, again), (whole, ahead), (short, alone), (AttnSlices.full(40, S), crossing)]
    for slices, of_mask in made:
        generator = torch.Generator().manual_seed(3)
        q, k, v = torch.randn(3, S, HEADS, D, generator=generator)
        q = q[: slices.seqlen_q]
        keys = of_mask.keys
        out = of_mask.attention(of_mask.shard(q, 0), keys.shard(k, 0), keys.shard(v, 0))
        exact = exact_forward(q, k, v, slices, D**-0.5)[0]
        found.append((of_mask.head_ranks, float((of_mask.unshard(out, 0) - exact).abs().max())))
    return found


def test_plans_that_choose(ranks_of):
    for found in ranks_of(4).run(run_chosen):
        numbers, errors = zip(*found, strict=True)
        assert max(errors) < 1e-5
        assert numbers == (2, 2, 2, 2, 2, 2, 1, 2)


def run_plans_of_given_tokens(group):
    """Those of several masks stay in the groups that all given plans have, and nobody in groups for which its heads are
    too few."""
    mesh, found = mesh_of(group), []
    whole, cross = AttnSlices.full(S), AttnSlices.full(40, S)
    p, flat = (plan(whole, mesh, options=replace(CHOOSES, head_ranks=x)) for x in (None, 1))
    odd = replace(CHOOSES, cost=replace(SLOW, heads=(3, 3)))
    unknown = replace(CHOOSES, cost=replace(SLOW, heads=None))
    masks = {"own": AttnSlices.causal(40), "cross": cross}
    found += [
        x.head_ranks
        for x in plan(masks=masks, mesh=mesh, keys={"cross": p}, options=CHOOSES).values()
    ]
    for keys in ([p, p], [None, p], [flat, p], [flat, flat]):
        made = plan(masks=[cross, cross], mesh=mesh, keys=keys, options=CHOOSES)
        found.append(made[0].head_ranks)
    for options in (odd, unknown):
        found.append(plan(whole, mesh, permutation=p, options=options).head_ranks)
        found.append(plan(cross, mesh, keys=p, options=options).head_ranks)
    return p.head_ranks, found


def test_plans_of_given_tokens(ranks_of):
    for number, found in ranks_of(4).run(run_plans_of_given_tokens):
        assert (number, found) == (2, [2, 2, 2, 2, 1, 1, 1, 1, 1, 1])


def run_other_options(group):
    """A rank that may not choose, or wants other groups, is an error of all before anybody waits for a group."""
    mesh, slices = mesh_of(group), AttnSlices.causal(S)
    is_odd = mesh.get_local_rank() == 2
    others = [{"hosts": 1}, {"head_ranks": 1}, {"cost": replace(SLOW, heads=None)}]
    options = [replace(CHOOSES, **x) if is_odd else CHOOSES for x in others]
    options.append(replace(CHOOSES, head_ranks=4 if is_odd else 2))

    def attend(options):
        p = plan(slices, mesh, options=options)
        x = torch.randn(1, HEADS, p.seqlen_local, D)
        return p.head_ranks, p.attention(x, x, x).shape == x.shape

    for of_rank in options:
        with pytest.raises(ValueError, match="give every rank the same mask and the same Context"):
            attend(of_rank)
    return attend(CHOOSES)


def test_options_that_differ(ranks_of):
    assert ranks_of(4).run(run_other_options) == [(2, True)] * 4


def run_other_numbers_of_groups(group):
    """PyTorch would wait for ever."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))
    everyone = dist.new_group([0, 1, 2, 3])
    slices, has_more = AttnSlices.causal(S), mesh.get_local_rank("dp") == 1
    plan(slices, mesh["cp"], options=TWO if has_more else replace(TWO, head_ranks=1))
    with pytest.raises(ValueError, match=r"equally many process groups .* rank 2 has") as raised:
        plan(slices, everyone, options=TWO)
    plan(slices, mesh["cp"], options=TWO)
    return str(raised.value), plan(slices, everyone, options=TWO).head_ranks


def test_ranks_with_other_numbers_of_groups(ranks_of):
    ((_, number),) = {*ranks_of(4).run(run_other_numbers_of_groups)}
    assert number == 2


def test_an_exchange_is_predicted():
    slices = AttnSlices.causal(1 << 17)
    cost = CostModel.of_heads()
    made = plan(slices, ranks=(16, 3), options=ContextParallelOptions(head_ranks=8, cost=cost))
    told, without = made.explain(), made.explain(replace(cost, heads=None))
    seconds = cost.exchange_seconds((1 << 17) / 16, 8)
    assert told.exchange_seconds == seconds > 0 == without.exchange_seconds
    assert told.forward_seconds == pytest.approx(without.forward_seconds + seconds)
    assert told.backward_seconds == pytest.approx(without.backward_seconds + seconds)
    assert "exchanged in a group: 1.6" in str(told)
    assert "does not say how many heads" in str(without)
    # In rows of keys and values, 64 + 8 of them, and twice 8.
    more = CostModel.of_heads(64, 4).exchange_seconds(1000, 8)  # heads of keys are repeated
    assert more == pytest.approx(CostModel.of_heads(64, 8).exchange_seconds(1000, 8))


@pytest.mark.parametrize("heads", [(8,), (8, 3), (0, 1), (8.0, 2.0), [8, 8], 8])
def test_heads_of_a_cost_model(heads):
    with pytest.raises((TypeError, ValueError), match=r"^`heads` must be"):
        CostModel(1e-12, 1e-9, heads=heads)


def test_a_plan_is_over_groups_by_the_rates_of_a_share():
    slices = AttnSlices.from_cu_seqlens([0, 30000, 65536], causal=True)
    whole = plan(
        slices, ranks=(2, 0), options=ContextParallelOptions(cost=CostModel.of_heads(8, 1))
    )
    shared = plan(slices, ranks=(16, 3), options=ContextParallelOptions(head_ranks=8))
    assert torch.equal(whole.planned.dispatch.chunks, shared.planned.dispatch.chunks)
    assert len(whole.planned.forward) == len(shared.planned.forward)
    assert whole.planned.digest != shared.planned.digest


@pytest.mark.parametrize(
    ("hosts", "of_groups"),
    [
        (4, (0, 0, 1, 1)),
        (8, None),
        ((0, 0, 1, 1, 1, 1, 0, 0), (0, 1, 1, 0)),
    ],
)
def test_hosts_are_those_of_ranks(hosts, of_groups):
    options = ContextParallelOptions(head_ranks=2, hosts=hosts)
    p = plan(AttnSlices.causal(4096), ranks=(8, 5), options=options)
    assert (p.planned.hosts, p.planned.rank) == (of_groups, 2)


def test_hosts_are_as_many_as_ranks():
    options = ContextParallelOptions(head_ranks=2, hosts=(0, 0, 1, 1))
    with pytest.raises(ValueError, match="host of each of 8 ranks, got 4"):
        plan(AttnSlices.causal(4096), ranks=(8, 5), options=options)


def run_explained(group):
    p = plan(AttnSlices.causal(160), mesh_of(group), options=TWO)
    return str(p.explain()), p.explain().head_ranks


def test_explanation(ranks_of):
    for text, number in ranks_of(4).run(run_explained):
        assert number == 2
        assert "tokens    160 over 2 groups of 2 ranks that share heads, 80 a group (below" in text


# What is wrong


def run_other_masks(group):
    """Ranks that share heads have other masks; ranks that exchange keys have the same."""
    mesh = mesh_of(group)
    seqlens = [0, 64, 160] if mesh.get_local_rank() % 2 else [0, 80, 160]
    p = plan(AttnSlices.from_cu_seqlens(seqlens, causal=True), mesh, options=TWO)
    x = torch.randn(1, HEADS, p.seqlen_local, D)
    with pytest.raises(ValueError, match=r"the plans of ranks \[1, 3\] differ from that of rank 0"):
        p.attention(x, x, x)


def test_ranks_that_share_heads_agree(ranks_of):
    ranks_of(4).run(run_other_masks)


def run_other_tensors(group):
    """What would not fit together in an exchange is an error of all ranks before it."""
    p, found = plan(AttnSlices.causal(160), mesh_of(group), options=TWO), []
    is_odd = p.rank == 1
    for batch, dtype in (
        (1 + is_odd, torch.float32),
        (1, torch.bfloat16 if is_odd else torch.float32),
    ):
        x = torch.randn(batch, HEADS, p.seqlen_local, D, dtype=dtype)
        with pytest.raises(ValueError) as raised:
            p.attention(x, x, x)
        found.append(str(raised.value))
    return found


def test_ranks_that_share_heads_bring_equal_tensors(ranks_of):
    for texts in ranks_of(4).run(run_other_tensors):
        assert "the batch entries of `q`, `k` and `v` must be the same on all ranks" in texts[0]
        assert "the dtype of `q`, `k` and `v` must be the same on all ranks" in texts[1]


def run_one_without_a_backward(group):
    """Only rank 1 has tensors that need no gradient."""
    ranks = dist.new_group(timeout=datetime.timedelta(seconds=2))
    p = plan(AttnSlices.causal(160), ranks, options=TWO)
    x = torch.randn(1, HEADS, p.seqlen_local, D, requires_grad=p.rank != 1)
    out = p.attention(x, x, x)
    if p.rank == 1:
        return ""
    with pytest.raises(RuntimeError) as raised:
        out.sum().backward()
    return str(raised.value)


def test_a_rank_that_runs_no_backward_is_named():
    pool = Ranks(4)  # whose group has failed afterwards
    try:
        found = pool.run(run_one_without_a_backward)
    finally:
        pool.close()
    assert found.pop(1) == ""
    assert all("has not heard of rank 1 in a backward" in text for text in found)


def run_counted_positions(group):
    """No key travels between groups, and each rank holds a part of a document."""
    slices = AttnSlices.from_cu_seqlens([0, 80, 160], causal=True)
    p = plan(slices, mesh_of(group), options=TWO)
    counted = torch.arange(p.seqlen_local)[None]
    with pytest.raises(ValueError, match="`position_ids` must be given inside context_parallel"):
        with_given_positions(p.block_mask, counted, True)
    with_given_positions(p.block_mask, p.shard(torch.arange(160)[None], 1), True)


def test_positions_that_a_model_has_counted(ranks_of):
    ranks_of(4).run(run_counted_positions)


def run_other_scores(group):
    """A score_mod is the same on all ranks that have the same heads."""
    mesh = mesh_of(group)
    factor = 1 + mesh.get_local_rank() // 2
    p = plan(AttnSlices.causal(160), mesh, options=TWO)
    x = torch.randn(1, HEADS, p.seqlen_local, D)
    p.attention(x, x, x, score_mod=lambda score, b, h, q, kv: score + h * kv)
    with pytest.raises(ValueError, match="`score_mod` must be the same on all ranks"):
        p.attention(x, x, x, score_mod=lambda score, b, h, q, kv: score + factor * kv)


def test_scores_that_differ(ranks_of):
    ranks_of(4).run(run_other_scores)


def errors_of(group):
    mesh, slices, found = mesh_of(group), AttnSlices.causal(160), {}

    def record(name, call):
        with pytest.raises(ValueError) as raised:
            call()
        found[name] = str(raised.value)

    record("ranks", lambda: plan(slices, mesh, options=replace(TWO, head_ranks=3)))
    record("ranks of a worker", lambda: plan(slices, ranks=(5, 0), options=TWO))
    other = plan(slices, ranks=(4, (mesh.get_local_rank() + 2) % 4), options=TWO)
    record("another worker's", lambda: other.on(mesh))
    p = plan(slices, mesh, options=TWO)
    x = torch.randn(1, HEADS, p.seqlen_local, D)
    record("heads", lambda: p.attention(x[:, :3], x[:, :3], x[:, :3]))
    record("rows", lambda: p.attention(*[torch.randn(1, HEADS, 80, D)] * 3))
    odd = ContextParallelOptions(chunk_size=5, head_ranks=2)
    record("tokens", lambda: plan(AttnSlices.causal(30), mesh, options=odd))
    record("tokens of a worker", lambda: plan(AttnSlices.causal(30), ranks=(4, 0), options=odd))
    descending = dist.new_group([3, 2, 1, 0], sort_ranks=False)
    record("descending", lambda: plan(slices, descending, options=TWO))
    return found


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this PyTorch sorts the ranks of a group",
)
def test_errors(ranks_of):
    found = ranks_of(4).run(errors_of)[0]
    for name, words in {
        "ranks": "`head_ranks` of ContextParallelOptions must divide the 4 ranks of `mesh` or `ranks`, got 3",
        "ranks of a worker": "must divide the 5 ranks of `mesh` or `ranks`, got 2",
        "another worker's": "2 groups of 2 ranks of which this is 1, got 2 groups of 2 ranks of which this is 0",
        "heads": "`q` must have heads that the 2 ranks which share them divide",
        "rows": "`q` must have the 40 tokens of this rank in dimension 2, got 80",
        "tokens": "must divide the 15 tokens of each of 2 groups of ranks, got 2; give a `chunk_size` that it divides",
        "tokens of a worker": "must divide the 15 tokens of each of 2 groups of ranks",
        "descending": "`mesh` must have its ranks in ascending order where they share heads",
    }.items():
        assert words in found[name], found[name]


def run_parts_of_a_mesh(group):
    """Two groups of ranks with other masks, each of which makes groups of its own."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "cp"))
    seqlens = [0, 50 + 30 * mesh.get_local_rank("dp"), 160]
    slices = AttnSlices.from_cu_seqlens(seqlens, causal=True)
    p = plan(slices, mesh["cp"], options=TWO)
    q, k, v = torch.randn(3, 160, HEADS, D, generator=torch.Generator().manual_seed(seqlens[1]))
    out = p.unshard(p.attention(*(p.shard(x, 0) for x in (q, k, v))), 0)
    return float((out - exact_forward(q, k, v, slices, D**-0.5)[0]).abs().max())


def test_data_parallelism_beside_it(ranks_of):
    assert max(ranks_of(4).run(run_parts_of_a_mesh)) < 1e-5


def test_the_number_of_ranks_is_checked():
    for given, kind in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="`head_ranks` must be"):
            ContextParallelOptions(head_ranks=given)
