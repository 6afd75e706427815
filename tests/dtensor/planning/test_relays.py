"""Rows that cross hosts once for each host: the tables of all ranks against the needs that they come from."""

import itertools

import pytest
import torch

from magi_compile.dtensor import plan
from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads, plan_communication
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.dispatch import dispatch
from magi_compile.dtensor.planning.hosts import hosts_of, launched_hosts
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank
from magi_compile.dtensor.planning.relays import LEAST_PART
from magi_compile.dtensor.planning.stages import choose_pass
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.masks import LAST_SEES_ALL, SQUARE

HOSTS = {
    "2x2": (0, 0, 1, 1),
    "apart": (0, 1, 0, 1),
    "2x4": (0, 0, 0, 0, 1, 1, 1, 1),
    "3+1+2": (0, 0, 0, 1, 2, 2),
    "each its own": (0, 1, 2),
}


def rows_of(ranges):
    """Pairs `(peer, row, peer_row)` of single rows."""
    return [
        (peer, row + i, peer_row + i)
        for peer, row, peer_row, count in ranges.tolist()
        for i in range(count)
    ]


def moves_of(transfers):
    """`{(sender, row): [(receiver, row)]}` of all ranks, which both sides name."""
    sent, received = [], []
    for rank, transfer in enumerate(transfers):
        sent += [(rank, row, peer, peer_row) for peer, row, peer_row in rows_of(transfer.sends)]
        received += [(peer, peer_row, rank, row) for peer, row, peer_row in rows_of(transfer.recvs)]
        counts = torch.zeros(2, len(transfers), dtype=torch.int64)
        for way, ranges in enumerate((transfer.sends, transfer.recvs)):
            counts[way].index_add_(0, ranges[:, 0], ranges[:, 3])
        assert counts.tolist() == [transfer.send_counts, transfer.recv_counts]
    assert sorted(sent) == sorted(received)
    return sent


def stages_of(slices, hosts, degree, strategy="local"):
    cp_size = len(hosts)
    where = dispatch(slices, cp_size, chunk_size=16, strategy=strategy)
    comm = plan_communication(RankRows.of(where), [degree], torch.tensor(hosts))
    return where, [comm.stages(rank)[0] for rank in range(cp_size)]


@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("name", ["varlen_causal", "holes", "shared_prefix", "full_63x63"])
def test_legs_bring_what_the_transfer_brings(name, hosts, degree):
    check_legs(*stages_of(SQUARE[name].slices(), hosts, degree), hosts, degree)


