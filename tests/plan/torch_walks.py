"""Walks of block lists in operations of torch: what the kernels of `planner/block_map.cu` have to give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.mapped import walk_shapes
from magi_compile.kernels.plan import Plan
from magi_compile.kernels.sm90.planner.block_map import check_given
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.masks.geometry import NO_DIAG
from magi_compile.plan.block_map import (
    BITS_OF_WORD,
    CELL,
    MOST_SORTED,
    ROWS_OF_SPAN,
    WORDS_OF_ROW,
    ListShape,
    MapWalkShape,
)
from magi_compile.plan.stairs import NUM_LANES
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS, Walk


def plan_of_lists(
    lists: BlockLists | None,
    shape: ListShape,
    problem: AttnProblem,
    intervals: Tensor | None = None,
    table: BlockTable | None = None,
) -> Plan:
    """That of `magi_compile.kernels.sm90.planner.block_map`, on any device."""
    lists, table = check_given(lists, shape, intervals, table)
    listed = None
    if lists is not None:
        is_partial, is_full = lists.grids(shape.num_q, shape.num_k)
        listed = (is_partial | is_full).expand(shape.batch, shape.heads, -1, -1)
    q_walk, k_walk = (
        walk_of_lists(listed, walk, intervals, table) for walk in walk_shapes(shape, problem)
    )
    splits = q_walk.tiles.new_zeros(0)
    return Plan(plan_tiles(problem), q_walk, k_walk, splits, block_map=problem.block_map)


def pairs_of(table: BlockTable) -> Tensor:
    """The pairs that are seen, bool `[batch, heads, seqlen_q, seqlen_k]`."""
    batch = len(table.of_queries)
    b = torch.arange(batch, device=table.listed.device)[:, None, None]
    listed = table.listed.expand(batch, -1, -1, -1).movedim(1, -1)
    seen = listed[b, table.of_queries.long()[:, :, None], table.of_keys.long()[:, None]]
    return seen.movedim(-1, 1)


def walk_of_lists(
    listed: Tensor | None,
    shape: MapWalkShape,
    intervals: Tensor | None = None,
    table: BlockTable | None = None,
) -> Walk:
    """One walk of block lists, in operations of torch.

    Args:
        listed: bool `[batch, heads, num_q, num_k]`, the blocks that are listed; None where only a table says.
        shape: of the walk.
        intervals: int32 `[batch * seqlen_q, shape.lists.intervals, 2]`, begin and end of the columns of all entries
            that each query sees besides; None where there are none.
        table: of blocks that begin and end anywhere, likewise.

    Returns:
        The walk, as the module says.
    """
    lists = shape.lists
    if table is not None:
        return _walk_of_seen(
            shape, *_seen_of_table(shape, table, listed, intervals), intervals, table
        )
    assert listed is not None
    block_rows, block_cols = lists.block_rows, lists.block_keys
    if shape.is_by_keys:
        listed = listed.transpose(2, 3)
        block_rows, block_cols = block_cols, block_rows
    device = listed.device

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
    if intervals is None:
        return _walk_of_seen(shape, seen)
    height = shape.tile_rows // shape.num_lines
    seen &= _shown(shape, intervals, height)[0][:, None]
    shows_all = _shown(shape, intervals, shape.tile_rows)[1][:, None]
    return _walk_of_seen(shape, seen, shows_all, intervals)


def _walk_of_seen(
    shape: MapWalkShape,
    seen: Tensor,
    shows_all: Tensor | None = None,
    intervals: Tensor | None = None,
    table: BlockTable | None = None,
) -> Walk:
    """The walk of which lines see which blocks, `[batch, heads, lines, blocks of all words]`, and which tiles see all
    of them, `[batch, heads or 1, tiles, ...]`."""
    lists, device = shape.lists, seen.device
    per_head = lists.batch * shape.num_tiles
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
    if shows_all is not None:
        is_partial = ~shows_all.transpose(0, 1).flatten(1, 2).unflatten(-1, (-1, BITS_OF_WORD))
        asks = _packed(seen.any(2) & is_partial)
        edges[shape.first_ask :][: asks.numel()] = asks.flatten()
    if intervals is not None and not shape.is_by_keys:
        edges[shape.first_interval :][: intervals.numel()] = intervals.flatten()
    if table is not None:
        ways, lines = _lines_of_table(shape, table)
        edges[shape.first_table :][: ways.numel()] = ways.flatten()
        edges[shape.first_line :][: lines.numel()] = lines.flatten()
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


def _seen_of_table(
    shape: MapWalkShape, table: BlockTable, listed: Tensor | None, intervals: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same of a table, as `_walk_of_seen` takes it, by cells."""
    lists = shape.lists
    num_rows, num_cols = shape.num_tiles * shape.tile_rows, shape.num_words * BITS_OF_WORD
    height = shape.tile_rows // shape.num_lines
    whole = num_rows // CELL, num_cols * shape.block_cols // CELL
    num_q, num_k = whole[::-1] if shape.is_by_keys else whole
    behind_q, behind_k = num_q * CELL - lists.seqlen_q, num_k * CELL - lists.seqlen_k
    pad, pairs = torch.nn.functional.pad, pairs_of(table)

    def cells(behind: bool) -> Tensor:
        """For queries behind the last one, all pairs or none; keys behind the last one are not seen."""
        of_pairs = pad(pad(pairs, (0, behind_k)), (0, 0, 0, behind_q), value=behind)
        return of_pairs.unflatten(3, (num_k, CELL)).unflatten(2, (num_q, CELL))

    some, every = cells(False).any(5).any(3), cells(True).all(5).all(3)
    if listed is not None:
        q, k = (torch.arange(count, device=pairs.device) * CELL for count in (num_q, num_k))
        q, k = q.clamp(max=lists.seqlen_q - 1), k.clamp(max=lists.seqlen_k - 1)
        is_listed = listed[:, :, q // lists.block_rows][..., k // lists.block_keys]
        some, every = some & is_listed, every & is_listed
    # Of queries that are together, in both walks.
    size = max(shape.num_together // CELL, 1)
    groups = pad(some, (0, 0, 0, -num_q % size)).unflatten(2, (-1, size)).any(3)
    some = groups.repeat_interleave(size, 2)[:, :, :num_q]
    if intervals is not None:
        of_cells = shape._replace(is_by_keys=False, tile_rows=CELL, block_cols=CELL, num_lines=1)
        shown = _shown(of_cells, intervals, CELL)[0][:, None]
        count = min(num_q, shown.shape[2]), min(num_k, shown.shape[3])
        some[:, :, : count[0], : count[1]] &= shown[:, :, : count[0], : count[1]]
        some[:, :, count[0] :] = False
    if shape.is_by_keys:
        some, every = some.mT, every.mT

    def in_blocks(of_cells: Tensor, rows: int) -> Tensor:
        """`[batch, heads, parts of so many rows, cells, blocks, cells]`."""
        of_cells = of_cells.unflatten(3, (num_cols, shape.block_cols // CELL))
        return of_cells.unflatten(2, (num_rows // rows, rows // CELL))

    is_there = torch.arange(num_cols, device=pairs.device) * shape.block_cols < shape.cols
    is_there = (
        is_there
        & (torch.arange(num_rows // height, device=pairs.device) * height < shape.rows)[:, None]
    )
    seen = in_blocks(some, height).any(5).any(3) & is_there
    shows_all = in_blocks(every, shape.tile_rows).all(5).all(3)
    if intervals is not None:
        shows_all &= _shown(shape, intervals, shape.tile_rows)[1][:, None]
    return seen, shows_all


def _lines_of_table(shape: MapWalkShape, table: BlockTable) -> tuple[Tensor, Tensor]:
    """The distance from here to the line of each row, and the lines."""
    lists = shape.lists
    listed, of_rows, of_cols = table.listed, table.of_queries, table.of_keys
    if shape.is_by_keys:
        listed, of_rows, of_cols = listed.mT, of_cols, of_rows
    listed = listed.expand(lists.batch, lists.heads, -1, -1).transpose(0, 1)
    b = torch.arange(lists.batch, device=listed.device)
    bits = listed[:, b[:, None], :, of_cols.long()].permute(2, 0, 3, 1)
    assert bits.shape[:3] == (lists.heads, lists.batch, shape.num_blocks)
    bits = torch.nn.functional.pad(bits, (0, shape.words_of_line * BITS_OF_WORD - bits.shape[3]))
    line = b[:, None] * shape.num_blocks + of_rows
    ways = shape.first_line - shape.first_table + line * shape.words_of_line
    return ways.int(), _packed(bits.unflatten(3, (-1, BITS_OF_WORD)))


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
    if shape.lists.may_ask and not is_mean:
        asks = shape.first_ask + words // shape.num_lines
    of_head = nothing
    if shape.lists.has_table and not is_mean:
        of_head = nothing + torch.arange(len(order), device=order.device)[:, None] * (
            shape.lists.batch * shape.num_blocks * shape.words_of_line
        )
    runs = {
        "row_begin": row_begin,
        "row_end": row_end,
        "col_begin": first,
        "col_end": counts * shape.block_cols if is_mean else first + shape.cols,
        "diag_lo": -far,
        "diag_hi": far,
        "first": first,
        "num_blocks": counts,
        "num_lead": of_head,
        "num_trail": nothing,
        "lane": asks,
        "bits": words,
    }
    return (
        torch.stack([tiles[x] for x in TILE_FIELDS], -1).flatten(0, 1).int(),
        torch.stack([runs[x] for x in RUN_FIELDS], -1).flatten(0, 1).int(),
    )
