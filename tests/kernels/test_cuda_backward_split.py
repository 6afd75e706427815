"""How the backward kernel divides its longest tiles: the source, compiled for the threads of a CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from magi_compile.kernels.cuda.nvrtc import source_dir
from magi_compile.masks.slices import MaskType
from magi_compile.plan.tiles import build_tile_plan
from magi_compile.testing.cases import MASKS, Case, one, varlen

BLOCK_COLS, ALIGNMENT, NUM_HEADS, MOST_TILES, ARRIVALS = 64, 16, 2, 64, 8
SOURCE = """
#include <algorithm>
#include "many_threads.cuh"
#undef __shared__
#define __shared__ static
using std::max;
using std::min;
inline void atomicAdd(unsigned long long* x, unsigned long long y) { __sync_fetch_and_add(x, y); }
#include "bwd_split.cuh"

using Dealer = ffa::SplitDealer<64, 64>;

extern "C" void deal(const int* tiles, const int* runs, int* table, int* arrivals, int num_tiles, int num_heads,
                     int group, float shares) {
    const Dealer::Params params{reinterpret_cast<const ffa::Tile*>(tiles), reinterpret_cast<const ffa::Run*>(runs),
                                {table, arrivals, nullptr}, num_tiles, num_heads, group, shares};
    launch(1, 64, [=] { Dealer::deal(params); });
}

extern "C" void read_entry(int* table, int entry, int* fields) {
    const ffa::SplitEntry read = ffa::split_entry({table, nullptr, nullptr}, entry);
    fields[0] = read.tile, fields[1] = read.part, fields[2] = read.num_parts;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("split")
    shutil.copy(Path(__file__).parent / "many_threads.cuh", path)
    (path / "main.cpp").write_text(SOURCE)
    options = f"-std=c++17 -O1 -shared -fPIC -w -pthread -I{source_dir()}"
    subprocess.run(["g++", *options.split(), "main.cpp", "-o", "split.so"], cwd=path, check=True)
    return ctypes.CDLL(str(path / "split.so"))


def address(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def deal(library, plan, group: int, shares: float) -> tuple[list[list[int]], torch.Tensor]:
    """The entries of the schedule as (tile, part, num_parts), and the counters of arrivals."""
    num_tiles = plan.k_tiles.shape[0]
    listed = min(num_tiles, MOST_TILES)
    table = torch.full((2 + listed * group,), -1, dtype=torch.int32)
    arrivals = torch.full((listed * NUM_HEADS * ARRIVALS + 1,), -1, dtype=torch.int32)
    tensors = (plan.k_tiles, plan.k_runs, table, arrivals)
    sizes = (num_tiles, NUM_HEADS, group, ctypes.c_float(shares))
    library.deal(*(address(x) for x in tensors), *sizes)
    fields, entries = torch.empty(3, dtype=torch.int32), []
    for entry in range(num_tiles + int(table[0])):
        library.read_entry(address(table), entry, address(fields))
        entries.append(fields.tolist())
    return entries, arrivals


def plan_of(case: Case):
    return build_tile_plan(
        case.slices(), q_tile_rows=128, q_block_cols=128, k_tile_rows=128, k_block_cols=BLOCK_COLS
    )


def blocks_of_tiles(plan) -> list[int]:
    runs = plan.k_runs.tolist()
    return [
        sum(-(-(run[3] - run[6] // ALIGNMENT * ALIGNMENT) // BLOCK_COLS) for run in runs[begin:end])
        for _, _, begin, end in plan.k_tiles.tolist()
    ]


CASES = [
    *MASKS,
    one(MaskType.CAUSAL, 12000),  # more tiles than may be divided
    varlen("one_long", [3000, *[130] * 30], MaskType.FULL),
]


@pytest.mark.parametrize("group", [1, 5, 6, 8, 64])
@pytest.mark.parametrize("shares", [2.0, 33.0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_long_tiles_are_divided(case, shares, group, library):
    plan = plan_of(case)
    blocks = blocks_of_tiles(plan)
    expected = []
    for tile, own in enumerate(blocks):
        share = own * shares / max(sum(blocks), 1)
        divisors = [n for n in range(1, group + 1) if group % n == 0]
        parts = next((n for n in divisors if n >= share), group) if tile < MOST_TILES else 1
        expected += [[tile, part, parts] for part in range(parts)]
    entries, arrivals = deal(library, plan, group, shares)
    assert entries == expected
    assert arrivals[:-1].eq(0).all()
    assert arrivals[-1] == -1


def test_a_tile_that_everything_sees(library):
    documents = [(at, at + 128, at, at + 128, MaskType.FULL) for at in range(128, 4096, 128)]
    plan = plan_of(Case("shared", 4096, 4096, [(0, 4096, 0, 128, MaskType.FULL), *documents]))
    entries, _ = deal(library, plan, 8, 132 / 4)
    assert entries[:9] == [*([0, part, 8] for part in range(8)), [1, 0, 1]]
