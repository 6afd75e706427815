// The plan of block lists: both walks of a block map. `magi_compile/plan/block_map.py` says what it is, in operations
// of torch. Two kernels:
//
//   lists -> what each line of a tile of queries sees of the blocks of keys, and each line of a tile of keys of the
//            blocks of queries: a thread block for 32 lists
//   lines -> how many blocks the rows of a tile see, tiles and runs: a thread block for each head and walk
//
// A bit is set for a block however often it is listed, and in whatever order. What is listed out of range is reported,
// and then nobody sees anything. Where queries see intervals besides, a bit is set only where some may be seen, and
// another one where some may not.
//
// Blocks that begin and end anywhere have a table instead of lists, and three kernels in front of the last one:
//
//   table -> the columns that each block of rows sees, a bit for each, by queries and by keys
//   these -> cells of 64 queries and 64 keys: nothing, some or all of it is seen
//   cells -> lines
#include "common/block.cuh"
#include "visibility/block_list.cuh"
#include "visibility/block_map.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

constexpr int kListsAtOnce = 32;

// A walk: tiles of rows, each with `num_lines` lines of bits for as many parts of its rows.
struct MappedWalk {
    Tile* tiles;       // [heads, batch * num_tiles], and by keys those of a mean head behind them
    Run* runs;         // one for each tile
    unsigned* words;   // [heads, batch, num_tiles, num_lines, num_words]
    unsigned* asks;    // [heads, batch, num_tiles, num_words]; null: no block asks
    int tile_rows, block_cols, num_lines;
    int num_tiles, num_words;     // of a batch entry, of a line
    int total_rows, total_cols;   // of a batch entry
    int is_sorted;                // the tiles with most blocks first, else in order
};

// Of 64 queries, the begin and the end of one of their intervals, from the least to the most. Queries for which it is
// empty have it behind all columns for `begin[1]` and in front for `end[0]`, and do not count for the others.
struct alignas(16) Span {
    int begin[2], end[2];
};

constexpr int kRowsOfSpan = 64;

// What each block of rows sees of the columns, and where a row has that.
struct TableWalk {
    const int* blocks;           // [batch, rows]: of each row
    int* places;                 // [batch, rows]: from here to the line of a row, that of the first head
    unsigned* lines;             // [heads, batch, num_blocks, num_words]: a bit for each column of an entry
    int num_blocks, num_words;   // of rows, of a line
};

struct BlockTable {
    const unsigned char* listed;   // [batch, heads, blocks of queries, blocks of keys]; null: there is no table
    const unsigned char* beside;   // [batch, heads, num_q, num_k]: what block lists beside it say; null: there are none
    unsigned char* cells;          // [heads, batch, rows of cells, cells of a row]
    Int listed_strides[2], beside_strides[2];
    TableWalk walks[2];
};

enum Cell : unsigned char { kNoPair = 0, kSomePairs = 1, kAllPairs = 3 };
enum Beside : unsigned char { kIsListed = 1, kIsFull = 2 };

constexpr int kCell = 64;          // queries and keys of a cell
constexpr int kLinesAtOnce = 64;   // of a table
constexpr int kColumnsAtOnce = 2048;

struct BlockMapParams {
    BlockList lists[2];             // partial and full
    const Edges* given_intervals;   // [batch, seqlen_q, num_intervals], of columns of all entries; null: there are none
    Edges* intervals;               // the same in the plan
    Span* spans;                    // [batch, spans of seqlen_q, num_intervals]
    int num_intervals;
    int num_together;   // queries that see a block if the intervals of any of them do, the same in both walks
    int seqlen_q;
    unsigned* broken;     // [1], zero: becomes 1
    unsigned* num_done;   // [1], zero
    int* counts;          // [batch * num_tiles] of the walk by keys, zeros: its blocks, over all heads
    Int* flags[3];        // of an index, of a count that is out of range, and of a full block that hides something
    int batch, heads;     // of the lists: heads with lists of their own
    int block_rows, block_keys, num_q, num_k;
    int list_words;        // num_k bits
    MappedWalk walks[2];   // by queries, by keys
    BlockTable table;
};

__device__ __forceinline__ int ceil_div(int count, int size) { return (count + size - 1) / size; }

