"""Queries and keys of two sequences over ranks: work is balanced, keys lie where they are seen,
and all that is seen arrives once."""

import re

import pytest
import torch

from magi_compile.dtensor.planning.chunks import rank_loads
from magi_compile.dtensor.planning.comm_plan import RankRows, plan_communication
from magi_compile.dtensor.planning.dispatch import (
    STRATEGIES,
    dispatch,
    dispatch_as,
    dispatch_together,
)
from magi_compile.dtensor.planning.keys import cut_keys
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank_together
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.planning.test_comm_plan import check_loads, check_stages
from tests.dtensor.planning.test_relays import check_legs, stages_of
from tests.support.cases import FULL, MASKS, random_disjoint


def documents(q_lengths, k_lengths):
    """Document i of the queries sees document i of the keys."""
    q_ends, k_ends = (torch.tensor([0, *x]).cumsum(0) for x in (q_lengths, k_lengths))
    slices = [
        ((int(q_ends[i]), int(q_ends[i + 1])), (int(k_ends[i]), int(k_ends[i + 1])), FULL)
        for i in range(len(q_lengths))
    ]
    return AttnSlices.from_slices(slices, int(q_ends[-1]), int(k_ends[-1]))


PACKED = documents([200, 3, 90, 17, 130, 60], [20, 30, 0, 41, 5, 37])
CROSS = {
    "packed": PACKED,
    "text": AttnSlices.full(300, 77),
    "one_key": AttnSlices.full(300, 1),
    "many_keys": AttnSlices.full(5, 300),
    "half_sees": AttnSlices.from_slices([((0, 100), (0, 200), FULL)], 400, 200),
    "nobody_sees": AttnSlices.from_slices([], 90, 33),
    "random_wide": random_disjoint(90, 500, seed=1).slices(),
    "random_tall": random_disjoint(500, 90, seed=2).slices(),
    **{
        case.name: case.slices()
        for case in MASKS
        if case.seqlen_q != case.seqlen_k and max(case.seqlen_q, case.seqlen_k) < 300
    },
}


def plans_of(where, degree):
    comm = plan_communication(RankRows.of(where), [degree])
    return [comm.stages(rank)[0] for rank in range(where.cp_size)]


@pytest.mark.parametrize("degree", [0, 1])
@pytest.mark.parametrize("name", CROSS)
def test_legs(name, degree):
    """Keys that are a sequence of their own cross hosts once for each too."""
    hosts = (0, 0, 1, 1)
    check_legs(*stages_of(CROSS[name], hosts, degree), hosts, degree)


@pytest.mark.parametrize("name", CROSS)
def test_stages_cover_the_mask_once(name):
    slices = CROSS[name]
    where = dispatch(slices, 3, chunk_size=16)
    assert where.keys is not where
    for placement, total in ((where, slices.seqlen_q), (where.keys, slices.seqlen_k)):
        found = placement.positions().sort().values
        assert torch.equal(found, torch.arange(placement.total_padded))
        assert placement.total == total <= placement.total_padded
    for degree in (0, 2):
        check_stages(slices, where, plans_of(where, degree))


@pytest.mark.parametrize("name", CROSS)
def test_stage_loads_are_those_of_the_dense_mask(name):
    check_loads(CROSS[name], dispatch(CROSS[name], 3, chunk_size=16))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(strategy):
    where = dispatch(PACKED, 4, chunk_size=16, strategy=strategy)
    check_stages(PACKED, where, plans_of(where, 1))


