"""The plan of block lists: walks whose runs are bits, one for each block of columns.

A block list says which blocks of keys a block of queries sees, for all heads or for each. Nothing has to be asked of
single queries and keys, so no run has a mask but that of the last block, which may be short. The walks are those of
`magi_compile.plan.tiles`, with these differences:

    tiles  `[heads * batch * tiles of an entry, 4]`: those of each head that has lists of its own, behind one another.
           Of queries, the tiles with most blocks come first; of keys they are in order. Behind the tiles of keys come
           those of a mean head, by which the work is divided: each has a run of as many columns as it has blocks.
    runs   one for each tile, or none where it sees nothing. `first` is the first column of the batch entry,
           `num_blocks` how many blocks are seen, `bits` where the words of the tile are.
    edges  the words, `[words / 8, NUM_LANES, 2]`: of each tile so many lines, for as many parts of its rows, of a bit
           for each block of columns from `first` on. A tile walks what some of its lines see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.geometry import NO_DIAG
from magi_compile.plan.stairs import NUM_LANES
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS, Walk

BITS_OF_WORD = 32
MOST_SORTED = 1024  # tiles of queries of a head; more stay in order
WORDS_OF_ROW = 2 * NUM_LANES  # of the tensor that has them


class ListShape(NamedTuple):
    """The sizes of a mask of block lists.

    Attributes:
        batch: number of batch entries.
        heads: with lists of their own; 1 where all have the same.
        seqlen_q: queries of an entry.
        seqlen_k: keys of an entry.
        block_rows: queries of a block.
        block_keys: keys of a block.
    """

    batch: Any
    heads: int
    seqlen_q: Any
    seqlen_k: Any
    block_rows: int
    block_keys: int

    @property
    def num_q(self) -> Any:
        """The lists of a head and batch entry."""
        return -(-self.seqlen_q // self.block_rows)

    @property
    def num_k(self) -> Any:
        """The blocks that a list may name."""
        return -(-self.seqlen_k // self.block_keys)


class MapWalkShape(NamedTuple):
    """The sizes of one walk: `rows` and `cols` of a batch entry, in tiles and blocks of so many."""

    lists: ListShape
    is_by_keys: bool
    tile_rows: int
    block_cols: int
    num_lines: int

    @property
    def rows(self) -> Any:
        return self.lists.seqlen_k if self.is_by_keys else self.lists.seqlen_q

    @property
    def cols(self) -> Any:
        return self.lists.seqlen_q if self.is_by_keys else self.lists.seqlen_k

    @property
    def num_tiles(self) -> Any:
        """The tiles of a batch entry."""
        return -(-self.rows // self.tile_rows)

    @property
    def num_words(self) -> Any:
        """The words of a line."""
        return -(-self.cols // (self.block_cols * BITS_OF_WORD))

    @property
    def num_listed(self) -> Any:
        """The tiles, and as many runs, of all heads and entries, and by keys of the mean head."""
        return (self.lists.heads + self.is_by_keys) * self.lists.batch * self.num_tiles

    @property
    def num_edges(self) -> Any:
        """The rows of the tensor that has the words."""
        lines = self.lists.heads * self.lists.batch * self.num_tiles * self.num_lines
        return -(-lines * self.num_words // WORDS_OF_ROW)


def walk_of_lists(listed: Tensor, shape: MapWalkShape) -> Walk:
    """One walk of block lists, in operations of torch.

    Args:
        listed: bool `[batch, heads, num_q, num_k]`, the blocks that are listed.
        shape: of the walk.

    Returns:
        The walk, as the module says.
    """
    lists = shape.lists
    block_rows, block_cols = lists.block_rows, lists.block_keys
    if shape.is_by_keys:
        listed = listed.transpose(2, 3)
        block_rows, block_cols = block_cols, block_rows
    device = listed.device
    per_head = lists.batch * shape.num_tiles

    def blocks_at(count: int, step: int, size: int, end: int) -> tuple[Tensor, Tensor]:
        """The list's block of each `step`, and whether there is one."""
        first = torch.arange(count, device=device) * step
        return first.clamp(max=end - 1) // size, first < end

    of_row, has_rows = blocks_at(
        shape.num_tiles * shape.num_lines,
        shape.tile_rows // shape.num_lines,
        block_rows,
        shape.rows,
    )
    of_col, has_cols = blocks_at(
        shape.num_words * BITS_OF_WORD, shape.block_cols, block_cols, shape.cols
    )
    seen = listed[:, :, of_row][..., of_col] & has_rows[:, None] & has_cols
    seen = seen.transpose(0, 1).reshape(lists.heads, per_head, shape.num_lines, -1, BITS_OF_WORD)
    weights = 1 << torch.arange(BITS_OF_WORD, device=device)
    words = (seen * weights).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    counts = seen.any(2).sum((-2, -1))  # [heads, per_head]
    order = torch.arange(per_head, device=device).expand_as(counts)
    if not shape.is_by_keys and per_head <= MOST_SORTED:
        order = counts.argsort(dim=-1, descending=True, stable=True)
    size = shape.num_lines * shape.num_words
    first_words = torch.arange(lists.heads, device=device)[:, None] * per_head + order
    tiles, runs = _tiles_and_runs(shape, order, counts.gather(1, order), first_words * size, 0)
    if shape.is_by_keys:
        mean = -(-counts.sum(0, keepdim=True) // lists.heads)
        nowhere = torch.zeros_like(mean)
        of_mean = _tiles_and_runs(shape, order[:1], mean, nowhere, len(tiles))
        tiles, runs = torch.cat([tiles, of_mean[0]]), torch.cat([runs, of_mean[1]])
    edges = words.new_zeros(shape.num_edges * WORDS_OF_ROW)
    edges[: words.numel()] = words.flatten()
    return Walk(tiles, runs, edges.view(-1, NUM_LANES, 2))


def _tiles_and_runs(
    shape: MapWalkShape, order: Tensor, counts: Tensor, words: Tensor, first_run: int
) -> tuple[Tensor, Tensor]:
    """Those of some heads, `[heads, tiles]` each; a mean head has runs behind `first_run` others, and no words."""
    is_mean = first_run > 0
    entry, tile = order // shape.num_tiles, order % shape.num_tiles
    row_begin = entry * shape.rows + tile * shape.tile_rows
    row_end = (row_begin + shape.tile_rows).minimum((entry + 1) * shape.rows)
    run = first_run + torch.arange(order.numel(), device=order.device).view_as(order)
    tiles = dict(zip(TILE_FIELDS, (row_begin, row_end, run, run + (counts > 0)), strict=True))
    first = torch.zeros_like(entry) if is_mean else entry * shape.cols
    nothing, far = torch.zeros_like(first), torch.full_like(first, NO_DIAG)
    runs = {
        "row_begin": row_begin,
        "row_end": row_end,
        "col_begin": first,
        "col_end": counts * shape.block_cols if is_mean else first + shape.cols,
        "diag_lo": -far,
        "diag_hi": far,
        "first": first,
        "num_blocks": counts,
        **dict.fromkeys(("num_lead", "num_trail", "lane"), nothing),
        "bits": words,
    }
    return (
        torch.stack([tiles[x] for x in TILE_FIELDS], -1).flatten(0, 1).int(),
        torch.stack([runs[x] for x in RUN_FIELDS], -1).flatten(0, 1).int(),
    )
