"""The strategies over 2, 4 and 8 gloo ranks: equal to one rank, in all heads of output and gradients."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from magi_bench.arguments import Settings
from magi_bench.clock import Rounds
from magi_bench.gate import exact_and_plain
from magi_bench.ranks.base import Problem
from magi_bench.ranks.strategies import transport
from magi_bench.ranks.strategies.attention import RingAttention
from magi_bench.ranks.strategies.contenders import (
    STRATEGIES,
    LoongTrain,
    LoongTrainContextFirst,
    Mesh,
    OneRank,
    RingP2P,
    Usp,
    documents_of,
    ring_plan,
    rings_of,
)
from magi_bench.ranks.strategies.placement import positions, runs_of, seen, zigzag
from magi_bench.ranks.strategies.varlen import LOCAL_KERNELS
from magi_bench.ranks.suite import Magi, MagiHeads
from magi_bench.workloads import lengths
from magi_bench.world import World
from magi_compile.dtensor import CostModel, plan
from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads
from magi_compile.dtensor.planning.dispatch import dispatch
from magi_compile.kernels.reference import exact_forward
from tests.bench.ranks.strategies.plain import Plain
from tests.bench.ranks.test_ranks import run_ranks

MASKS = ("full", "causal", "document_full", "document_causal")
#: With remainders that no number of chunks divides: 37 tokens a rank.
TOKENS = 37
SETTINGS = Settings("cpu", "float32", (TOKENS,), 8, 4, 16)
PLAIN = {"plain": Plain}


def documents(sampler, seqlen, seed):
    """A document that needs all ranks or most of them, one that needs a part, and small ones."""
    small = [1, 9, 2, 13]
    rest = seqlen - sum(small)
    return [rest // 3, 1, 9, rest - rest // 3, 2, 13]


def results_of(world, settings, masks, taking_part):
    """Relative errors of every strategy for every mask, of all heads; or why it does not take part."""
    found = {}
    with patch.object(lengths, "sample", documents), patch.dict(LOCAL_KERNELS, PLAIN):
        for mask in masks:
            problem = Problem(settings, world, mask, TOKENS)
            case = settings.case("ranks", mask, TOKENS, which="fwdbwd")
            exact, _ = exact_and_plain(problem.workload, problem.inputs)
            for strategy in taking_part:
                key = mask, strategy.name
                if reasons := strategy.supports(problem, case):
                    found[key] = reasons
                    continue
                ready = strategy.prepare(problem, case)
                found[key] = errors_of(ready.call(), exact, strategy._positions, problem)
                found[key] |= {"received": ready.facts["received_bytes"]}
    return found


def errors_of(results, exact, positions, problem):
    """The largest error of each result, by the largest value."""
    every = problem.world.all_of(positions.tolist())
    assert sorted(x for mine in every for x in mine) == list(range(problem.total))
    return {
        name: float((x.double() - truth[positions]).abs().max() / truth.abs().max())
        for name, x, truth in zip(("out", "dq", "dk", "dv"), results, exact, strict=True)
    }


def run_strategies(group, settings=SETTINGS, masks=MASKS, local_kernel="ours", names=None):
    chosen = [x(local_kernel) for x in STRATEGIES if names is None or x.name in names]
    return results_of(World("cpu"), settings, masks, chosen)


def check(everywhere, taking_part):
    for found in everywhere:
        assert {key for key, errors in found.items() if isinstance(errors, dict)} == taking_part
        for key in taking_part:
            assert all(found[key][name] < 1e-5 for name in ("out", "dq", "dk", "dv")), key


ALL = {(mask, x.name) for mask in MASKS for x in STRATEGIES}


def test_strategies_over_two_ranks(two_ranks):
    check(two_ranks.run(run_strategies), ALL)


def test_strategies_over_four_ranks(four_ranks):
    check(four_ranks.run(run_strategies), ALL)


@pytest.mark.slow
def test_strategies_over_eight_ranks(eight_ranks):
    check(eight_ranks.run(run_strategies, replace(SETTINGS, nheads_q=16, nheads_kv=8)), ALL)


def run_ours_with_heads(group, settings, mask):
    world, tokens = World("cpu"), 64
    problem, strategy = Problem(settings, world, mask, tokens), MagiHeads()
    case = settings.case("ranks", mask, tokens, which="fwdbwd")
    assert strategy.supports(problem, case) == []
    exact, _ = exact_and_plain(problem.workload, problem.inputs)
    ready = strategy.prepare(problem, case)
    # The kernel alone, of the tokens of a group by a share of the heads.
    share = strategy.mesh(problem).ulysses
    assert ready.without_moves()[0].shape == (share * tokens, settings.nheads_q // share, 16)
    return errors_of(ready.call(), exact, strategy._positions, problem)


@pytest.mark.parametrize("mask", [*MASKS, "sliding_window_causal"])
def test_ours_across_groups_that_share_heads(four_ranks, mask):
    for errors in four_ranks.run(run_ours_with_heads, replace(SETTINGS, exposed=True), mask):
        assert all(error < 1e-5 for error in errors.values())


@pytest.mark.slow
@pytest.mark.parametrize("ulysses", [2, 4])
def test_ours_across_groups_of_eight_ranks(eight_ranks, ulysses):
    settings = replace(SETTINGS, ulysses_degree=ulysses, exposed=True)
    for errors in eight_ranks.run(run_ours_with_heads, settings, "document_causal"):
        assert all(error < 1e-5 for error in errors.values())


def run_bytes_of_ours_with_heads(group):
    world = World("cpu")
    problem = Problem(SETTINGS, world, "causal", 64)
    spread, place = MagiHeads().spread(problem), world.rank // 2
    cost = CostModel.of_heads().of_share(2)
    loads = StageLoads.of(RankRows.of(dispatch(problem.workload.slices, 2, cost=cost)))
    moved = [int(x[place]) for x in (loads.recv_rows, loads.send_rows)]
    return spread.received, spread.counted, moved


def test_bytes_of_ours_across_groups(four_ranks):
    row, query = 2 * 4 * 16 * 4, 8 * 16 * 4
    # Of q, k, v, out and log-sum-exps, with the other rank of the group.
    exchanged = 64 * (row + 2 * query + 8 * 4) // 2
    everywhere = four_ranks.run(run_bytes_of_ours_with_heads)
    for received, counted, (rows, sent) in everywhere:
        assert counted == "plan"
        # Half of the heads of what its group needs.
        assert received == (exchanged + rows * row // 2, exchanged + (rows + sent) * row // 2)
    assert any(rows for *_, (rows, _) in everywhere)


def run_ours_without_groups(group):
    problem = Problem(SETTINGS, World("cpu"), "causal", 64)
    case = SETTINGS.case("ranks", "causal", 64, which="fwd")
    return MagiHeads().supports(problem, case)


def test_two_ranks_have_no_groups_that_share_heads(two_ranks):
    for reasons in two_ranks.run(run_ours_without_groups):
        assert reasons == ["needs two groups of two ranks that share heads, 2 ranks are 2 of 1"]


def test_kernels_of_packed_documents(four_ranks):
    everywhere = four_ranks.run(run_strategies, SETTINGS, ("causal", "document_causal"), "plain")
    check(everywhere, {(x, f"{y}-plain") for x, y in ALL if x in ("causal", "document_causal")})


def run_yardsticks(group):
    """Each rank alone, by our kernel and by others."""
    world, found = World("cpu"), {}
    with patch.object(lengths, "sample", documents), patch.dict(LOCAL_KERNELS, PLAIN):
        problem = Problem(SETTINGS, world, "document_causal", TOKENS, is_alone=True)
        exact, _ = exact_and_plain(problem.workload, problem.inputs)
        for made in OneRank.around(["plain"]):
            case = SETTINGS.case("ranks", "document_causal", TOKENS, which="fwdbwd")
            assert not made.supports(problem, case)
            ready = made.prepare(problem, case)
            pairs = zip(ready.call(), exact, strict=True)
            found[made.name, made.label] = [float((x - y).abs().max()) for x, y in pairs]
    return found


def test_the_yardstick_of_each_local_kernel(two_ranks):
    for found in two_ranks.run(run_yardsticks):
        assert [*found] == [
            ("one-rank", "our kernel, one rank, its tokens alone"),
            ("one-rank-plain", "plain, one rank, its tokens alone"),
        ]
        assert all(error < 1e-5 for errors in found.values() for error in errors)


def test_meshes_that_are_asked_for(four_ranks):
    names = (Usp.name, LoongTrain.name, LoongTrainContextFirst.name)
    for ulysses, window in ((2, 1), (1, 4), (4, 0)):
        degrees = {"ulysses_degree": ulysses, "window": window}
        asked = replace(SETTINGS, **degrees)
        everywhere = four_ranks.run(run_strategies, asked, MASKS[3:], "ours", names)
        check(everywhere, {(MASKS[3], name) for name in names})


# Masks that not everybody takes


def test_every_mask_for_those_that_can(two_ranks):
    masks = ("sliding_window_causal", "share_question", "prefix_lm_document")
    everywhere = two_ranks.run(run_strategies, SETTINGS, masks)
    able = ("ulysses", "ring-all-gather")
    check(everywhere, {(mask, name) for mask in masks for name in able})
    reason = ["takes full, causal, document_full, document_causal"]
    for found in everywhere:
        assert all(x == reason for (_, name), x in found.items() if name not in able)


def test_what_does_not_divide_is_a_reason(two_ranks):
    odd = replace(SETTINGS, nheads_q=6, nheads_kv=3, ulysses_degree=2)
    found = two_ranks.run(run_strategies, odd, ("causal",))[0]
    reason = ["3 key-value heads do not divide by 2 ranks"]
    assert found["causal", "ulysses"] == found["causal", "usp"] == reason
    assert isinstance(found["causal", "ring"], dict)
    found = two_ranks.run(run_strategies, replace(SETTINGS, window=3), ("causal",))[0]
    assert found["causal", "loongtrain"] == ["a ring of 2 ranks has no windows of 3"]
    found = two_ranks.run(run_strategies, replace(SETTINGS, ulysses_degree=4), ("causal",))[0]
    assert found["causal", "usp"] == ["2 ranks do not divide by 4 that share heads"]


class SkipsAStep(RingP2P):
    """It never looks at the keys that come last."""

    def spread(self, problem):
        made = super().spread(problem)
        made.attend.__self__.steps[-1].pieces.clear()
        return made


def run_wrong(group):
    settings = replace(SETTINGS, tokens=(TOKENS,), masks=("causal",), contenders=("ring",))
    return run_ranks(replace(settings, rounds=Rounds(1, 0.1)), (SkipsAStep,))


def test_a_strategy_that_is_wrong_is_not_timed(two_ranks):
    for rows in two_ranks.run(run_wrong):
        assert [(row["status"], "ms" in row) for row in rows] == [("wrong", False)] * 2
        assert rows[0]["reason"].startswith("out: relative error")


# Without moves


def run_still(group):
    problem = Problem(replace(SETTINGS, exposed=True), World("cpu"), "document_causal", TOKENS)
    case = SETTINGS.case("ranks", "document_causal", TOKENS, which="fwdbwd")
    found = {}
    for made in STRATEGIES:
        ready = made().prepare(problem, case)
        before = ready.call()
        with (
            patch.object(dist, "batch_isend_irecv", None),
            patch.object(dist, "all_to_all_single", None),
            patch.object(transport, "_all_gather", None),
            patch.object(transport, "_reduce_scatter", None),
        ):
            still = ready.without_moves()
        assert [x.shape for x in still] == [x.shape for x in before]
        found[made.name] = all(map(torch.equal, before, ready.call()))
    return found


def test_calls_without_moves_move_nothing_and_leave_nothing_behind(four_ranks):
    for found in four_ranks.run(run_still):
        assert found == dict.fromkeys(found, True)


def run_kernel_alone(group):
    found = []
    for mask in MASKS:
        problem = Problem(replace(SETTINGS, exposed=True), World("cpu"), mask, 128)
        case = SETTINGS.case("ranks", mask, 128, which="fwdbwd")
        ready = Magi().prepare(problem, case)
        with patch.object(torch.ops.magi, "cp_attention", None):
            alone = ready.without_moves()
        spans = runs_of(plan(problem.workload.slices, problem.world.mesh).positions)
        rows = positions(spans, "cpu")
        keys = problem.workload.slices.to_dense()[rows].any(0).nonzero()[:, 0]
        assert torch.equal(keys, positions(seen(problem.workload.slices, spans), "cpu"))
        assert alone[2].shape == (len(keys), 4, 16)
        for name, x, mine in zip(("out", "dq"), alone, ready.call(), strict=False):
            found.append((mask, name, torch.allclose(x, mine, atol=1e-4)))
    return found


def test_ours_without_moves_is_the_kernel_on_all_keys_that_its_rows_see(four_ranks):
    for found in four_ranks.run(run_kernel_alone):
        assert [x for x in found if not x[2]] == []


def run_exposed(group):
    names = ("magi", "magi-all-to-all", "one-rank", "ring", "usp")
    settings = replace(SETTINGS, tokens=(128,), contenders=names)
    return run_ranks(replace(settings, masks=("causal",), rounds=Rounds(1, 0.1), exposed=True))


def test_exposed_communication_is_a_field_of_ours_and_of_strategies(two_ranks):
    for rows in two_ranks.run(run_exposed):
        assert {row["status"] for row in rows} == {"ok"}
        for row in rows:
            assert ("exposed_ms" in row) == (row["contender"] != "one-rank")
            assert row.get("exposed_ms", 0) < row["ms"]


# What is inside


def run_lse(group, levels):
    world = World("cpu")
    problem = Problem(SETTINGS, world, "document_causal", TOKENS)
    owners = zigzag(documents_of(problem), world.size)
    kernel, slices = RingP2P().kernel(problem), problem.workload.slices
    made = ring_plan(kernel, slices, owners, rings_of(Mesh(1, *levels), world), world.device)
    rows = positions(owners[world.rank], world.device)
    out, lse = RingAttention.apply(*(x[rows] for x in problem.inputs[:3]), made)
    exact, exact_lse = exact_forward(*problem.inputs[:3], slices, 0.25)
    return [float((x - y).abs().max()) for x, y in ((out, exact[rows]), (lse, exact_lse[:, rows]))]


@pytest.mark.parametrize("levels", [(1, 4), (2, 2)])
def test_logsumexp_of_a_ring(four_ranks, levels):
    for errors in four_ranks.run(run_lse, levels):
        assert all(error < 1e-5 for error in errors)


def run_bytes(group):
    found = results_of(World("cpu"), SETTINGS, ("causal",), [x() for x in STRATEGIES])
    return {name: errors["received"] for (_, name), errors in found.items()}


def test_bytes_that_a_rank_receives(four_ranks):
    row, query = 2 * 4 * 16 * 4, 8 * 16 * 4  # key and value of 4 heads of 16 floats; 8 heads of q
    ring = (
        (3 + 3 + 4) * TOKENS * row
    )  # keys forward and backward, and gradients until they are home
    heads = 2 * TOKENS * (row + 2 * query)  # q, k, v and out, and their gradients
    for found in four_ranks.run(run_bytes):
        assert found == {
            "ulysses": heads * 3 // 4,
            "ring": ring,
            "ring-all-gather": 3 * 3 * TOKENS * row,
            # Two ranks share the heads of two places: half of the heads of twice the tokens go around.
            "usp": heads // 2 + (1 + 1 + 2) * TOKENS * row,
            # Gradients go home in each window, and once more around the windows.
            "loongtrain": (3 + 3 + 4 + 2) * TOKENS * row,
            "loongtrain-context-first": (3 + 3 + 4 + 2) * TOKENS * row,
            "hybrid-cp": ring,
        }


@pytest.mark.parametrize(
    ("ranks", "heads", "usp", "loongtrain"),
    [
        (1, 8, (1, 1, 1), (1, 1, 1)),
        (2, 8, (1, 1, 2), (1, 1, 2)),
        (4, 8, (2, 1, 2), (1, 2, 2)),
        (8, 8, (4, 1, 2), (2, 2, 2)),
        (8, 2, (2, 1, 4), (2, 2, 2)),
        (8, 3, (1, 1, 8), (1, 2, 4)),
        (64, 8, (8, 1, 8), (8, 2, 4)),
    ],
)
def test_degrees_by_heads_and_ranks(ranks, heads, usp, loongtrain):
    class Asked:
        settings = replace(SETTINGS, nheads_kv=heads)
        world = type("Size", (), {"size": ranks})

    assert Usp().mesh(Asked)[:3] == usp
    assert LoongTrain().mesh(Asked)[:3] == loongtrain


@pytest.mark.parametrize("head_first", [True, False])
def test_places_on_a_mesh(head_first):
    mesh = Mesh(4, 2, 3, head_first)
    assert sorted(mesh.rank(*mesh.coordinates(rank)) for rank in range(24)) == list(range(24))
    heads = [mesh.rank(1, head) for head in range(4)]
    assert heads == ([4, 5, 6, 7] if head_first else [1, 7, 13, 19])