// A flag that the host reads is 1, then what was found, its q block, head and batch entry.
__device__ __forceinline__ void report(const BlockMapParams& params, int check, Int found, Int row, int head, int b) {
    atomicOr(params.broken, 1u);
    Int* const flag = params.flags[check];
    flag[1] = found;
    flag[2] = row;
    flag[3] = head;
    flag[4] = b;
    __threadfence_system();
    flag[0] = 1;
}

// The intervals of a batch entry.
class EntryIntervals {
public:
    __device__ EntryIntervals(const BlockMapParams& params, int b)
        : params_(params), rows_(static_cast<Int>(b) * params.seqlen_q), spans_(static_cast<Int>(b) * num_spans()) {}

    __device__ bool are_there() const { return params_.given_intervals != nullptr; }

    __device__ int num_spans() const { return (params_.seqlen_q + kRowsOfSpan - 1) / kRowsOfSpan; }

    // Reads those of the queries from `begin` on, a multiple of 64, to `end`.
    __device__ void read(int begin, int end) const {
        const int count = params_.num_intervals;
        end = min(end, params_.seqlen_q);
        for_each((end - begin) * count, [&](int i) {
            const Int place = (rows_ + begin) * count + i;
            params_.intervals[place] = params_.given_intervals[place];
        });
        const int first = begin / kRowsOfSpan;
        for_each(((end + kRowsOfSpan - 1) / kRowsOfSpan - first) * count,
                 [&](int i) { span(first + i / count, i % count) = span_of(first + i / count, i % count); });
    }

    // Some of the rows that are together with `row` may see some of the columns, which are those of all entries. As in
    // a walk by queries.
    __device__ bool may_show(int row, int col_begin, int col_end) const {
        const int row_begin = row / params_.num_together * params_.num_together;
        return any_span(row_begin, row_begin + params_.num_together,
                        [&](const Span& span) { return span.begin[0] < col_end && span.end[1] > col_begin; });
    }

    // One of their intervals shows them all to each of the rows.
    __device__ bool show_all(int row_begin, int row_end, int col_begin, int col_end) const {
        const int begin = row_begin / kRowsOfSpan, end = spans_end(row_end);
        for (int i = begin; i < end; ++i) {
            bool is_seen = false;
            for (int n = 0; n < params_.num_intervals; ++n) {
                is_seen |= span(i, n).begin[1] <= col_begin && span(i, n).end[0] >= col_end;
            }
            if (!is_seen) {
                return false;
            }
        }
        return true;
    }

    // The same, asked of each row.
    __device__ bool show_each(int row_begin, int row_end, int col_begin, int col_end) const {
        for (Int row = row_begin; row < min(row_end, params_.seqlen_q); ++row) {
            bool is_seen = false;
            for (int n = 0; n < params_.num_intervals; ++n) {
                const Edges edges = params_.given_intervals[(rows_ + row) * params_.num_intervals + n];
                is_seen |= edges.begin <= col_begin && edges.end >= col_end;
            }
            if (!is_seen) {
                return false;
            }
        }
        return true;
    }

private:
    __device__ Span& span(int number, int n) const {
        return params_.spans[(spans_ + number) * params_.num_intervals + n];
    }

    __device__ int spans_end(int row_end) const {
        return (min(row_end, params_.seqlen_q) + kRowsOfSpan - 1) / kRowsOfSpan;
    }

    template <class Test>
    __device__ bool any_span(int row_begin, int row_end, Test test) const {
        bool is_any = false;
        for (int i = row_begin / kRowsOfSpan; i < spans_end(row_end); ++i) {
            for (int n = 0; n < params_.num_intervals; ++n) {
                is_any |= test(span(i, n));
            }
        }
        return is_any;
    }

    __device__ Span span_of(int number, int n) const {
        constexpr int kFar = 2147483647;
        Span span{{kFar, 0}, {kFar, 0}};
        const int end = min((number + 1) * kRowsOfSpan, params_.seqlen_q);
#pragma unroll 8
        for (Int row = number * kRowsOfSpan; row < end; ++row) {
            const Edges edges = params_.given_intervals[(rows_ + row) * params_.num_intervals + n];
            const bool is_empty = edges.begin >= edges.end;
            span.begin[0] = is_empty ? span.begin[0] : min(span.begin[0], edges.begin);
            span.begin[1] = is_empty ? kFar : max(span.begin[1], edges.begin);
            span.end[0] = is_empty ? 0 : min(span.end[0], edges.end);
            span.end[1] = is_empty ? span.end[1] : max(span.end[1], edges.end);
        }
        return span;
    }

