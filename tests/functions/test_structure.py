"""Functions of one structure: the same code over tensors of the same kinds."""

import builtins
import functools
import math
import operator

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from magi_compile.functions.structure import structure_of

LIMIT = 3


def of_table(table, window=None, scale=1.0):
    def function(q, kv):
        return (table[q] == table[kv]) & (q - kv < (window or LIMIT)) & (scale * q < 9)

    return function


def of_two(one, other):
    return lambda q, kv: one[q] == other[kv]


def joined(*functions):
    def function(q, kv):
        return functools.reduce(torch.logical_and, [f(q, kv) for f in functions])

    return function


def both(*functions):
    def function(q, kv):
        result = True
        for f in functions:
            result = operator.and_(result, f(q, kv))
        return result

    return function


def table(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def test_other_numbers_are_of_one_structure():
    x, y = table(1, 2), table(3, 4)
    first, second = structure_of(of_table(x, 5)), structure_of(of_table(y, 5))
    assert first.key == second.key
    assert hash(first.key) == hash(second.key)
    assert first.tensors[0] is x
    assert second.tensors[0] is y


@pytest.mark.parametrize(
    "other",
    [
        of_table(table(1, 2, 3)),
        of_table(table(1, 2, dtype=torch.int32)),
        of_table(torch.zeros(2, 2, dtype=torch.int64)[:, 0]),
        of_table(table(1, 2), 5),
        of_table(table(1, 2), True),
        of_table(table(1, 2), scale=-0.0),
        of_table(table(1, 2), scale=1),
        of_table(torch.nn.Parameter(table(1, 2), requires_grad=False)),
        of_table([table(1, 2)]),
        of_table((table(1, 2),)),
        lambda q, kv: q >= kv,
    ],
)
def test_others_are_not(other):
    assert structure_of(other).key != structure_of(of_table(table(1, 2))).key


def test_one_and_true_are_not_alike():
    assert structure_of(of_table(LIMIT, 1)).key != structure_of(of_table(LIMIT, True)).key


def test_a_tensor_that_is_reached_twice():
    x, y = table(1, 2), table(1, 2)
    same, different = structure_of(of_two(x, x)), structure_of(of_two(x, y))
    assert same.key != different.key
    assert [len(s.tensors) for s in (same, different)] == [1, 2]
    assert same.key == structure_of(of_two(y, y)).key


def test_globals_defaults_and_other_functions(monkeypatch):
    def key():
        return structure_of(both(of_table(table(1, 2)), lambda q, kv, most=4: kv < most)).key

    before = key()
    assert key() == before
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert key() != before
    monkeypatch.undo()
    assert key() == before
    monkeypatch.setitem(globals(), "operator", math)
    assert key() != before


def test_functions_of_pytorch():
    first, second = (structure_of(of_two(x, 1)) for x in (torch.nn.functional.pad, torch.Size))
    assert first.key == structure_of(of_two(torch.nn.functional.pad, 1)).key
    assert first.key != second.key


def test_what_a_function_of_pytorch_holds(monkeypatch):
    def key(*values):
        return structure_of(and_masks(of_table(table(*values)), lambda q, kv: q < LIMIT)).key

    before = key(1, 2)
    assert key(3, 4) == before
    assert key(1, 2, 3) != before
    both = and_masks(lambda q, kv: q < LIMIT)
    of_both = structure_of(both).key
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert key(1, 2) != before
    assert structure_of(both).key != of_both


def test_a_function_that_calls_itself():
    def function(q, kv, depth=2):
        return q >= kv if depth == 0 else function(q, kv, depth - 1)

    def other(q, kv, depth=2):
        return q >= kv if depth == 0 else other(q, kv, depth - 1)

    assert structure_of(function) is not None
    assert structure_of(function).key != structure_of(other).key


def test_functions_of_pytorch_that_are_replaced(monkeypatch):
    def function(q, kv):
        return torch.logical_and(q >= kv, q < torch.iinfo(torch.int8).max) & isinstance(
            q, torch.Tensor
        )

    before = structure_of(function).key
    monkeypatch.setattr(torch, "logical_and", torch.logical_or)
    assert structure_of(function).key != before


def test_numbers_that_are_added_to_builtins(monkeypatch):
    def function(q, kv):
        return q - kv < most  # noqa: F821

    monkeypatch.setattr(builtins, "most", 3, raising=False)
    assert structure_of(function) is None


def test_equal_ranges_that_are_not_alike():
    one, other = (structure_of(of_two(range(0, end, 2), 1)) for end in (3, 4))
    assert one.key != other.key


def test_a_list_that_is_reached_twice():
    x, y = [1], [1]
    assert structure_of(of_two(x, x)).key != structure_of(of_two(x, y)).key
    assert structure_of(of_two(x, x)).key == structure_of(of_two(y, y)).key


def test_attributes_of_tensors(monkeypatch):
    def of_window(x):
        return lambda q, kv: (x[q] == x[kv]) & (q - kv < x.window)

    x = table(1, 2)
    x.window = 3
    assert structure_of(of_window(x)) is None
    assert structure_of(of_table(x)) is not None  # which does not ask for it
    x = table(1, 2)
    assert structure_of(of_window(x)) is not None
    monkeypatch.setattr(torch.Tensor, "window", 3, raising=False)
    assert structure_of(of_window(x)) is None


def of_an_import(q, kv):
    import tests.functions.test_structure as here

    return q - kv < here.LIMIT


def of_a_name(q, kv):
    from tests.functions import test_structure

    return q - kv < test_structure.LIMIT


def of_a_sibling(q, kv):
    from .test_structure import LIMIT

    return q - kv < LIMIT


@functools.wraps(torch.nn.functional.pad)
def like_one_of_pytorch(q, kv):
    return q - kv < MOST_OF_ANY[0]


MOST_OF_ANY = {0: 3}
del like_one_of_pytorch.__wrapped__


def with_a_count():
    count = 0

    def function(q, kv):
        nonlocal count
        count += 1
        return q - kv < count

    return function


def with_its_own_count(q, kv):
    count = 3

    def next_one():
        nonlocal count
        count += 1
        return count

    return q - kv < next_one()


def with_a_global(q, kv):
    global LIMIT
    LIMIT += 0
    return q - kv < LIMIT


def test_variables_of_its_own():
    assert structure_of(with_its_own_count) is not None


class Mask:
    limit = 3

    def __call__(self, q, kv):
        return q - kv < self.limit


def with_attribute():
    def function(q, kv):
        return q >= kv

    function.limit = 3
    return function


def not_there_yet():
    def function(q, kv):
        return q >= later

    return function
    later = 3


@pytest.mark.parametrize(
    "function",
    [
        Mask(),
        Mask().__call__,
        functools.partial(of_two, 1),
        of_table(Mask()),
        of_table({"a": 3}),
        of_table(table(1, 2).to_sparse()),
        joined(of_two(1, 2)),
        with_attribute(),
        not_there_yet(),
        lambda q, kv: getattr(Mask, "limit") > q,  # noqa: B009
        of_table([0] * 1000),
        of_table(torch.nn.Threshold(1, 2)),
        of_table(torch.zeros(2).item),
        of_an_import,
        of_a_name,
        of_a_sibling,
        like_one_of_pytorch,
        with_a_count(),
        with_a_global,
        lambda q, kv: q >= kv if torch.is_grad_enabled() else q <= kv,
        lambda q, kv: q - kv < torch.distributed.get_rank(),
        lambda q, kv: q - kv < torch.get_num_threads(),
        lambda q, kv: q >= kv if torch.get_default_device().type == "cpu" else q <= kv,
        lambda q, kv: q >= kv if torch.backends.cudnn.enabled else q <= kv,
        lambda q, kv: q - kv < int(open("limit").read()),  # noqa: SIM115
        lambda q, kv: q - kv < __import__("tests.functions.test_structure").LIMIT,
        lambda q, kv: q >= kv if of_two.__name__ == "of_two" else q <= kv,
        of_two(torch.distributed.get_rank, 1),
        lambda q, kv: operator.attrgetter("backends.cudnn.enabled")(torch) & (q >= kv),
    ],
    ids=range(29),
)
def test_what_may_be_more_than_it_shows(function):
    assert structure_of(function) is None
