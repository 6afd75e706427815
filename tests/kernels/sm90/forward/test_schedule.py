"""The order in which thread blocks of the forward draw their items: the source, for threads of a CPU."""

import ctypes
import struct
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from tests.kernels.support.cpp import ON_A_CPU, compile_library

SOURCE = """
#include "common/ptx.cuh"
#include "common/scheduler.cuh"

// One block after another draws until it finds nothing, or padding, from where it goes on behind the section.
extern "C" int draw(const ffa::Schedule* schedule, int num_filled, int num_blocks, int (*items)[2]) {
    int count = 0;
    gridDim.x = num_blocks;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        for (ffa::Scheduler scheduler(*schedule); scheduler.has_work(); scheduler.advance()) {
            const ffa::WorkItem item = scheduler.item();
            if (item.tile >= num_filled) {
                scheduler.leave_section();
                continue;
            }
            items[count][0] = item.tile, items[count++][1] = item.head;
        }
    }
    return count;
}
"""


class Sizes(NamedTuple):
    num_tiles: int
    num_heads: int
    heads_per_section: int


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_library(tmp_path_factory, SOURCE, "-O1", ON_A_CPU)


def draw(library, sizes, num_filled, num_blocks):
    """(tile, head) in the order in which they are drawn."""
    ticket = torch.zeros(1, dtype=torch.int32)
    schedule = struct.pack("<2Q3i4x", 0, ticket.data_ptr(), *sizes)
    items = torch.full((sizes.num_tiles * sizes.num_heads + 1, 2), -7, dtype=torch.int32)
    count = library.draw(schedule, num_filled, num_blocks, ctypes.c_void_p(items.data_ptr()))
    assert (items[count:] == -7).all()
    return [tuple(item) for item in items[:count].tolist()]


SIZES = [Sizes(10, 8, 2), Sizes(10, 8, 8), Sizes(10, 1, 1), Sizes(1, 6, 3)]


@pytest.mark.parametrize("num_blocks", [1, 4, 1000])
@pytest.mark.parametrize("padding", [0, 1, 5, 9])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_item_once(library, sizes, padding, num_blocks):
    num_filled = max(sizes.num_tiles - padding, 1)
    num_blocks = min(num_blocks, sizes.num_tiles * sizes.num_heads)
    found = draw(library, sizes, num_filled, num_blocks)
    expected = {(tile, head) for tile in range(num_filled) for head in range(sizes.num_heads)}
    assert len(found) == len(expected)
    assert set(found) == expected


def test_one_section_after_another(library):
    sizes = Sizes(num_tiles=6, num_heads=4, heads_per_section=2)
    sections = [[(tile, head + i) for tile in range(6) for i in range(2)] for head in (0, 2)]
    assert draw(library, sizes, 6, 1) == [*sections[0], *sections[1]]
