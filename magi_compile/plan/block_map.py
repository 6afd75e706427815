"""The plan of block lists: walks whose runs are bits, one for each block of columns.

A block list says which blocks of keys a block of queries sees, for all heads or for each. If lists say all, no run has
a mask but that of the last block, which may be short. If a mask_mod says more, each query has some intervals of keys
besides: what it sees lies in both. A block in which no query may see anything is not walked, and one in which some may
not see everything asks: there each query looks up its intervals. The walks are those of `magi_compile.plan.tiles`, with
these differences:

    tiles  `[heads * batch * tiles of an entry, 4]`: those of each head that has lists of its own, behind one another.
           Of queries, the tiles with most blocks come first; of keys they are in order. Behind the tiles of keys come
           those of a mean head, by which the work is divided: each has a run of as many columns as it has blocks.
    runs   one for each tile, or none where it sees nothing. `first` is the first column of the batch entry,
           `num_blocks` how many blocks are seen, `bits` where the words of the tile are, `lane` where those that ask.
    edges  the words, `[words / 8, NUM_LANES, 2]`: of each tile so many lines, for as many parts of its rows, of a bit
           for each block of columns from `first` on. A tile walks what some of its lines see. With intervals, behind
           the lines of all tiles one line of each, of the blocks that ask; and in the walk by queries behind these the
           intervals, `[batch * seqlen_q, num_intervals, 2]`, of columns of all entries.
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
ROWS_OF_SPAN = 64  # queries of which the intervals are known together


class ListShape(NamedTuple):
    """The sizes of a mask of block lists.

    Attributes:
        batch: number of batch entries.
        heads: with lists of their own; 1 where all have the same.
        seqlen_q: queries of an entry.
        seqlen_k: keys of an entry.
        block_rows: queries of a block.
        block_keys: keys of a block.
        intervals: that a query sees at most, besides; 0 if the lists say all.
    """

    batch: Any
    heads: int
    seqlen_q: Any
    seqlen_k: Any
    block_rows: int
    block_keys: int
    intervals: int = 0

    @property
    def num_q(self) -> Any:
        """The lists of a head and batch entry."""
        return -(-self.seqlen_q // self.block_rows)

    @property
    def num_k(self) -> Any:
        """The blocks that a list may name."""
        return -(-self.seqlen_k // self.block_keys)


class MapWalkShape(NamedTuple):
    """The sizes of one walk: `rows` and `cols` of a batch entry, in tiles and blocks of so many.

    Attributes:
        lists: of the mask.
        is_by_keys: whether rows are keys.
        tile_rows: rows of a tile.
        block_cols: columns of a block.
        num_lines: of a tile.
        num_together: queries that see a block if the intervals of any of them do, the same in both walks: the lines of
            queries tell the backward how often blocks of queries are visited, where these visits have an order.
    """

    lists: ListShape
    is_by_keys: bool
    tile_rows: int
    block_cols: int
    num_lines: int
    num_together: int

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
    def first_ask(self) -> Any:
        """The words of all lines, behind which those are that ask."""
        return (
            self.lists.heads * self.lists.batch * self.num_tiles * self.num_lines * self.num_words
        )

    @property
    def first_interval(self) -> Any:
        """The int32s in front of the intervals, whole rows."""
        asks = self.first_ask // self.num_lines if self.lists.intervals else 0
        return -(-(self.first_ask + asks) // WORDS_OF_ROW) * WORDS_OF_ROW

    @property
    def num_edges(self) -> Any:
        """The rows of the tensor that has the words."""
        ints = 0
        if not self.is_by_keys:
            ints = 2 * self.lists.intervals * self.lists.batch * self.lists.seqlen_q
        return -(-(self.first_interval + ints) // WORDS_OF_ROW)


def walk_of_lists(listed: Tensor, shape: MapWalkShape, intervals: Tensor | None = None) -> Walk:
    """One walk of block lists, in operations of torch.

    Args:
        listed: bool `[batch, heads, num_q, num_k]`, the blocks that are listed.
        shape: of the walk.
        intervals: int32 `[batch * seqlen_q, shape.lists.intervals, 2]`, begin and end of the columns of all entries
            that each query sees besides; None where there are none.

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
    if intervals is not None:
        height = shape.tile_rows // shape.num_lines
        seen &= _shown(shape, intervals, height)[0][:, None]
    seen = seen.transpose(0, 1).reshape(lists.heads, per_head, shape.num_lines, -1, BITS_OF_WORD)
    words = _packed(seen)
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
    if intervals is not None:
        shows_all = _shown(shape, intervals, shape.tile_rows)[1]
        is_partial = ~shows_all.reshape(per_head, -1, BITS_OF_WORD)
        asks = _packed(seen.any(2) & is_partial)
        edges[shape.first_ask :][: asks.numel()] = asks.flatten()
        if not shape.is_by_keys:
            edges[shape.first_interval :][: intervals.numel()] = intervals.flatten()
    return Walk(tiles, runs, edges.view(-1, NUM_LANES, 2))


