"""The plan against the dense mask: what is seen, what moves, and that nothing moves in vain."""

import pytest
import torch

from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads, plan_communication
from magi_compile.dtensor.planning.dispatch import STRATEGIES, dispatch
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.masks import SQUARE
from tests.support.pairwise import pairwise

CHUNK = 16


def dense_of(slices, plan):
    """The mask `[rows, keys]` over the padded sequences."""
    dense = torch.zeros(plan.total_padded, plan.keys.total_padded, dtype=torch.bool)
    dense[: plan.total, : plan.keys.total] = slices.to_dense()
    return dense


def all_stages(slices, cp_size, degree, strategy="local"):
    where = dispatch(slices, cp_size, chunk_size=CHUNK, strategy=strategy)
    comm = plan_communication(RankRows.of(where), [degree])
    stages = [comm.stages(rank)[0] for rank in range(cp_size)]
    return where, stages


def rows_of(ranges):
    parts = [torch.arange(row, row + count) for _, row, _, count in ranges.tolist()]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def buffers_of(where, stages, stage):
    """The sequence positions in every rank's buffer of a stage, by really moving them."""
    cp_size = len(stages)
    sent = []
    for rank in range(cp_size):
        transfer = stages[rank][stage].transfer
        rows = where.keys.positions(rank)[rows_of(transfer.sends)]
        sent.append(rows.split(transfer.send_counts))
    buffers = []
    for rank in range(cp_size):
        transfer = stages[rank][stage].transfer
        arrived = [sent[peer][rank] for peer in range(cp_size)]
        assert [len(x) for x in arrived] == transfer.recv_counts
        assert transfer.peak_received == max(
            rank_stages[stage].transfer.num_received for rank_stages in stages
        )
        buffer = torch.full((transfer.num_received,), -1)
        buffer[rows_of(transfer.recvs)] = torch.cat(arrived)
        buffers.append(buffer)
    return buffers


@pytest.mark.parametrize(
    ("case", "cp_size", "degree"),
    pairwise(SQUARE.values(), [1, 2, 3, 8], [0, 1, 3], others_are_slow=True),
    ids=lambda x: getattr(x, "name", x),
)
def test_stages_cover_the_mask_once(case, cp_size, degree):
    slices = case.slices()
    check_stages(slices, *all_stages(slices, cp_size, degree))


def check_stages(slices, where, stages):
    """What ranks attend to in their stages is the mask, each pair once; and nothing is received in vain."""
    cp_size, dense = where.cp_size, dense_of(slices, where)
    seen = torch.zeros_like(dense, dtype=torch.int32)
    for stage in range(len(stages[0])):
        in_place = stages[0][stage].transfer is None
        buffers = None if in_place else buffers_of(where, stages, stage)
        for rank in range(cp_size):
            rows = where.positions(rank)
            keys = where.keys.positions(rank) if in_place else buffers[rank]
            part = stages[rank][stage].slices
            part.validate()
            assert (part.seqlen_q, part.seqlen_k) == (len(rows), len(keys))
            local = part.to_dense()
            seen[rows[:, None], keys[None, :]] += local.int()
            if not in_place:
                assert torch.equal(keys, keys.sort().values)
                assert bool(dense[rows][:, keys].any(0).all()), (
                    "a row was received that nobody sees"
                )
    assert torch.equal(seen, dense.int())


@pytest.mark.parametrize("degree", [0, 2])
@pytest.mark.parametrize("name", ["varlen_causal", "holes", "full_63x63"])
def test_both_sides_name_the_same_ranges(name, degree):
    _, stages = all_stages(SQUARE[name].slices(), 3, degree)
    for stage in range(len(stages[0])):
        if stages[0][stage].transfer is None:
            continue
        sent, received = [], []
        for rank in range(3):
            transfer = stages[rank][stage].transfer
            sent += [(rank, *columns) for columns in transfer.sends.tolist()]
            received += [(rank, *columns) for columns in transfer.recvs.tolist()]
        mirrored = [
            (sender, receiver, row, buffer_row, count)
            for receiver, sender, buffer_row, row, count in received
        ]
        assert sorted(sent) == sorted(mirrored)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_covers_the_mask(strategy):
    slices = SQUARE["varlen_causal"].slices()
    where, stages = all_stages(slices, 4, 2, strategy)
    dense = dense_of(slices, where)
    area = sum(stage.slices.area() for rank in stages for stage in rank)
    assert area == int(dense.sum())


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_remote_rows_move_once_in_equal_parts(degree):
    slices = AttnSlices.full(8 * 64)
    where, stages = all_stages(slices, 8, degree)
    for rank in range(8):
        counts = [stage.transfer.num_received for stage in stages[rank][1:]]
        assert sum(counts) == where.total_padded - where.seqlen_local
        assert max(counts) - min(counts) <= CHUNK
        assert all(stage.transfer.recv_counts[rank] == 0 for stage in stages[rank][1:])


@pytest.mark.parametrize("case", SQUARE.values(), ids=lambda case: case.name)
def test_stage_loads_are_those_of_the_dense_mask(case):
    slices = case.slices()
    where = dispatch(slices, 3, chunk_size=CHUNK)
    check_loads(slices, where)


def check_loads(slices, where):
    loads = StageLoads.of(RankRows.of(where))
    dense = dense_of(slices, where)
    mine, keys = ([x.positions(rank) for rank in range(3)] for x in (where, where.keys))
    assert loads.area.tolist() == [int(dense[r].sum()) for r in mine]
    pairs = zip(mine, keys, strict=True)
    assert loads.local_area.tolist() == [int(dense[r][:, s].sum()) for r, s in pairs]
    needed = torch.tensor([[int(dense[r][:, s].any(0).sum()) for s in keys] for r in mine])
    assert loads.recv_rows.tolist() == (needed.sum(1) - needed.diag()).tolist()
    assert loads.send_rows.tolist() == (needed.sum(0) - needed.diag()).tolist()


@pytest.mark.parametrize("name", ["varlen_causal", "holes", "shared_prefix"])
def test_degrees_side_by_side_are_those_on_their_own(name):
    slices = SQUARE[name].slices()
    where = dispatch(slices, 4, chunk_size=CHUNK)
    rows, degrees = RankRows.of(where), [3, 0, 1]
    together = plan_communication(rows, degrees)
    alone = [plan_communication(rows, [degree]) for degree in degrees]
    for rank in range(4):
        for stages, (expected,) in zip(
            together.stages(rank), (plan.stages(rank) for plan in alone), strict=True
        ):
            assert str(stages) == str(expected)


def test_no_remote_stage_where_nothing_moves():
    _, stages = all_stages(AttnSlices.causal(64), 1, 3)
    assert [stage.transfer for stage in stages[0]] == [None]
    _, stages = all_stages(AttnSlices.from_slices([], 64, 64), 2, 3)
    assert [[len(stage.slices) for stage in rank] for rank in stages] == [[0], [0]]


def test_bad_degree():
    slices = AttnSlices.causal(64)
    where = dispatch(slices, 2, chunk_size=8)
    with pytest.raises(ValueError, match=r"`degrees` must not be negative, got \[2, -1\]"):
        plan_communication(RankRows.of(where), [2, -1])