def test_work_is_balanced_and_documents_find_their_keys():
    lengths = torch.randint(20, 3000, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    slices = documents(lengths, [n // 4 + 1 for n in lengths])
    for size in (4, 16):
        where = dispatch(slices, size)
        loads = rank_loads(where.table, where.chunks, where.keys)
        assert loads.imbalance < 1.03
        gathered = where.keys.total_padded - where.keys.seqlen_local
        assert loads.recv_rows.double().mean() < 0.2 * gathered
        in_order = dispatch(AttnSlices.full(7, slices.seqlen_k), size).keys
        naive = rank_loads(where.table, where.chunks, in_order)
        assert loads.recv_rows.sum() < 0.75 * naive.recv_rows.sum()


def test_keys_that_all_see_are_sent_by_all():
    """The first keys are seen by everybody, and the others by nobody: each rank holds its share of them."""
    slices = AttnSlices.from_slices([((0, 4096), (0, 1024), FULL)], 4096, 4096 + 1024)
    where = dispatch(slices, 4)
    loads = rank_loads(where.table, where.chunks, where.keys)
    assert loads.send_rows.max() <= 1.3 * loads.send_rows.double().mean()


def test_padding_of_keys_is_little():
    for total in (0, 1, 7, 77, 200, 1000, 33333):
        for size in (1, 2, 8):
            keys = cut_keys(total, size, 8)
            assert total <= keys.total_padded
            assert keys.seqlen_local <= (1 + 1 / 16) * total / size + 1


def test_queries_go_where_keys_lie():
    """Keys lie in documents, these in an order that nobody would choose."""
    lengths = [256] * 8
    keys = dispatch_as(
        [AttnSlices.full(1024)], 4, torch.arange(1024).view(8, 128).flip(0).flatten()
    )[0]
    slices = documents(lengths, [128] * 8)
    (where,) = dispatch_together([slices], [1], 4, chunk_size=64, keys=[keys])
    assert where.keys is keys
    assert rank_loads(where.table, where.chunks, keys).recv_rows.sum() == 0
    free = dispatch(slices, 4, chunk_size=64)
    assert rank_loads(free.table, free.chunks, keys).recv_rows.sum() > 0
    check_stages(slices, where, plans_of(where, 1))


def test_self_and_cross_attention_together():
    """A decoder's layers: its own tokens, the encoder's, and a window of as many keys as the latter."""
    cross = documents([1000, 15, 450, 85, 650, 300], [100, 150, 0, 205, 25, 185])
    total = cross.seqlen_q
    own = AttnSlices.causal(total)
    window = AttnSlices.from_slices([((0, total), (0, 40), FULL)], total, cross.seqlen_k)
    options = ContextParallelOptions(chunk_size=32)
    masks = [own, cross, window]
    plans = plan_rank_together(masks, 3, 1, options)
    where = [plan.dispatch for plan in plans]
    assert where[0].keys is where[0]
    assert where[1].keys is where[2].keys is not where[1]
    assert all(torch.equal(x.chunks, where[0].chunks) for x in where)
    area = sum(x.table.area[x.chunks].sum(1) for x in where)
    assert area.max() < 1.1 * area.double().mean()
    for mask, x in zip(masks, where, strict=True):
        check_stages(mask, x, plans_of(x, 1))
    given = dispatch(AttnSlices.causal(cross.seqlen_k), 3, chunk_size=8)
    held = plan_rank_together(masks, 3, 1, options, keys=[None, given, None])
    assert held[1].dispatch.keys is given
    assert held[2].dispatch.keys.chunk_size == where[2].keys.chunk_size
    assert held[1].digest != plans[1].digest
    assert plan_rank_together(masks, 3, 1, options, keys=[None, given, None])[1] is held[1]


def test_a_permutation_of_the_queries():
    total = PACKED.seqlen_q
    where = torch.arange(total).flip(0)
    (x,) = dispatch_as([PACKED], 4, where)
    check_stages(PACKED, x, plans_of(x, 1))


def test_as_many_keys_as_queries_may_lie_elsewhere():
    slices = AttnSlices.causal(128)
    keys = dispatch(AttnSlices.full(128), 2, chunk_size=32)
    (where,) = dispatch_together([slices], [1], 2, chunk_size=16, keys=[keys])
    assert where.keys is keys
    check_stages(slices, where, plans_of(where, 1))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "`keys` must have an entry for each of the 1 masks, got 0"),
        (
            [dispatch(AttnSlices.full(64), 2)],
            "`keys` must hold the 77 keys of the mask on 2 ranks, got 64 tokens on 2",
        ),
        ([dispatch(AttnSlices.full(77), 3)], "on 2 ranks, got 77 tokens on 3"),
    ],
)
def test_keys_that_do_not_fit(keys, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_rank_together([AttnSlices.full(128, 77)], 2, 0, keys=keys)
