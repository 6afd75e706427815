"""Plans that are made without a process group, as in a DataLoader's worker, and what ranks compare."""

import copy
import pickle

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from magi_compile import AttnSlices
from magi_compile.dtensor import (
    ContextParallelOptions,
    HostPlan,
    plan,
    plan_ahead,
    plan_rank,
    plan_rank_ahead,
)
from magi_compile.dtensor.planning import rank_plan
from magi_compile.dtensor.ranks.agreement import checksum_of, require_equal_tokens

S = 96
OPTIONS = ContextParallelOptions(chunk_size=8)
CAUSAL = AttnSlices.from_cu_seqlens([0, 40, S], causal=True)
WINDOW = AttnSlices.from_cu_seqlens([0, 40, S], window=(9, 0))
CROSS = AttnSlices.from_dense(torch.ones(S, 32, dtype=torch.bool).tril(-20))
MASKS = {"full": CAUSAL, "window": WINDOW}
VISIBLE = torch.rand(S, S, generator=torch.Generator().manual_seed(0)) < 0.4


def scattered(b, h, q, kv):
    """It has bits."""
    return VISIBLE[q, kv]


def same(group):
    """A plan that was pickled is the one that the group makes, and attends as it does."""
    ranks = (group.size(), group.rank())
    for masks in ({"only": CAUSAL}, MASKS, {"cross": CROSS}, {"bits": scattered}):
        seqlen = S if "bits" in masks else None
        made = plan(masks=masks, ranks=ranks, seqlen=seqlen, options=OPTIONS)
        wanted = plan(masks=masks, mesh=group, seqlen=seqlen, options=OPTIONS)
        assert list(made) == list(wanted) == list(masks)
        for name, host in pickle.loads(pickle.dumps(made)).items():
            assert isinstance(host, HostPlan)
            ours, theirs = host.on(group), wanted[name]
            assert torch.equal(ours.meta, theirs.meta)
            assert torch.equal(ours.data, theirs.data)
            assert torch.equal(ours.positions, theirs.positions)
            assert ours.device == theirs.device == torch.device("cpu")
            torch.manual_seed(0)
            q = torch.randn(ours.seqlen_local, 4, 16)
            k = torch.randn(ours.keys.seqlen_local, 2, 16)
            assert torch.equal(ours.attention(q, k, k), theirs.attention(q, k, k))


def other_order(group):
    """Ranks that hold the masks in another order plan alike."""
    names = ["full", "window"] if group.rank() else ["window", "full"]
    weights = {"window": 5, "full": 1}
    plans = plan(masks={x: MASKS[x] for x in names}, weights=weights, mesh=group, options=OPTIONS)
    assert list(plans) == names
    x = torch.randn(plans["full"].seqlen_local, 2, 16)
    assert plans["full"].attention(x, x, x).isfinite().all()


def wrong_mesh(group):
    host = plan(CAUSAL, ranks=(group.size(), 1 - group.rank()), options=OPTIONS)
    with pytest.raises(ValueError, match="must be that of `ranks`, 2 ranks of which this is"):
        host.on(group)
    with pytest.raises(TypeError, match="`mesh` must be a DeviceMesh or a process group"):
        host.on("cp")


def tokens(group, differs):
    x = torch.arange(50)
    if differs:
        x[7] += group.rank()
    require_equal_tokens(checksum_of(x, x), group)


@pytest.mark.parametrize("program", [same, other_order, wrong_mesh])
def test_on_two_ranks(program, ranks_of):
    ranks_of(2).run(program)


def test_tokens_are_compared(ranks_of):
    ranks_of(2).run(tokens, False)
    message = r"same tokens, but those of ranks \[1\] differ from those of rank 0"
    with pytest.raises(AssertionError, match=message) as error:
        ranks_of(2).run(tokens, True)
    assert str(error.value).count("differ from those of rank 0") >= 2  # on every rank