    const BlockMapParams& params_;
    const Int rows_, spans_;   // in front of those of this entry
};

// The lists of 32 q blocks of a head and batch entry.
class ListReader {
public:
    // `bits` are [32, list_words].
    __device__ ListReader(const BlockMapParams& params, unsigned* bits)
        : params_(params),
          bits_(bits),
          first_(static_cast<int>(blockIdx.x) % num_groups() * kListsAtOnce),
          head_(static_cast<int>(blockIdx.x) / num_groups() / params.batch),
          b_(static_cast<int>(blockIdx.x) / num_groups() % params.batch),
          intervals_(params, b_) {}

    __device__ void run() {
        for_each(kListsAtOnce * params_.list_words, [&](int i) { bits_[i] = 0; });
        if (intervals_.are_there()) {
            intervals_.read(first_ * params_.block_rows, (first_ + kListsAtOnce) * params_.block_rows);
        }
        for (int kind = 0; kind < 2; ++kind) {
            if (params_.lists[kind].num_blocks != nullptr) {
                read(params_.lists[kind], kind == 1);
            }
        }
        write_lines_of_queries();
        write_lines_of_keys();
    }

private:
    __device__ int num_groups() const { return (params_.num_q + kListsAtOnce - 1) / kListsAtOnce; }

    __device__ void read(const BlockList& list, bool is_full) {
        const int h = list.num_heads == 1 ? 0 : head_;
        const Int *of = list.num_blocks_strides, *at = list.indices_strides;
        const int num_lists = min(kListsAtOnce, params_.num_q - first_);
        for_each_warp(num_lists, [&](int list_number) {
            const Int row = first_ + list_number;
            const int count = list.num_blocks[b_ * of[0] + h * of[1] + row * of[2]];
            if (count < 0 || count > list.num_columns) {
                report(1, count, row);
            }
            const int* const indices = list.indices + (b_ * at[0] + h * at[1] + row * at[2]);
            unsigned* const bits = bits_ + list_number * params_.list_words;
            for_each_of_warp(min(count, list.num_columns), [&](int column) {
                const int block = indices[column * at[3]];
                if (block < 0 || block >= params_.num_k) {
                    report(0, block, row);
                } else {
                    atomicOr(&bits[block / 32], 1u << block % 32);
                    if (is_full && hides_some_of(row, block)) {
                        report(2, block, row);
                    }
                }
            });
        });
    }

    __device__ bool hides_some_of(int row, int block) const {
        const int rows = params_.block_rows, keys = params_.block_keys, seqlen_k = params_.walks[0].total_cols;
        const int begin = b_ * seqlen_k + block * keys, end = b_ * seqlen_k + min((block + 1) * keys, seqlen_k);
        return intervals_.are_there() && !intervals_.show_all(row * rows, (row + 1) * rows, begin, end) &&
               !intervals_.show_each(row * rows, (row + 1) * rows, begin, end);
    }

    __device__ void report(int check, Int found, Int row) { ffa::report(params_, check, found, row, head_, b_); }

    __device__ bool is_listed(int list_number, int block) const {
        return bits_[list_number * params_.list_words + block / 32] >> block % 32 & 1;
    }

    __device__ unsigned* line(const MappedWalk& walk, int number) const {
        const Int of_entry = static_cast<Int>(head_) * params_.batch + b_;
        return walk.words + (of_entry * walk.num_tiles * walk.num_lines + number) * walk.num_words;
    }

    // Of those tiles that begin with these lists; the last lists are those of all tiles behind them, which see nothing.
    __device__ void write_lines_of_queries() {
        const MappedWalk& walk = params_.walks[0];
        const int rows = walk.tile_rows / walk.num_lines, lines_of_list = params_.block_rows / rows;
        const int begin = first_ * lines_of_list;
        const bool is_last = first_ + kListsAtOnce >= params_.num_q;
        const int end = is_last ? walk.num_tiles * walk.num_lines : begin + kListsAtOnce * lines_of_list;
        const int cells = params_.block_keys / walk.block_cols;   // of a list's block
        for_each((end - begin) * walk.num_words, [&](int i) {
            const int number = begin + i / walk.num_words, word = i % walk.num_words;
            const int list_number = number / lines_of_list - first_;
            unsigned bits = 0;
            if (number * rows < walk.total_rows) {
                bits = cells == 1 ? bits_[list_number * params_.list_words + word]
                                  : widened(list_number, word, cells, num_cells(walk));
                if (intervals_.are_there()) {
                    bits = shown_of(bits, number * rows, word * kBlocksOfWord, walk.block_cols);
                }
            }
            line(walk, number)[word] = bits;
        });
    }