def check_legs(where, stages, hosts, degree):
    """Both legs together bring what the transfers do, and rows cross hosts once; the staged rows of each rank."""
    crossed, num_staged = [], torch.zeros(len(hosts), dtype=torch.int64)
    for of_stage in zip(*stages, strict=True):
        if of_stage[0].transfer is None:
            continue
        transfers = [stage.transfer for stage in of_stage]
        direct, first, second = (
            moves_of(x) for x in (transfers, *zip(*(x.legs for x in transfers), strict=True))
        )
        # The row that is where in each buffer after both legs is that of the transfer.
        held = {(receiver, at): (sender, row) for sender, row, receiver, at in first}
        assert len(held) == len(first)
        handed_on = {}
        for giver, at, taker, place in second:
            assert hosts[giver] == hosts[taker]
            assert giver != taker
            assert (taker, place) not in held
            handed_on[taker, place] = held[giver, at]
        assert len(handed_on) == len(second)
        staged = {(r, at) for r, at in held if at >= transfers[r].num_received}
        for rank, transfer in enumerate(transfers):
            behind = sorted(at for r, at in staged if r == rank)
            first_staged = transfer.num_received
            assert behind == list(range(first_staged, first_staged + len(behind)))
            num_staged[rank] += len(behind)
        assert staged <= {(giver, at) for giver, at, _, _ in second}
        held = {place: row for place, row in held.items() if place not in staged}
        held.update(handed_on)
        assert held == {(receiver, at): (sender, row) for sender, row, receiver, at in direct}
        # A row crosses once for each host.
        far = [(s, row, hosts[r]) for s, row, r, _ in first if hosts[s] != hosts[r]]
        assert len(far) == len(set(far))
        needed = {(s, row, hosts[r]) for s, row, r, _ in direct if hosts[s] != hosts[r]}
        assert set(far) == needed
        crossed += far
    if degree < 2:  # one stage: then a row crosses once for a host in all
        assert len(crossed) == len(set(crossed))
    return num_staged.tolist()


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_other_ranks_of_a_host_receive_for_one_that_needs_much(degree):
    hosts = (0, 0, 1, 1)
    where, stages = stages_of(LAST_SEES_ALL.slices(), hosts, degree, "sequential")
    staged = check_legs(where, stages, hosts, degree)
    # The last rank needs the rows of two others, and by its own link it receives as many as one of these sends.
    assert staged[:2] == [0, 0]
    assert staged[2] >= (32 if degree == 2 else 64)
    assert staged[3] == 0
    loads = StageLoads.of(RankRows.of(where), torch.tensor(hosts))
    assert loads.hops[0].far == 160
    assert loads.relayed.hops[0].far <= 96


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("name", ["varlen_causal", "full_63x63"])
def test_loads_are_those_of_the_tables(name, hosts):
    slices, cp_size = SQUARE[name].slices(), len(hosts)
    where, stages = stages_of(slices, hosts, 1)
    loads = StageLoads.of(RankRows.of(where), torch.tensor(hosts))
    transfers = [x.transfer for rank in stages for x in rank if x.transfer is not None]
    ways = [[x] for x in transfers], [x.legs for x in transfers]
    for its_loads, legs in zip((loads, loads.relayed), ways, strict=True):
        for hop, of_ranks in zip(its_loads.hops, zip(*legs, strict=True), strict=True):
            sums = {True: [], False: []}
            crossing = 0
            for rank, transfer in enumerate(of_ranks):
                for is_near, counts in itertools.product(
                    sums, (transfer.send_counts, transfer.recv_counts)
                ):
                    peers = [p for p in range(cp_size) if (hosts[p] == hosts[rank]) == is_near]
                    sums[is_near].append(sum(counts[p] for p in peers))
                crossing += sum(
                    n for p, n in enumerate(transfer.recv_counts) if hosts[p] != hosts[rank]
                )
            assert hop == (max(sums[True]), max(sums[False]), crossing)


def test_rows_that_all_need_are_dealt_evenly():
    hosts = (0,) * 4 + (1,) * 4
    slices = AttnSlices.full(8 * 512)
    where = dispatch(slices, 8, chunk_size=LEAST_PART)
    loads = StageLoads.of(RankRows.of(where), torch.tensor(hosts))
    (flat,), (first, second) = loads.hops, loads.relayed.hops
    assert flat == (3 * 512, 4 * 512, 2 * 4 * 4 * 512)
    assert first == (3 * 512, 512, 2 * 4 * 512)
    assert second == (3 * 512, 0, 0)