def _packed(bits: Tensor) -> Tensor:
    """Bools `[..., BITS_OF_WORD]` as words, int32."""
    words = (bits * (1 << torch.arange(BITS_OF_WORD, device=bits.device))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _shown(shape: MapWalkShape, intervals: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """In which blocks of `height` rows and the columns of a block the intervals of queries that are together may show
    something, and in which they show all, bool `[batch, parts of the rows of all tiles, blocks of all words]`."""
    lists, device = shape.lists, intervals.device
    num_parts = shape.num_tiles * shape.tile_rows // height
    parts, blocks = (num_parts, height), (shape.num_words * BITS_OF_WORD, shape.block_cols)
    (num_q, rows), (num_k, keys) = (blocks, parts) if shape.is_by_keys else (parts, blocks)
    spans = rows // ROWS_OF_SPAN
    begin, end = intervals.view(lists.batch, lists.seqlen_q, lists.intervals, 2).unbind(-1)
    is_empty = begin >= end

    def of_spans(values: Tensor, reduce: Any, where_empty: int, where_none: int) -> Tensor:
        """`[batch, num_q, spans, intervals, 1]`, of queries with and without an interval, and of those behind."""
        values = torch.where(is_empty, where_empty, values).transpose(1, 2)
        whole = num_q * rows
        values = torch.nn.functional.pad(
            values[..., :whole], (0, max(whole - values.shape[-1], 0)), value=where_none
        )
        of_part = reduce(values.unflatten(-1, (num_q, spans, ROWS_OF_SPAN)), -1)
        return of_part.permute(0, 2, 3, 1)[..., None]

    far = 2**31 - 1
    first = torch.arange(num_k, device=device) * keys
    first = first + torch.arange(lists.batch, device=device)[:, None] * lists.seqlen_k
    first = first[:, None, None, None]
    may_show = (of_spans(begin, torch.amin, far, far) < first + keys) & (
        of_spans(end, torch.amax, 0, 0) > first
    )
    shows_all = (of_spans(begin, torch.amax, far, 0) <= first) & (
        of_spans(end, torch.amin, 0, far) >= first + keys
    )
    some, every = may_show.any(3).any(2), shows_all.any(3).all(2)
    together = torch.arange(num_q, device=device) // max(shape.num_together // rows, 1)
    groups = some.new_zeros(lists.batch, num_q, num_k, dtype=torch.int32)
    some = groups.index_add(1, together, some.int())[:, together] > 0
    return (some.mT, every.mT) if shape.is_by_keys else (some, every)


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
    asks = nothing
    if shape.lists.intervals and not is_mean:
        asks = shape.first_ask + words // shape.num_lines
    runs = {
        "row_begin": row_begin,
        "row_end": row_end,
        "col_begin": first,
        "col_end": counts * shape.block_cols if is_mean else first + shape.cols,
        "diag_lo": -far,
        "diag_hi": far,
        "first": first,
        "num_blocks": counts,
        **dict.fromkeys(("num_lead", "num_trail"), nothing),
        "lane": asks,
        "bits": words,
    }
    return (
        torch.stack([tiles[x] for x in TILE_FIELDS], -1).flatten(0, 1).int(),
        torch.stack([runs[x] for x in RUN_FIELDS], -1).flatten(0, 1).int(),
    )
