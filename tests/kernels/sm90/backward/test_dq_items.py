"""In which order rows of dq are rounded: the source, compiled for the CPU."""

import ctypes
from itertools import product

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from tests.kernels.support.cpp import ON_A_CPU, compile_library

SOURCE = """
#include "common/ptx.cuh"
#include "backward/dq_convert.cuh"

extern "C" int items(int row_groups, int num_heads, int heads_of_turn, int group, int passes, int (*to)[2]) {
    const ffa::backward::DqItems items{{nullptr, row_groups}, nullptr, 0, num_heads, group, 1.f};
    for (int i = 0; i < items.count(); ++i) {
        const ffa::backward::DqItem item = items.item(i, {heads_of_turn, passes});
        to[i][0] = item.head, to[i][1] = item.group;
    }
    return items.count();
}
"""


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """`items(row_groups, heads, heads of a turn, heads of a group, passes)`: (head, row group) of each."""
    library = compile_library(tmp_path_factory, SOURCE, "-O1", ON_A_CPU)

    def listed(*arguments):
        to = torch.empty(1000, 2, dtype=torch.int32)
        count = library.items(*arguments, ctypes.c_void_p(to.data_ptr()))
        return [tuple(x) for x in to[:count].tolist()]

    return listed


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("sections", [1, 3])
def test_row_by_row(sections, group, items):
    heads = 4 * sections
    found = items(5, heads, 4, group, 1)
    wanted = [
        (head, row)
        for first in range(0, heads, 4)
        for row in range(5)
        for head in range(first, first + 4)
    ]
    assert found == wanted


@pytest.mark.parametrize(("group", "passes"), [(1, 1), (2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("sections", [1, 3])
def test_passes(sections, group, passes, items):
    """Of each section the last query heads of all groups first, as tiles walk."""
    heads, of_pass = 4 * sections, group // passes
    found = items(5, heads, 4, group, passes)
    assert sorted(found) == list(product(range(heads), range(5)))
    wanted = [
        (first + kv_head * group + i * of_pass + head, row)
        for first in range(0, heads, 4)
        for i in reversed(range(passes))
        for row in range(5)
        for kv_head in range(4 // group)
        for head in range(of_pass)
    ]
    assert found == wanted