    // Of these bits, those of blocks of which the rows of a line may see something.
    __device__ unsigned shown_of(unsigned bits, int row, int first_cell, int cols) const {
        unsigned shown = 0;
        for (unsigned left = bits; left != 0; left &= left - 1) {
            const int bit = __ffs(left) - 1, col = b_ * params_.walks[0].total_cols + (first_cell + bit) * cols;
            shown |= intervals_.may_show(row, col, col + cols) ? 1u << bit : 0;
        }
        return shown;
    }

    __device__ static int num_cells(const MappedWalk& walk) {
        return (walk.total_cols + walk.block_cols - 1) / walk.block_cols;
    }

    // A word of bits of which each block of the list has so many.
    __device__ unsigned widened(int list_number, int word, int cells, int num_cells) const {
        unsigned bits = 0;
        for (int bit = 0; bit < kBlocksOfWord; ++bit) {
            const int cell = word * kBlocksOfWord + bit;
            if (cell < num_cells && is_listed(list_number, cell / cells)) {
                bits |= 1u << bit;
            }
        }
        return bits;
    }

    // The words of these lists' queries, in the lines of all keys.
    __device__ void write_lines_of_keys() {
        const MappedWalk& walk = params_.walks[1];
        const int keys = walk.tile_rows / walk.num_lines, cells = params_.block_rows / walk.block_cols;
        const int num_lines = walk.num_tiles * walk.num_lines;
        const int first_word = first_ / kBlocksOfWord * cells;
        const int num_words = min(cells, walk.num_words - first_word);
        for_each(num_lines * num_words, [&](int i) {
            const int number = i / num_words, word = i % num_words;
            const int block = number * keys / params_.block_keys;
            unsigned bits = 0;
            for (int bit = 0; number * keys < walk.total_rows && bit < kBlocksOfWord; ++bit) {
                const int cell = word * kBlocksOfWord + bit;
                const bool is_there = first_word * kBlocksOfWord + cell < num_cells(walk);
                bool is_seen = is_there && is_listed(cell / cells, block);
                if (is_seen && intervals_.are_there()) {
                    const int row = (first_word * kBlocksOfWord + cell) * walk.block_cols;
                    const int key = b_ * walk.total_rows + number * keys;
                    is_seen = intervals_.may_show(row, key, key + keys);
                }
                bits |= is_seen ? 1u << bit : 0;
            }
            line(walk, number)[first_word + word] = bits;
        });
    }

    const BlockMapParams& params_;
    unsigned* const bits_;
    const int first_, head_, b_;
    const EntryIntervals intervals_;
};

// The lines of a table, of one walk: so many columns of so many blocks of rows of a head and batch entry.
class TableReader {
public:
    __device__ explicit TableReader(const BlockMapParams& params) : params_(params) {}

    // Thread blocks of a walk.
    __device__ int count(int walk) const {
        const TableWalk& of_walk = params_.table.walks[walk];
        return params_.heads * params_.batch * ceil_div(of_walk.num_blocks, kLinesAtOnce) * chunks(walk);
    }

    __device__ void run() const {
        const int walk = static_cast<int>(blockIdx.x) >= count(0);
        const int number = static_cast<int>(blockIdx.x) - walk * count(0);
        const TableWalk& of_walk = params_.table.walks[walk];
        const int chunk = number % chunks(walk), groups = ceil_div(of_walk.num_blocks, kLinesAtOnce);
        const int first_line = number / chunks(walk) % groups * kLinesAtOnce;
        const int entry = number / chunks(walk) / groups;   // head * batch + b
        write_places(walk, number);
        const int num_lines = min(kLinesAtOnce, of_walk.num_blocks - first_line);
        for_each_warp(num_lines, [&](int i) { write_line(walk, entry, first_line + i, chunk * kColumnsAtOnce); });
    }

private:
    __device__ int columns(int walk) const { return params_.walks[walk].total_cols; }
    __device__ int chunks(int walk) const { return ceil_div(columns(walk), kColumnsAtOnce); }

