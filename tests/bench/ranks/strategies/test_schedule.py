"""HybridCP's schedule."""

import random

import pytest

from magi_bench.ranks.strategies.schedule import (
    best_schedule,
    ranks_for,
    schedule,
    total_loads,
)
from magi_bench.workloads import lengths


def test_ranks_by_length():
    assert [ranks_for(x, 100, 8) for x in (1, 100, 101, 200, 201, 400, 401, 9999)] == [
        *(1, 1, 2, 2, 4, 4, 8, 8)
    ]
    assert ranks_for(500, 100, 6) == 6


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 32])
def test_every_document_once_and_no_rank_without_work(num_ranks):
    rng = random.Random(num_ranks)
    for _ in range(20):
        given = [int(2 ** rng.uniform(0, 10)) for _ in range(rng.randint(1, 60))]
        rounds = schedule(given, num_ranks, 200)
        documents = [x for groups in rounds for group in groups for x in group.documents]
        assert sorted(documents) == list(range(len(given)))
        for groups in rounds:
            assert sum(group.size for group in groups) == num_ranks
            for group in groups:
                assert group.lengths == [given[x] for x in group.documents] != []
                assert all(group.size >= ranks_for(x, 200, num_ranks) for x in group.lengths)


def test_long_documents_have_groups_and_short_ones_fill_the_rest():
    (groups,) = schedule([400, 200, 100, 100], 8, 100)
    assert [(group.size, group.documents) for group in groups] == [
        *((4, [0]), (2, [1]), (1, [2]), (1, [3]))
    ]


def test_one_document_has_all_ranks():
    (groups,) = schedule([10], 8, 100)
    assert [(group.size, group.documents) for group in groups] == [(8, [0])]


def test_the_last_document_of_the_heaviest_group_waits_for_the_next_round():
    rounds = schedule([90, 80, 60], 2, 100)
    assert [[group.documents for group in groups] for groups in rounds] == [[[0], [1]], [[2]]]
    assert [[group.size for group in groups] for groups in rounds] == [[1, 1], [2]]


def test_the_best_schedule_is_about_balanced():
    for seed in range(5):
        given = lengths.sample("seeds", 8 * 8192, seed)
        loads = total_loads(best_schedule(given, 8, 8192), 8)
        assert max(loads) < 1.2 * sum(loads) / 8
        assert max(loads) <= max(total_loads(schedule(given, 8, 8192), 8))


def test_the_best_schedule_moves_no_more_than_it_must():
    assert best_schedule([100] * 8, 8, 100) == schedule([100] * 8, 8, 100)
