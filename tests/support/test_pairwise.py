"""Every pair of values is in some tuple, and there are far fewer tuples than in the product."""

import itertools

from tests.support.pairwise import pairwise


def test_every_pair_meets():
    axes = [range(5), "abcd", (False, True), (1.0, 2.0, 3.0)]
    rows = pairwise(*axes)
    assert set(rows) <= set(itertools.product(*axes))
    for (i, x), (j, y) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(x, y))
    assert 20 <= len(rows) < 30
    assert rows == pairwise(*axes)
    every = pairwise(*axes, others_are_slow=True)
    assert every[: len(rows)] == rows
    assert {*rows, *(x.values for x in every[len(rows) :])} == set(itertools.product(*axes))
    assert len(every) == 5 * 4 * 2 * 3


def test_two_axes_are_the_product():
    assert pairwise("ab", (1, 2, 3)) == list(itertools.product("ab", (1, 2, 3)))
