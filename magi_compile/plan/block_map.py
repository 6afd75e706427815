"""The plan of block lists: walks whose runs are bits, one for each block of columns.

A block list says which blocks of keys a block of queries sees, for all heads or for each. If lists say all, no run has
a mask but that of the last block, which may be short. If a mask_mod says more, each query has some intervals of keys
besides: what it sees lies in both. A block in which no query may see anything is not walked, and one in which some may
not see everything asks: there each query looks up its intervals.

Blocks that begin and end anywhere have a **table** instead of lists: which blocks of keys each block of queries sees,
and the block of each query and key. It makes cells of 64 queries and 64 keys, of which nothing, some or all is seen. A
cell of which some is asks: there each row looks up its line, which has a bit for each column. A query sees what lists,
intervals and table show, as far as there are some.

The walks are those of `magi_compile.plan.tiles`, with these differences:

    tiles  `[heads * batch * tiles of an entry, 4]`: those of each head that has lists of its own, behind one another.
           Of queries, the tiles with most blocks come first; of keys they are in order. Behind the tiles of keys come
           those of a mean head, by which the work is divided: each has a run of as many columns as it has blocks.
    runs   one for each tile, or none where it sees nothing. `first` is the first column of the batch entry,
           `num_blocks` how many blocks are seen, `bits` where the words of the tile are, `lane` where those that ask.
           With a table, `num_lead` is how far the lines of the head lie behind those of the first one.
    edges  the words, `[words / 8, NUM_LANES, 2]`: of each tile so many lines, for as many parts of its rows, of a bit
           for each block of columns from `first` on. A tile walks what some of its lines see. With intervals, behind
           the lines of all tiles one line of each, of the blocks that ask; and in the walk by queries behind these the
           intervals, `[batch * seqlen_q, num_intervals, 2]`, of columns of all entries. With a table there are lines
           that ask, too, and behind all that in both walks: of each row how far its line is from here, `[batch *
           rows]`, that of the first head; and the lines, `[heads, batch, blocks of rows, words]`, of columns of an
           entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from magi_compile.plan.stairs import NUM_LANES

BITS_OF_WORD = 32
MOST_SORTED = 1024  # tiles of queries of a head; more stay in order
WORDS_OF_ROW = 2 * NUM_LANES  # of the tensor that has them
ROWS_OF_SPAN = 64  # queries of which the intervals are known together
CELL = 64  # queries and keys of which a table knows together what is seen
COLUMNS_OF_LINE = 128  # of a table's line, whole ones, so that a block of columns is read at once


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
        table_q: blocks of queries of a table; None if there is none.
        table_k: blocks of keys of a table, likewise.
    """

    batch: Any
    heads: int
    seqlen_q: Any
    seqlen_k: Any
    block_rows: int
    block_keys: int
    intervals: int = 0
    table_q: Any = None
    table_k: Any = None

    @property
    def has_table(self) -> bool:
        return self.table_q is not None

    @property
    def may_ask(self) -> bool:
        return self.intervals > 0 or self.has_table

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
        asks = self.first_ask // self.num_lines if self.lists.may_ask else 0
        return -(-(self.first_ask + asks) // WORDS_OF_ROW) * WORDS_OF_ROW

    @property
    def num_edges(self) -> Any:
        """The rows of the tensor that has the words."""
        end = self.first_table
        if self.lists.has_table:
            num_lines = self.lists.heads * self.lists.batch * self.num_blocks
            end = self.first_line + num_lines * self.words_of_line
        return -(-end // WORDS_OF_ROW)

    # Of a table

    @property
    def num_blocks(self) -> Any:
        """The blocks of rows."""
        return self.lists.table_k if self.is_by_keys else self.lists.table_q

    @property
    def words_of_line(self) -> Any:
        return -(-self.cols // COLUMNS_OF_LINE) * (COLUMNS_OF_LINE // BITS_OF_WORD)

    @property
    def first_table(self) -> Any:
        """The int32s in front of the ways to lines, whole rows."""
        ints = 0
        if not self.is_by_keys:
            ints = 2 * self.lists.intervals * self.lists.batch * self.lists.seqlen_q
        return -(-(self.first_interval + ints) // WORDS_OF_ROW) * WORDS_OF_ROW

    @property
    def first_line(self) -> Any:
        """The int32s in front of the lines, whole rows."""
        ways = self.lists.batch * self.rows
        return self.first_table + -(-ways // WORDS_OF_ROW) * WORDS_OF_ROW