def test_checksum():
    x = torch.arange(10)
    others = [(x + 1,), (x.flip(0),), (x, x), (x[:9],), (x, x + 1), (x + 1, x)]
    sums = [checksum_of(*given) for given in [(x,), *others]]
    assert len(set(sums)) == len(sums)
    assert checksum_of(x.int().reshape(2, 5)) == checksum_of(x)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"ranks": (2, 0), "mesh": "cp"}, ValueError, "`mesh` must be None where `ranks`"),
        ({"ranks": (2, 0), "keys": "cp"}, ValueError, "`keys` must be None where `ranks`"),
        ({"ranks": 2}, ValueError, "`ranks` must be a pair"),
        (
            {"ranks": (2, 5)},
            ValueError,
            r"`ranks` must be \(cp_size, rank\) with a rank in \[0, .*got \(2, 5\)",
        ),
        ({"ranks": (2.0, 0)}, TypeError, r"`ranks` must be a pair of ints, .* got \(2.0, 0\)"),
        ({"ranks": (10**30, 0)}, ValueError, "`ranks` must be"),
        ({}, TypeError, "`mesh` must be a DeviceMesh"),
    ],
)
def test_wrong_arguments(given, error, message):
    with pytest.raises(error, match=message):
        plan(CAUSAL, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mask_mod_of_floats(dtype):
    """Such a mask is added to scores: read as truth values, 0 and -inf would show what they hide."""
    message = f"`mask_mod` must return a bool tensor, got one of {dtype}"
    with pytest.raises(TypeError, match=message):
        plan(
            lambda b, h, q, kv: torch.where(q >= kv, 0, -torch.inf).to(dtype),
            ranks=(2, 0),
            seqlen=S,
        )


def test_a_mask_mod_of_integers_is_one_for_all_heads():
    host = plan(lambda b, h, q, kv: (q >= kv).int() * VISIBLE[q, kv], ranks=(2, 0), seqlen=S)
    assert host.of_unknown == ""
    host = plan(lambda b, h, q, kv: (q >= kv).int() * (h + 1), ranks=(2, 0), seqlen=S)
    assert host.of_unknown == "h"


def ahead(group):
    """On a thread, by the door of `plan`, with its errors."""
    futures = [plan_ahead(x, group, seqlen=S, options=OPTIONS) for x in (CAUSAL, scattered)]
    for mask, future in zip((CAUSAL, scattered), futures, strict=True):
        wanted = plan(mask, group, seqlen=S, options=OPTIONS)
        assert torch.equal(future.result().data, wanted.data)
    both = plan_ahead(masks=MASKS, ranks=(group.size(), group.rank()), options=OPTIONS).result()
    assert {name: type(x) for name, x in both.items()} == dict.fromkeys(MASKS, HostPlan)
    with pytest.raises(ValueError, match="`seqlen` must be the length of `mask`"):
        plan_ahead(CAUSAL, group, seqlen=S + 1).result()
    wrong = plan_ahead(CAUSAL, "cp")
    with pytest.raises(TypeError, match="`mesh` must be a DeviceMesh"):
        wrong.result()


def test_ahead(ranks_of):
    ranks_of(2).run(ahead)


def test_a_rank_ahead():
    future = plan_rank_ahead(CAUSAL, 2, 1, OPTIONS, "cpu")
    assert plan_rank(CAUSAL, 2, 1, OPTIONS) is future.result()
    with pytest.raises(ValueError, match="`rank` must be in"):
        plan_rank_ahead(CAUSAL, 2, 2, OPTIONS).result()


def digest_of(i):
    host = plan_ahead(AttnSlices.causal(70 + i), ranks=(2, 0), options=OPTIONS).result(10)
    return host.planned.digest


def test_a_pickled_plan_has_the_blocks_of_its_rank_alone():
    """Not those of the whole mask, of which four ranks have a quarter each."""
    visible = torch.rand(4096, 4096, generator=torch.Generator().manual_seed(0)) < 0.4
    host = plan(lambda b, h, q, kv: visible[q, kv], ranks=(4, 1), seqlen=4096)
    num_bytes = 32 * 32 * 2048
    assert host.planned.bits.nbytes == num_bytes // 4
    assert host.slices is None
    assert len(pickle.dumps(host)) < num_bytes // 2


class Plans:
    """A data set whose worker plans ahead."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return digest_of(i)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_ahead_in_a_worker(start):
    """Of a process that has planned ahead, and that plans while it forks."""
    wanted = [digest_of(i) for i in range(2)]
    loader = torch.utils.data.DataLoader(
        Plans(), batch_size=None, num_workers=1, multiprocessing_context=start, timeout=60
    )
    with rank_plan._plans.lock:
        workers = iter(loader)
    assert list(workers) == wanted


def pickled(group):
    """A plan that has its group says what to send in its place, and so do its keys."""
    message = r"a S\w+ cannot be pickled: .* HostPlan, which can be: plan\(mask, ranks="
    for made in (plan(CAUSAL, group), plan(CROSS, group).keys):
        for send in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=message):
                send(made)
        assert copy.copy(made).seqlen_local == made.seqlen_local


def test_a_plan_with_a_group_is_not_pickled(ranks_of):
    ranks_of(2).run(pickled)


def explained(group):
    mesh, options = DeviceMesh.from_group(group, "cpu"), ContextParallelOptions(chunk_size=8)
    host = plan(CAUSAL, ranks=(group.size(), group.rank()), options=options)
    with pytest.raises(TypeError, match="`cost` must be a CostModel or None, got int"):
        host.explain(3)
    return str(host.explain()) == str(host.on(mesh).explain())


def test_a_plan_without_a_group_explains_itself(ranks_of):
    assert ranks_of(2).run(explained) == [True] * 2
