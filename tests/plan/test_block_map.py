"""The walks of block lists show what is listed."""

import pytest
import torch

from magi_compile.plan.block_map import MOST_SORTED, ListShape, MapWalkShape
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS

from .torch_walks import walk_of_lists

# batch, heads, seqlen_q, seqlen_k, rows and keys of a block.
SHAPES = [
    (1, 1, 64, 64, 64, 64),
    (1, 3, 640, 640, 128, 128),
    (2, 2, 320, 208, 64, 64),
    (1, 2, 333, 501, 128, 64),
    (1, 1, 70, 4300, 64, 128),
    (2, 1, 256, 384, 256, 192),
]


def mask_of(walk, shape, sees=None):
    """The mask that a walk shows, `[heads, batch * rows, batch * cols]`: pair by pair, each tile once. In blocks that
    ask, of those that are in `sees [batch * rows, batch * cols]`."""
    lists = shape.lists
    mask = torch.zeros(
        lists.heads, lists.batch * shape.rows, lists.batch * shape.cols, dtype=torch.bool
    )
    words = walk.edges.flatten().tolist()
    per_head, met = lists.batch * shape.num_tiles, torch.zeros(mask.shape[:2], dtype=torch.int32)
    for number, tile in enumerate(walk.tiles[: lists.heads * per_head].tolist()):
        tile = dict(zip(TILE_FIELDS, tile, strict=True))
        head, rows = number // per_head, slice(tile["row_begin"], tile["row_end"])
        met[head, rows] += 1
        visited = 0
        for run in walk.runs[tile["run_begin"] : tile["run_end"]].tolist():
            run = dict(zip(RUN_FIELDS, run, strict=True))
            assert (run["row_begin"], run["row_end"]) == (rows.start, rows.stop)
            num_words = -(-(run["col_end"] - run["first"]) // (32 * shape.block_cols))
            for cell in range(32 * num_words):
                col = run["first"] + cell * shape.block_cols
                is_seen = False
                for line in range(shape.num_lines):
                    word = words[run["bits"] + line * num_words + cell // 32]
                    if word >> cell % 32 & 1:
                        is_seen = True
                        height = shape.tile_rows // shape.num_lines
                        begin = min(rows.start + line * height, rows.stop)
                        end = min(begin + height, rows.stop)
                        block = (
                            slice(begin, end),
                            slice(col, min(col + shape.block_cols, run["col_end"])),
                        )
                        asks = sees is not None and words[run["lane"] + cell // 32] >> cell % 32 & 1
                        mask[head][block] = sees[block] if asks else True
                        assert col < run["col_end"]
                visited += is_seen
            assert visited == run["num_blocks"] > 0
    assert (met == 1).all()
    return mask


def intervals_of(lists, generator):
    """`[batch * seqlen_q, intervals, 2]`, of columns of all entries: of every other span the same, and some empty."""
    size = (2, lists.batch, lists.seqlen_q, lists.intervals)
    edges = torch.randint(-lists.seqlen_k, 2 * lists.seqlen_k, size, generator=generator)
    edges = edges.clamp(0, lists.seqlen_k).sort(0).values
    same = torch.arange(lists.seqlen_q) // 64 * 64
    edges = torch.where(same[:, None] // 64 % 2 == 0, edges[:, :, same], edges)
    edges += torch.arange(lists.batch)[:, None, None] * lists.seqlen_k
    return edges.movedim(0, -1).flatten(0, 1).int()


@pytest.mark.parametrize("num_lines", [1, 2])
@pytest.mark.parametrize("is_by_keys", [False, True])
@pytest.mark.parametrize("intervals", [0, 1, 3])
@pytest.mark.parametrize("sizes", SHAPES)
def test_walks(sizes, intervals, is_by_keys, num_lines):
    lists = ListShape(*sizes, intervals)
    tile_rows = 128 if num_lines == 2 or not any(x % 128 for x in sizes[4:]) else 64
    shape = MapWalkShape(lists, is_by_keys, tile_rows, 64, num_lines, 128)
    generator = torch.Generator().manual_seed(sum(sizes))
    listed = torch.rand(sizes[0], sizes[1], lists.num_q, lists.num_k, generator=generator) < 0.4
    listed[0, 0, 0] = False
    edges = intervals_of(lists, generator) if intervals else None
    walk = walk_of_lists(listed, shape, edges)
    pairs = listed.repeat_interleave(lists.block_rows, 2).repeat_interleave(lists.block_keys, 3)
    pairs = pairs[:, :, : lists.seqlen_q, : lists.seqlen_k]
    expected = torch.stack([torch.block_diag(*pairs[:, h].float()) > 0 for h in range(lists.heads)])
    sees = None
    if edges is not None:
        col = torch.arange(lists.batch * lists.seqlen_k)
        sees = ((edges[..., :1] <= col) & (col < edges[..., 1:])).any(1)
        expected &= sees
        sees = sees.mT if is_by_keys else sees
    mask = mask_of(walk, shape, sees)
    assert torch.equal(mask.mT if is_by_keys else mask, expected)
    blocks = walk.runs[:, RUN_FIELDS.index("num_blocks")].view(-1, lists.batch * shape.num_tiles)
    if is_by_keys:
        *of_heads, mean = blocks
        assert torch.equal(mean, -(-sum(of_heads) // lists.heads))
    else:
        assert (blocks.diff(dim=1) <= 0).all()  # the longest first


def test_many_tiles_stay_in_order():
    lists = ListShape(1, 1, 64 * (MOST_SORTED + 1), 64, 64, 64)
    listed = torch.arange(MOST_SORTED + 1)[None, None, :, None] > 5
    tiles = walk_of_lists(listed, MapWalkShape(lists, False, 64, 64, 1, 64)).tiles
    assert torch.equal(tiles[:, 0], 64 * torch.arange(MOST_SORTED + 1).int())
