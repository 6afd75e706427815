"""The order of additions to dq, against a count of them one by one."""

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.sm90.backward.order import turns_of_tiles
from magi_compile.plan.tiles import build_tile_plan
from tests.kernels.support.dq_additions import GROUP_ROWS, additions_of_tiles
from tests.support.cases import MASKS


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "padded"])
@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.id)
def test_turns_count_the_additions_of_earlier_tiles(case, exact):
    plan = build_tile_plan(
        case.slices(),
        q_tile_rows=128,
        q_block_cols=128,
        k_tile_rows=128,
        k_block_cols=64,
        exact=exact,
    )
    num_runs = int(plan.k_tiles[:, 3].max()) if plan.k_tiles.numel() else 0
    plan.k_runs[num_runs:] = 1 << 30  # of no tile, so of no meaning
    row_groups = -(-case.seqlen_q // GROUP_ROWS)
    turns = turns_of_tiles(plan.k_tiles, plan.k_runs, row_groups)
    additions = additions_of_tiles(plan, row_groups)
    assert torch.equal(turns, additions.cumsum(0, dtype=torch.int32) - additions)
