"""Dispatch: every token has one place, loads and traffic are exact, and the strategies do what they promise."""

import itertools

import pytest
import torch

from magi_compile.dtensor.planning.chunks import ChunkTable, rank_loads
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.dispatch import (
    STRATEGIES,
    choose_chunk_size,
    dispatch,
    local,
)
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.masks import SQUARE, documents
from tests.support.cases import random_disjoint, sliding_window, varlen
from tests.support.packs import packs_of_corpus
from tests.support.pairwise import pairwise

COMPUTE_BOUND = CostModel(seconds_per_area=1.0, seconds_per_row=0.0)


@pytest.mark.parametrize(
    ("case", "cp_size", "strategy"),
    pairwise(SQUARE.values(), [1, 2, 3, 8], STRATEGIES, others_are_slow=True),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_token_has_one_place(case, cp_size, strategy):
    plan = dispatch(case.slices(), cp_size, chunk_size=32, strategy=strategy)
    assert plan.cp_size == cp_size
    assert plan.total_padded % (32 * cp_size) == 0
    assert 0 <= plan.total_padded - plan.total < 32 * cp_size
    positions = plan.positions()
    assert torch.equal(positions.sort().values, torch.arange(plan.total_padded))
    assert torch.equal(positions[plan.inverse_positions()], torch.arange(plan.total_padded))
    for rank in range(cp_size):
        mine = plan.positions(rank)
        assert len(mine) == plan.seqlen_local
        assert torch.equal(mine, mine.sort().values)
        assert bool((plan.rank_of_chunk()[mine // 32] == rank).all())


@pytest.mark.parametrize("cp_size", [1, 2, 5])
@pytest.mark.parametrize("case", SQUARE.values(), ids=lambda case: case.name)
def test_loads_are_those_of_the_dense_mask(case, cp_size):
    slices = case.slices()
    plan = dispatch(slices, cp_size, chunk_size=16)
    dense = torch.zeros(plan.total_padded, plan.total_padded, dtype=torch.bool)
    dense[: plan.total, : plan.total] = slices.to_dense()
    loads = rank_loads(ChunkTable.of(slices, 16, plan.chunks.numel()), plan.chunks)
    mine = [plan.positions(rank) for rank in range(cp_size)]
    # needed[r, s]: rows of s that some row of r sees.
    needed = torch.tensor([[int(dense[r][:, s].any(0).sum()) for s in mine] for r in mine])
    remote = needed * ~torch.eye(cp_size, dtype=torch.bool)
    assert loads.area.tolist() == [int(dense[r].sum()) for r in mine]
    assert loads.recv_rows.tolist() == remote.sum(1).tolist()
    assert loads.send_rows.tolist() == remote.sum(0).tolist()


def every_assignment(num_chunks, cp_size):
    """All ways to give each rank equally many chunks, up to the order of ranks."""

    def deal(left):
        if not left:
            yield []
            return
        for others in itertools.combinations(left[1:], num_chunks // cp_size - 1):
            mine = [left[0], *others]
            for rest in deal([chunk for chunk in left if chunk not in mine]):
                yield [mine, *rest]

    yield from deal(list(range(num_chunks)))


@pytest.mark.parametrize(("cp_size", "chunk_size"), [(2, 16), (3, 22)])
@pytest.mark.parametrize(
    "case",
    [
        varlen("long_and_short", [140, 20, 7, 9, 16], 1),
        varlen("equal", [48, 48, 48, 48], 1),
        varlen("one", [192], 1),
        varlen("full", [100, 60, 32], 0),
        random_disjoint(192, 192, seed=1),
        sliding_window(192, 40),
    ],
    ids=lambda case: case.name,
)
def test_small_sizes_against_the_optimum(case, cp_size, chunk_size):
    slices = case.slices()
    num_chunks = -(-192 // (cp_size * chunk_size)) * cp_size
    table = ChunkTable.of(slices, chunk_size, num_chunks)
    cost = CostModel(seconds_per_area=1.0, seconds_per_row=8.0)
    plan = dispatch(slices, cp_size, chunk_size=chunk_size, cost=cost)
    optimum = min(rank_loads(table, a).seconds(cost) for a in every_assignment(num_chunks, cp_size))
    assert rank_loads(table, plan.chunks).seconds(cost) <= 1.1 * optimum


def test_zigzag_balances_a_causal_sequence():
    slices = AttnSlices.causal(4096)
    plan = dispatch(slices, 8, chunk_size=64, strategy="zigzag")
    assert rank_loads(ChunkTable.of(slices, 64, 64), plan.chunks).imbalance == 1.0


def test_contiguous_where_that_is_balanced():
    slices = sliding_window(8192, 100).slices()
    plan = dispatch(slices, 8, chunk_size=64)
    assert torch.equal(plan.positions(), torch.arange(8192))


def test_documents_of_one_rank_stay_on_it():
    slices = documents([512] * 32, causal=True)
    plan = dispatch(slices, 8, chunk_size=128)
    loads = rank_loads(ChunkTable.of(slices, 128, 128), plan.chunks)
    assert loads.imbalance == 1.0
    assert loads.recv_rows.tolist() == [0] * 8


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_packed_text_is_balanced_and_local(causal):
    total, cp_size, chunk_size = 2**19, 64, 512
    ratios = []
    for lengths in packs_of_corpus(total, 4):
        slices = documents(lengths, causal)
        table = ChunkTable.of(slices, chunk_size, total // chunk_size)
        loads = {}
        for strategy in ("min_heap", "local"):
            plan = dispatch(slices, cp_size, chunk_size=chunk_size, strategy=strategy)
            loads[strategy] = rank_loads(table, plan.chunks)
        assert loads["local"].imbalance < 1.05
        ratios.append(int(loads["local"].recv_rows.sum()) / int(loads["min_heap"].recv_rows.sum()))
    assert sum(ratios) / len(ratios) < 0.75


def chosen_chunk_size(slices, cp_size):
    def area_of(size):
        num_chunks = -(-slices.seqlen_q // (size * cp_size)) * cp_size
        return ChunkTable.of(slices, size, num_chunks).area

    return choose_chunk_size(slices.seqlen_q, cp_size, area_of)


def test_chunk_size_follows_the_mask():
    assert chosen_chunk_size(AttnSlices.full(2**20), 8) == 8192
    assert chosen_chunk_size(AttnSlices.full(2**16), 8) == 512
    assert chosen_chunk_size(documents(packs_of_corpus(2**19, 1)[0], True), 64) == 512
    assert chosen_chunk_size(AttnSlices.causal(1000), 8) == 128


def test_smaller_chunks_where_the_largest_do_not_balance():
    packed = documents(packs_of_corpus(8 * 8192, 1, 42)[0], causal=False)
    assert chosen_chunk_size(packed, 8) == 512

    def imbalance(chunk_size):
        where = dispatch(packed, 8, chunk_size=chunk_size)
        assert chunk_size is None or where.chunk_size == chunk_size
        return rank_loads(where.table, where.chunks).imbalance

    assert imbalance(512) > 1.025
    assert imbalance(None) < 1.015
    assert dispatch(packed, 8).chunk_size == 256
    # A strategy that does not look at the mask would not balance chunks of any size.
    assert dispatch(packed, 8, strategy="zigzag").chunk_size == 512


def test_without_slack_the_balance_is_tight():
    slices = documents(packs_of_corpus(2**16, 1)[0], causal=True)
    plan = dispatch(slices, 8, chunk_size=512, cost=COMPUTE_BOUND, slack=0.0)
    assert rank_loads(ChunkTable.of(slices, 512, 128), plan.chunks).imbalance <= 1.01


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cp_size": 0}, ValueError, "`cp_size` must be at least 1, got 0"),
        ({"cp_size": 2, "strategy": "random"}, ValueError, "`strategy` must be one of .* 'random'"),
        ({"cp_size": 2, "slack": -1.0}, ValueError, "`slack` must not be negative, got -1.0"),
        ({"cp_size": 2, "chunk_size": 0}, ValueError, "`chunk_size` must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        dispatch(AttnSlices.causal(256), **arguments)


def test_packs_have_their_length():
    for total in (1000, 65536):
        packs = packs_of_corpus(total, 3)
        assert [sum(pack) for pack in packs] == [total] * 3
        assert max(max(pack) for pack in packs) <= total // 4
    assert packs_of_corpus(4096, 2) == packs_of_corpus(4096, 2)


@pytest.mark.parametrize("case", SQUARE.values(), ids=lambda case: case.name)
def test_a_part_of_the_chunks(case):
    """The keys of these chunks that their rows see, and nothing else."""
    slices, size = case.slices(), 16
    num_chunks = -(-slices.seqlen_q // size)
    dense = torch.zeros(num_chunks * size, num_chunks * size, dtype=torch.bool)
    dense[: slices.seqlen_q, : slices.seqlen_k] = slices.to_dense()
    table = ChunkTable.of(slices, size, num_chunks)
    chunks = torch.arange(num_chunks)[torch.arange(num_chunks) % 3 != 1]
    rows = (chunks[:, None] * size + torch.arange(size)).flatten()
    part, inside = table.part(chunks), dense[rows][:, rows]
    assert part.num_chunks == len(chunks)
    assert part.area.tolist() == [int(x.sum()) for x in dense[rows].split(size)]
    found = torch.zeros(len(chunks), len(rows), dtype=torch.bool)
    for owner, lo, hi in zip(*(x.tolist() for x in part.needs), strict=True):
        found[owner, lo:hi] = True
    seen = torch.zeros_like(found)
    for owner, lo, hi in zip(*(x.tolist() for x in table.needs), strict=True):
        if owner in chunks:
            seen[int((chunks < owner).sum())] |= (rows >= lo) & (rows < hi)
    assert torch.equal(found, seen)
    assert bool((found.repeat_interleave(size, 0) | ~inside).all())


BLOCKS_OF_DOCUMENTS = documents(
    [1000, 300, 2500, 700, 1300, 90, 3000, 410, 2000, 900] * 2, causal=True
)


@pytest.mark.parametrize(
    "hosts", [(0,) * 4 + (1,) * 4, (0, 1) * 4, (0, 0, 1, 1, 2, 2, 3, 3)], ids=str
)
def test_tokens_are_placed_on_hosts_first(hosts):
    """As balanced as without hosts, and fewer rows cross them."""
    slices, cp_size = BLOCKS_OF_DOCUMENTS, len(hosts)
    members = [[rank for rank in range(cp_size) if hosts[rank] == host] for host in {*hosts}]
    crossing = []
    for known in (hosts, None):
        plan = dispatch(slices, cp_size, chunk_size=128, hosts=known)
        assert torch.equal(plan.positions().sort().values, torch.arange(plan.total_padded))
        assert rank_loads(plan.table, plan.chunks).imbalance <= 1.025
        of_hosts = torch.stack([plan.chunks[ranks].flatten() for ranks in members])
        crossing.append(int(rank_loads(plan.table, of_hosts).recv_rows.sum()))
    assert crossing[0] < 0.8 * crossing[1], crossing


def test_hosts_with_different_numbers_of_ranks():
    slices = BLOCKS_OF_DOCUMENTS
    plan = dispatch(slices, 8, chunk_size=128, hosts=(0, 0, 0, 1, 1, 1, 1, 1))
    assert torch.equal(plan.chunks, dispatch(slices, 8, chunk_size=128).chunks)
    table = plan.table
    assert torch.equal(plan.chunks, local(table, 8, 0.01, CostModel.of_heads()).sort(1).values)
