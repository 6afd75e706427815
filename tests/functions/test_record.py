"""The record of a function: what its symbols say of themselves."""

import torch

from magi_compile.functions.record import record

INDEX = torch.empty((), dtype=torch.int64, device="meta")


def shapes_of(function):
    found = []
    record(
        lambda q, kv: function(q, kv, found), {"q": INDEX, "kv": INDEX}, torch.device("cpu"), "x"
    )
    return found


def test_a_shape_that_was_changed_in_place_is_not_that_of_the_next_call():
    table = torch.arange(12).view(3, 4)

    def function(q, kv, found):
        row = table[q]
        found.append((row.shape, row.dtype))
        row.unsqueeze_(0)
        return row[0, kv] > 2

    assert shapes_of(function) == shapes_of(function) == [(torch.Size([4]), torch.int64)]


def test_results_follow_from_kinds():
    """Of a bool, an int and a float of one value, and by the default dtype."""

    def function(q, kv, found):
        found += [(q * x).dtype for x in (1, True, 1.0)]
        return q > kv

    default = torch.get_default_dtype()
    assert shapes_of(function) == [torch.int64, torch.int64, default]
    torch.set_default_dtype(torch.float64)
    try:
        assert shapes_of(function) == [torch.int64, torch.int64, torch.float64]
    finally:
        torch.set_default_dtype(default)
