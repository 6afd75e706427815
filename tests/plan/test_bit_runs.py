"""A plan of slices with bit blocks, walked plainly, gives back the mask bit for bit, by query tile and by key tile."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from magi_compile.masks.bits import BLOCK, unpack
from magi_compile.masks.evaluation.bit_blocks import slices_with_bits
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.slices import AttnSlices
from magi_compile.plan.tiles import RUN_FIELDS, build_tile_plan
from tests.plan.walked import seen


def mixed(b, h, q, kv):
    """Blocks in which everything is visible, or nothing, and others."""
    return ((q * kv % 5 < 2) & (q >= kv)) | ((kv < 140) & (q < 130) & (h == 0))


def walked(tiles, runs, edges, bits, dense, *, rows_are_keys):
    counts = torch.zeros(dense.shape, dtype=torch.int32)
    for _, _, run_begin, run_end in tiles.tolist():
        for run in runs[run_begin:run_end].tolist():
            fields = dict(zip(RUN_FIELDS, run, strict=True))
            rows = torch.arange(fields["row_begin"], fields["row_end"])
            visible = seen(run, rows, dense.shape[1], edges)
            if fields["bits"]:
                assert fields["num_lead"] + fields["num_trail"] == fields["num_blocks"]
                number, row = divmod(fields["bits"] - 1, BLOCK)
                block = unpack(bits[number])
                block = block.T if rows_are_keys else block
                width = fields["col_end"] - fields["first"]
                columns = slice(fields["first"], fields["col_end"])
                visible[:, columns] &= block[row : row + len(rows), :width]
            counts[rows] += visible.int()
    return counts


SIZES = [(300, 260, 2, Heads(2, 1)), (BLOCK, BLOCK, 1, Heads()), (100, 300, 3, Heads())]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("tile_rows", "block_cols"), [(128, 64), (64, 64), (192, 80), (16, 8)])
@pytest.mark.parametrize("exact", [True, False])
def test_the_plan_is_the_mask(sizes, tile_rows, block_cols, exact):
    seqlen_q, seqlen_k, batch, heads = sizes
    sizes = MaskSizes(batch, seqlen_q, seqlen_k, heads)
    slices = slices_with_bits(mixed, sizes, None, torch.device("cpu"))
    plan = build_tile_plan(
        slices,
        q_tile_rows=tile_rows,
        q_block_cols=block_cols,
        k_tile_rows=tile_rows,
        k_block_cols=block_cols,
        exact=exact,
    )
    dense = slices.to_dense()
    ours = walked(*plan[:3], slices.bits, dense, rows_are_keys=False)
    torch.testing.assert_close(ours, dense.int(), rtol=0, atol=0)
    ours = walked(*plan[3:], slices.bits, dense.T, rows_are_keys=True)
    torch.testing.assert_close(ours, dense.T.int(), rtol=0, atol=0)


def test_shapes_follow_from_shapes():
    sizes = MaskSizes(2, 300, 300)
    slices = slices_with_bits(mixed, sizes, None, torch.device("cpu"))
    sizes = dict.fromkeys(("q_tile_rows", "q_block_cols", "k_tile_rows", "k_block_cols"), 64)
    shapes = [x.shape for x in build_tile_plan(slices, **sizes, exact=False)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (*slices.lists, slices.bits)]
        totals = slices.seqlen_q, slices.seqlen_k
        fake = AttnSlices.unchecked(*fakes[:3], *totals, fakes[3])
        assert [x.shape for x in build_tile_plan(fake, **sizes, exact=False)] == shapes