def test_relays_where_they_win():
    full = StageLoads.of(RankRows.of(dispatch(AttnSlices.full(16384), 8)), torch.arange(8) // 4)
    windows = AttnSlices.from_cu_seqlens(list(range(0, 16385, 2048)), causal=True)
    alone = StageLoads.of(RankRows.of(dispatch(windows, 8)), torch.arange(8) // 4)
    cost = CostModel.of_heads()
    assert choose_pass(full, cost).is_relayed
    assert not choose_pass(full, cost, relayed=False).is_relayed
    assert not choose_pass(alone, cost).is_relayed
    assert choose_pass(alone, cost, relayed=True).is_relayed
    assert not choose_pass(
        full, CostModel.of_heads(bytes_per_second_between_hosts=350e9)
    ).is_relayed
    one_host = StageLoads.of(RankRows.of(dispatch(AttnSlices.full(16384), 8)))
    assert not choose_pass(one_host, cost, relayed=True).is_relayed


def test_options_decide():
    slices = AttnSlices.full(16384)
    for hierarchical, hosts, expected in (
        (None, None, False),
        (True, None, False),
        (None, 4, True),
        (False, 4, False),
        (None, 8, False),
        (True, (0, 0, 1, 1, 0, 0, 1, 1), True),
    ):
        options = ContextParallelOptions(hosts=hosts, hierarchical=hierarchical)
        plans = [plan_rank(slices, 8, rank, options) for rank in (0, 7)]
        assert [x.relayed for x in plans] == [(expected, expected)] * 2
        transfers = [x.transfer for x in plans[0].forward if x.transfer is not None]
        assert [x.legs is not None for x in transfers] == [expected] * len(transfers)


def test_hosts():
    assert hosts_of(None, 4) is None
    assert hosts_of(4, 4) is None
    assert hosts_of(2, 5) == (0, 0, 1, 1, 2)
    assert hosts_of((7, 7, 3, 7), 4) == (0, 0, 1, 0)
    assert hosts_of([5, 5], 2) is None
    with pytest.raises(ValueError, match="`hosts` must be the host of each of 3 ranks, got 2"):
        hosts_of([0, 1], 3)
    for wrong, error, match in (
        (0, ValueError, "`hosts` must be 1 rank of a host or more, got 0"),
        ([0, -1], ValueError, r"`hosts` must be numbers from 0 on, got \[0, -1\]"),
        ("ab", TypeError, "`hosts` must be None, a number of ranks or the host of each rank"),
        (True, TypeError, "`hosts` must be integers, got True"),
        ([0.5], TypeError, "`hosts` must be integers, got 0.5"),
    ):
        with pytest.raises(error, match=match):
            ContextParallelOptions(hosts=wrong)
    with pytest.raises(TypeError, match="`hierarchical` must be True or False"):
        ContextParallelOptions(hierarchical=1)


def launch(monkeypatch, **environment):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_hosts_by_the_launcher(monkeypatch):
    launch(monkeypatch)
    assert launched_hosts(range(8)) is None
    launch(monkeypatch, LOCAL_WORLD_SIZE="4", WORLD_SIZE="8", GROUP_WORLD_SIZE="2")
    assert launched_hosts(range(8)) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert launched_hosts([1, 3, 5, 7]) == (0, 0, 1, 1)
    assert launched_hosts([4, 5]) is None
    launch(monkeypatch, LOCAL_WORLD_SIZE="4", WORLD_SIZE="8")
    assert launched_hosts([0, 4]) == (0, 1)
    # Hosts with 4 and 2 processes: neither of them knows where ranks are.
    for local in ("4", "2"):
        launch(monkeypatch, LOCAL_WORLD_SIZE=local, WORLD_SIZE="6", GROUP_WORLD_SIZE="2")
        assert launched_hosts(range(6)) is None
    launch(monkeypatch, LOCAL_WORLD_SIZE="8", WORLD_SIZE="8", GROUP_WORLD_SIZE="1")
    assert launched_hosts(range(8)) is None
    launch(monkeypatch, LOCAL_WORLD_SIZE="all", WORLD_SIZE="8")
    assert launched_hosts(range(8)) is None


def test_a_plan_asks_the_launcher(monkeypatch):
    launch(monkeypatch, LOCAL_WORLD_SIZE="4", WORLD_SIZE="8", GROUP_WORLD_SIZE="2")
    slices = AttnSlices.full(16384)
    by_cost, asked, refused = (ContextParallelOptions(hierarchical=x) for x in (None, True, False))
    for options, relayed in ((by_cost, True), (asked, True), (refused, False)):
        planned = plan(slices, ranks=(8, 5), options=options).planned
        assert planned.hosts == (0,) * 4 + (1,) * 4
        assert planned.relayed == (relayed, relayed)
        assert plan(slices, ranks=(4, 1), options=options).planned.hosts is None
    # Where one rank of a host needs a row, nobody is there to hand it on to.
    window = AttnSlices.sliding_window(16384, None, (64, 0))
    assert plan(window, ranks=(8, 5)).planned.relayed == (False, False)
    assert plan(window, ranks=(8, 5), options=asked).planned.relayed == (True, True)
    said = ContextParallelOptions(hosts=8, hierarchical=True)
    assert plan(slices, ranks=(8, 5), options=said).planned.hosts is None


def test_hosts_that_nobody_says_are_a_warning(monkeypatch, caplog):
    launch(monkeypatch)
    asked = ContextParallelOptions(hierarchical=True)
    for _ in range(2):
        assert plan(AttnSlices.full(16384), ranks=(8, 5), options=asked).planned.hosts is None
    (said,) = (x.message for x in caplog.records if "hierarchical" in x.message)
    assert said.endswith("give `hosts`")
