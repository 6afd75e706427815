"""The graph of a mask_mod is made once for all values, and split into what all pairs share and the rest."""

import pytest
import torch

from magi_compile.functions.text import functions
from magi_compile.kernels.sm90.codegen.pointwise import UnknownOperation
from magi_compile.kernels.sm90.masks.mask_graph import mask_graph

CPU = torch.device("cpu")


def graph_of(arguments, result, *tables):
    function = functions(f"def mask({arguments}):\n    return {result}\n")["mask"]
    return mask_graph(function, tables, CPU)


def test_what_all_pairs_share_is_computed_by_torch():
    table = torch.arange(5)
    graph = graph_of(
        "q, kv, t0, s0", "(t0.cumsum(0)[q] > kv - 2 * s0) & (t0[kv] > t0.sum())", table
    )
    assert list(graph.indices.values()) == ["b", "h", "q", "kv"]
    assert list(graph.tables.values()) == [0]
    assert list(graph.symbols.values()) == [0]
    assert [node.name for node in graph.constants] == ["cumsum", "mul", "sum_1"]
    cumulated, doubled, total = graph.constants
    values = graph.computing(graph.constants)([table], [7])
    assert torch.equal(values[cumulated], table.cumsum(0))
    assert values[doubled] == 14
    assert int(values[total]) == 10
    few = graph.computing([doubled])([table], [7])
    assert few.keys() == {doubled, *graph.tables}


def test_nothing_is_computed_of_tables_alone():
    tables = [torch.arange(5), torch.arange(5)]
    graph = graph_of("q, t1", "t1[q] > 0", *tables)
    assert list(graph.tables.values()) == [1]
    assert graph.constants == []
    (value,) = graph.computing(list(graph.tables))(tables, []).values()
    assert value is tables[1]


def test_a_result_that_all_pairs_share():
    graph = graph_of("b, t0", "t0.sum() > 3", torch.arange(5))
    assert graph.result in graph.constants
    assert bool(graph.computing([graph.result])([torch.arange(5)], [])[graph.result])


@pytest.mark.parametrize(
    ("arguments", "result", "message"),
    [
        ("q, t0", "(t0[q], q)", "the result"),
        ("q, t0, s0", "t0[q] > 0 if s0 > 3 else q > 3", "a graph: GuardOnDataDependentSymNode"),
        ("q, t0", "t0[q, 3]", "a graph: "),
    ],
)
def test_what_has_no_graph(arguments, result, message):
    with pytest.raises(UnknownOperation, match=message):
        graph_of(arguments, result, torch.arange(5))