    // Of the rows that are this thread block's to write.
    __device__ void write_places(int walk, int number) const {
        const TableWalk& of_walk = params_.table.walks[walk];
        const int rows = params_.walks[walk].total_rows, total = params_.batch * rows;
        const int to_lines = static_cast<int>(of_walk.lines - reinterpret_cast<const unsigned*>(of_walk.places));
        const int share = ceil_div(total, count(walk)), begin = min(number * share, total);
        for_each(min(share, total - begin), [&](int i) {
            const int row = begin + i;
            const int line = row / rows * of_walk.num_blocks + of_walk.blocks[row];
            of_walk.places[row] = to_lines + line * of_walk.num_words;
        });
    }

    __device__ void write_line(int walk, int entry, int line, int first) const {
        const TableWalk &of_walk = params_.table.walks[walk], &of_columns = params_.table.walks[1 - walk];
        const int b = entry % params_.batch, head = entry / params_.batch, num_k = params_.table.walks[1].num_blocks;
        const Int from_block = walk == 0 ? 1 : num_k;
        const unsigned char* const listed = params_.table.listed + b * params_.table.listed_strides[0] +
                                            head * params_.table.listed_strides[1] +
                                            static_cast<Int>(line) * (walk == 0 ? num_k : 1);
        const int* const blocks = of_columns.blocks + static_cast<Int>(b) * columns(walk);
        const int end = columns(walk), end_word = min(first / 32 + kColumnsAtOnce / 32, of_walk.num_words);
        unsigned* const words =
            of_walk.lines + (static_cast<Int>(entry) * of_walk.num_blocks + line) * of_walk.num_words;
#pragma unroll 4
        for (int word = first / 32; word < end_word; ++word) {
            const unsigned bits = word_of_warp([&](int i) {
                const int column = 32 * word + i;
                return column < end && listed[blocks[column] * from_block] != 0;
            });
            for_each_of_warp(1, [&](int) { words[word] = bits; });
        }
    }

    const BlockMapParams& params_;
};

// The cells of a batch entry and head.
class Cells {
public:
    __device__ Cells(const BlockMapParams& params, int head, int b)
        : params_(params),
          columns_(ceil_div(params.walks[0].total_cols, kCell)),
          first_((static_cast<Int>(head) * params.batch + b) * rows() * columns_) {}

    __device__ int rows() const { return ceil_div(params_.seqlen_q, kCell); }
    __device__ int columns() const { return columns_; }

    __device__ unsigned char& at(int row, int column) const {
        return params_.table.cells[first_ + static_cast<Int>(row) * columns_ + column];
    }

    // Each query sees all of these keys.
    __device__ bool are_all(int row_begin, int row_end, int key_begin, int key_end) const {
        bool is_all = true;
        for (int row = row_begin / kCell; row < min(ceil_div(row_end, kCell), rows()); ++row) {
            for (int column = key_begin / kCell; column < ceil_div(key_end, kCell); ++column) {
                is_all = is_all && column < columns_ && at(row, column) == kAllPairs;
            }
        }
        return is_all;
    }

    // Some of the rows that are together with `row` may see some of these keys, all of it by cells, so that both walks
    // find the same.
    __device__ bool may_show(const EntryIntervals& intervals, int first_key, int row, int key_begin,
                             int key_end) const {
        const int begin = row / params_.num_together * params_.num_together / kCell;
        const int end = min(begin + params_.num_together / kCell, rows());
        for (int column = key_begin / kCell; column < min(ceil_div(key_end, kCell), columns_); ++column) {
            bool is_some = false;
            for (int i = begin; i < end; ++i) {
                is_some |= at(i, column) != kNoPair;
            }
            const int key = first_key + column * kCell;
            if (is_some && (!intervals.are_there() || intervals.may_show(row, key, key + kCell))) {
                return true;
            }
        }
        return false;
    }

private:
    const BlockMapParams& params_;
    const int columns_;
    const Int first_;
};

