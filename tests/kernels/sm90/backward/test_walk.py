"""The walk of the backward kernel over a plan: its source, compiled for the CPU."""

import ctypes
import itertools

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from magi_compile.plan.rects import NO_DIAG
from magi_compile.plan.tiles import RUN_FIELDS, build_tile_plan
from tests.kernels.support.cpp import compile_library
from tests.support.cases import MASKS

BLOCK_COLS, TILE_ROWS, ALIGNMENT, NUM_GROUPS = 64, 128, 16, 3
SOURCE = """
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
#include "backward/schedule/walk.cuh"

extern "C" int walk(const int* run, int num_groups, bool is_ascending, int (*visits)[3]) {
    const ffa::backward::RunWalk<64> walk{*reinterpret_cast<const ffa::Run*>(run), num_groups, is_ascending};
    for (int left = walk.num_visits(); left-- > 0; ++visits) {
        const ffa::backward::Visit visit = walk.visit(left);
        (*visits)[0] = visit.col, (*visits)[1] = visit.group, (*visits)[2] = walk.is_masked(visit.col);
    }
    return walk.num_visits();
}
"""


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """`walk(run, is_ascending)` gives the visits of a run as `(col, group, is_masked)`."""
    library = compile_library(tmp_path_factory, SOURCE, "-O1 -fsanitize=undefined")

    def visits(run: list[int], is_ascending: bool) -> list[list[int]]:
        aligned = torch.tensor(run, dtype=torch.int32)
        rows = torch.empty(NUM_GROUPS * 1000, 3, dtype=torch.int32)
        count = library.walk(
            ctypes.c_void_p(aligned.data_ptr()),
            NUM_GROUPS,
            ctypes.c_bool(is_ascending),
            ctypes.c_void_p(rows.data_ptr()),
        )
        return rows[:count].tolist()

    return visits


def runs_of(case) -> list[tuple[range, dict[str, int], list[int]]]:
    """Every run of the walk by keys: the rows of its tile, its fields by name, and as a list."""
    plan = build_tile_plan(
        case.slices(),
        q_tile_rows=TILE_ROWS,
        q_block_cols=TILE_ROWS,
        k_tile_rows=TILE_ROWS,
        k_block_cols=BLOCK_COLS,
    )
    return [
        (range(row_begin, row_end), dict(zip(RUN_FIELDS, run, strict=True)), run)
        for row_begin, row_end, begin, end in plan.k_tiles.tolist()
        for run in plan.k_runs[begin:end].tolist()
    ]


@pytest.mark.parametrize("is_ascending", [False, True], ids=["descending", "ascending"])
@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.id)
def test_every_block_once_for_every_head(case, is_ascending, walk):
    for _, run, fields in runs_of(case):
        first = run["first"] // ALIGNMENT * ALIGNMENT
        cols = range(first, run["col_end"], BLOCK_COLS)
        visits = [(col, group) for col, group, _ in walk(fields, is_ascending)]
        assert sorted(visits) == sorted(itertools.product(cols, range(NUM_GROUPS)))
        if run["diag_hi"] < NO_DIAG:  # a window: head by head
            groups = [group for _, group in visits]
            assert len(list(itertools.groupby(groups))) == NUM_GROUPS
            visits = visits[: len(cols)]
        walked = [col for col, _ in visits]
        assert walked == sorted(walked, reverse=not is_ascending)


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.id)
def test_what_is_not_masked_is_visible(case, walk):
    for rows, run, fields in runs_of(case):
        if len(rows) < TILE_ROWS:
            continue  # always masked
        for col, _, is_masked in walk(fields, False):
            if not is_masked:
                # Both edges move right with the row, so the outermost rows decide.
                assert (run["row_begin"], run["row_end"]) == (rows.start, rows.stop)
                assert max(run["col_begin"], rows[-1] + run["diag_lo"]) <= col
                assert col + BLOCK_COLS <= min(run["col_end"], rows[0] + run["diag_hi"])