// The cells of 64 queries of a head and batch entry.
class CellWriter {
public:
    // `memory` are kSharedInts.
    __device__ CellWriter(const BlockMapParams& params, int* memory)
        : params_(params),
          memory_(memory),
          row_(static_cast<int>(blockIdx.x) % num_spans()),
          b_(static_cast<int>(blockIdx.x) / num_spans() % params.batch),
          head_(static_cast<int>(blockIdx.x) / num_spans() / params.batch),
          intervals_(params, b_),
          cells_(params, head_, b_) {}

    static constexpr int kSharedInts = 2 * kCell + 1;

    __device__ void run() const {
        if (intervals_.are_there() && head_ == 0) {
            intervals_.read(row_ * kCell, (row_ + 1) * kCell);
        }
        const TableWalk& walk = params_.table.walks[0];
        const int count = min(kCell, params_.seqlen_q - row_ * kCell);
        int* const blocks = memory_;
        int* const met = memory_ + kCell;   // blocks of queries, once each where these lie together
        int& num_met = memory_[2 * kCell];
        for_each(count,
                 [&](int i) { blocks[i] = walk.blocks[static_cast<Int>(b_) * params_.seqlen_q + row_ * kCell + i]; });
        for_each(1, [&](int) {
            num_met = 0;
            for (int i = 0; i < count; ++i) {
                if (i == 0 || blocks[i] != blocks[i - 1]) {
                    met[num_met++] = blocks[i];
                }
            }
        });
        for_each(cells_.columns(), [&](int column) { cells_.at(row_, column) = cell(met, num_met, column); });
    }

private:
    __device__ int num_spans() const { return ceil_div(params_.seqlen_q, kCell); }

    __device__ unsigned char cell(const int* met, int num_met, int column) const {
        const TableWalk& walk = params_.table.walks[0];
        const Int entry = static_cast<Int>(head_) * params_.batch + b_;
        const unsigned* const lines = walk.lines + entry * walk.num_blocks * walk.num_words + 2 * column;
        unsigned some = 0, all[2] = {~0u, ~0u};
        for (int i = 0; i < num_met; ++i) {
            const unsigned* const words = lines + static_cast<Int>(met[i]) * walk.num_words;
            some |= words[0] | words[1];
            all[0] &= words[0];
            all[1] &= words[1];
        }
        const int keys = params_.walks[0].total_cols - column * kCell;   // from the first one on
        const bool is_all = (all[0] | behind(keys)) == ~0u && (all[1] | behind(keys - 32)) == ~0u;
        if (params_.table.beside != nullptr && !is_listed(column, is_all)) {
            return kNoPair;
        }
        return some == 0 ? kNoPair : is_all && keys >= kCell ? kAllPairs : kSomePairs;
    }

    // The bits of a word that has so many.
    __device__ static unsigned behind(int count) { return count >= 32 ? 0 : count <= 0 ? ~0u : ~0u << count; }

    __device__ bool is_listed(int column, bool is_all) const {
        const int row = row_ * kCell / params_.block_rows, block = column * kCell / params_.block_keys;
        const unsigned char says =
            params_.table.beside[b_ * params_.table.beside_strides[0] + head_ * params_.table.beside_strides[1] +
                                 static_cast<Int>(row) * params_.num_k + block];
        if ((says & kIsFull) != 0) {
            const int seqlen_k = params_.walks[0].total_cols, first = b_ * seqlen_k + column * kCell;
            const int end = min(first + kCell, (b_ + 1) * seqlen_k);
            if (!is_all ||
                (intervals_.are_there() && !intervals_.show_each(row_ * kCell, (row_ + 1) * kCell, first, end))) {
                report(params_, 2, block, row, head_, b_);
            }
        }
        return says != 0;
    }

    const BlockMapParams& params_;
    int* const memory_;
    const int row_, b_, head_;
    const EntryIntervals intervals_;
    const Cells cells_;
};

// The lines of all tiles, of cells, and those that ask, of blocks that nobody sees as well.
class LineWriter {
public:
    __device__ explicit LineWriter(const BlockMapParams& params) : params_(params) {}

    __device__ void run() const {
        for (int number = 0; number < 2; ++number) {
            const MappedWalk& walk = params_.walks[number];
            const int height = walk.tile_rows / walk.num_lines;
            write(walk, walk.words, walk.num_tiles * walk.num_lines, [&](const Place& at, int line, int col) {
                return at.may_show(number == 0, line * height, height, col, walk.block_cols);
            });
            write(walk, walk.asks, walk.num_tiles, [&](const Place& at, int tile, int col) {
                return !at.shows_all(number == 0, tile * walk.tile_rows, walk.tile_rows, col, walk.block_cols);
            });
        }
    }

private:
    struct Place {
        EntryIntervals intervals;
        Cells cells;
        int first_key;

        __device__ bool may_show(bool is_by_queries, int row, int rows, int col, int cols) const {
            return is_by_queries ? cells.may_show(intervals, first_key, row, col, col + cols)
                                 : cells.may_show(intervals, first_key, col, row, row + rows);
        }

        __device__ bool shows_all(bool is_by_queries, int row, int rows, int col, int cols) const {
            return is_by_queries ? shows_all(row, row + rows, col, col + cols)
                                 : shows_all(col, col + cols, row, row + rows);
        }

        __device__ bool shows_all(int row, int row_end, int key, int key_end) const {
            return cells.are_all(row, row_end, key, key_end) &&
                   (!intervals.are_there() || intervals.show_all(row, row_end, first_key + key, first_key + key_end));
        }
    };

    // A bit for each block of columns of each line, of so many in a batch entry.
    template <class Test>
    __device__ void write(const MappedWalk& walk, unsigned* words, int lines, Test test) const {
        for_each_of_grid(params_.heads * params_.batch * lines * walk.num_words, [&](int i) {
            const int line = i / walk.num_words % lines, entry = i / walk.num_words / lines;
            const int b = entry % params_.batch, rows = walk.num_tiles * walk.tile_rows / lines;
            const Place at{EntryIntervals(params_, b), Cells(params_, entry / params_.batch, b),
                           b * params_.walks[0].total_cols};
            unsigned bits = 0;
            for (int bit = 0; line * rows < walk.total_rows && bit < kBlocksOfWord; ++bit) {
                const int col = (i % walk.num_words * kBlocksOfWord + bit) * walk.block_cols;
                bits |= col < walk.total_cols && test(at, line, col) ? 1u << bit : 0;
            }
            words[i] = bits;
        });
    }

    const BlockMapParams& params_;
};

// The tiles and runs of a head, in one of the walks.
class TileWriter {
public:
    __device__ explicit TileWriter(const BlockMapParams& params)
        : params_(params),
          number_(static_cast<int>(blockIdx.x) / params.heads),
          head_(static_cast<int>(blockIdx.x) % params.heads),
          walk_(params.walks[number_]) {}

    // `counts [batch * num_tiles]` and `is_last` are shared memory.
    __device__ void run(int* counts, bool& is_last) {
        const int count = num_tiles();
        for_each(count, [&](int i) { counts[i] = 0; });
        for_each(count * walk_.num_words, [&](int i) {
            atomicAdd(&counts[i / walk_.num_words], blocks_of(i / walk_.num_words, i % walk_.num_words));
        });
        for_each(count, [&](int i) { write(head_, walk_.is_sorted ? rank(counts, i) : i, i, counts[i], false); });
        if (number_ == 1) {
            for_each(count, [&](int i) { atomicAdd(&params_.counts[i], counts[i]); });
            for_each(1, [&](int) {
                __threadfence();
                is_last = atomicAdd(params_.num_done, 1u) + 1 == static_cast<unsigned>(params_.heads);
            });
            if (is_last) {
                // Behind those of all heads, tiles of as many blocks as these have in the mean.
                for_each(count, [&](int i) {
                    const int blocks = atomicAdd(&params_.counts[i], 0);
                    write(params_.heads, i, i, (blocks + params_.heads - 1) / params_.heads, true);
                });
            }
        }
    }

private:
    __device__ int num_tiles() const { return params_.batch * walk_.num_tiles; }

    // How many tiles come before one that has so many blocks.
    __device__ int rank(const int* counts, int tile) const {
        const int own = counts[tile], count = num_tiles();
        int before = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            before += counts[i] > own || (counts[i] == own && i < tile);
        }
        return before;
    }

    __device__ Int first_word(int head, int tile) const {
        return (static_cast<Int>(head) * num_tiles() + tile) * walk_.num_lines * walk_.num_words;
    }

    __device__ Int first_ask(int head, int tile) const {
        return (static_cast<Int>(head) * num_tiles() + tile) * walk_.num_words;
    }

    // Those of a word, of which those that ask are written.
    __device__ int blocks_of(int tile, int word) const {
        if (*params_.broken != 0) {
            return 0;
        }
        const unsigned* const words = walk_.words + first_word(head_, tile);
        unsigned some = 0;
        for (int line = 0; line < walk_.num_lines; ++line) {
            some |= words[line * walk_.num_words + word];
        }
        if (walk_.asks != nullptr) {
            unsigned& asks = walk_.asks[first_ask(head_, tile) + word];
            asks = params_.table.listed != nullptr ? some & asks : asking_of(some, tile, word);
        }
        return __popc(some);
    }

    __device__ unsigned asking_of(unsigned blocks, int tile, int word) const {
        const int b = tile / walk_.num_tiles, row = tile % walk_.num_tiles * walk_.tile_rows;
        const EntryIntervals intervals(params_, b);
        unsigned asking = 0;
        for (unsigned left = blocks; left != 0; left &= left - 1) {
            const int bit = __ffs(left) - 1, col = (word * kBlocksOfWord + bit) * walk_.block_cols;
            const int row_end = row + walk_.tile_rows, col_end = col + walk_.block_cols;
            const int first_key = b * (number_ == 0 ? walk_.total_cols : walk_.total_rows);
            const bool is_all = number_ == 0 ? intervals.show_all(row, row_end, first_key + col, first_key + col_end)
                                             : intervals.show_all(col, col_end, first_key + row, first_key + row_end);
            asking |= is_all ? 0 : 1u << bit;
        }
        return asking;
    }

    // Those of a mean have no words, and as many columns as they have blocks.
    __device__ void write(int head, int place, int tile, int blocks, bool is_mean) const {
        const int b = tile / walk_.num_tiles;
        const int row_begin = b * walk_.total_rows + tile % walk_.num_tiles * walk_.tile_rows;
        const int row_end = min(row_begin + walk_.tile_rows, (b + 1) * walk_.total_rows);
        const int run = head * num_tiles() + place;
        const int col_begin = is_mean ? 0 : b * walk_.total_cols;
        const int col_end = is_mean ? blocks * walk_.block_cols : col_begin + walk_.total_cols;
        const TableWalk& table = params_.table.walks[number_];
        const Int lines_of_head = static_cast<Int>(head) * params_.batch * table.num_blocks * table.num_words;
        const Int asks = walk_.asks == nullptr ? 0 : walk_.asks - walk_.words + first_ask(head, tile);
        walk_.tiles[run] = {row_begin, row_end, run, run + (blocks > 0)};
        walk_.runs[run] = {row_begin,
                           row_end,
                           col_begin,
                           col_end,
                           -kNoDiagonal,
                           kNoDiagonal,
                           col_begin,
                           blocks,
                           is_mean ? 0 : static_cast<int>(lines_of_head),
                           0,
                           is_mean ? 0 : static_cast<int>(asks),
                           is_mean ? 0 : static_cast<int>(first_word(head, tile))};
    }

    const BlockMapParams& params_;
    const int number_, head_;
    const MappedWalk& walk_;
};

}   // namespace ffa

extern "C" __global__ void __launch_bounds__(1024) ffa_block_map(const __grid_constant__ ffa::BlockMapParams params) {
    extern __shared__ int memory[];
    ffa::ListReader(params, reinterpret_cast<unsigned*>(memory)).run();
}

extern "C" __global__ void __launch_bounds__(512) ffa_block_table(const __grid_constant__ ffa::BlockMapParams params) {
    ffa::TableReader(params).run();
}

extern "C" __global__ void __launch_bounds__(256)
    ffa_block_table_cells(const __grid_constant__ ffa::BlockMapParams params) {
    __shared__ int memory[ffa::CellWriter::kSharedInts];
    ffa::CellWriter(params, memory).run();
}

extern "C" __global__ void __launch_bounds__(256)
    ffa_block_table_lines(const __grid_constant__ ffa::BlockMapParams params) {
    ffa::LineWriter(params).run();
}

extern "C" __global__ void __launch_bounds__(512)
    ffa_block_map_tiles(const __grid_constant__ ffa::BlockMapParams params) {
    extern __shared__ int memory[];
    __shared__ bool is_last;
    ffa::TileWriter(params).run(memory, is_last);
}
