// The plan of block lists: both walks of a block map. `magi_compile/plan/block_map.py` says what it is, in operations
// of torch. Two kernels:
//
//   lists -> what each line of a tile of queries sees of the blocks of keys, and each line of a tile of keys of the
//            blocks of queries: a thread block for 32 lists
//   lines -> how many blocks the rows of a tile see, tiles and runs: a thread block for each head and walk
//
// A bit is set for a block however often it is listed, and in whatever order. What is listed out of range is reported,
// and then nobody sees anything.
#include "common/block.cuh"
#include "common/block_list.cuh"
#include "common/block_map.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

constexpr int kListsAtOnce = 32;

// A walk: tiles of rows, each with `num_lines` lines of bits for as many parts of its rows.
struct MappedWalk {
    Tile* tiles;       // [heads, batch * num_tiles], and by keys those of a mean head behind them
    Run* runs;         // one for each tile
    unsigned* words;   // [heads, batch, num_tiles, num_lines, num_words]
    int tile_rows, block_cols, num_lines;
    int num_tiles, num_words;     // of a batch entry, of a line
    int total_rows, total_cols;   // of a batch entry
    int is_sorted;                // the tiles with most blocks first, else in order
};

struct BlockMapParams {
    BlockList lists[2];
    unsigned* broken;     // [1], zero: becomes 1
    unsigned* num_done;   // [1], zero
    int* counts;          // [batch * num_tiles] of the walk by keys, zeros: its blocks, over all heads
    Int* flags[2];        // of an index and of a count that is out of range
    int batch, heads;     // of the lists: heads with lists of their own
    int block_rows, block_keys, num_q, num_k;
    int list_words;        // num_k bits
    MappedWalk walks[2];   // by queries, by keys
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
          b_(static_cast<int>(blockIdx.x) / num_groups() % params.batch) {}

    __device__ void run() {
        for_each(kListsAtOnce * params_.list_words, [&](int i) { bits_[i] = 0; });
        for (const BlockList& list : params_.lists) {
            if (list.num_blocks != nullptr) {
                read(list);
            }
        }
        write_lines_of_queries();
        write_lines_of_keys();
    }

private:
    __device__ int num_groups() const { return (params_.num_q + kListsAtOnce - 1) / kListsAtOnce; }

    __device__ void read(const BlockList& list) {
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
                }
            });
        });
    }

    // A flag that the host reads is 1, then what was found, its q block, head and batch entry.
    __device__ void report(int check, Int found, Int row) {
        atomicOr(params_.broken, 1u);
        Int* const flag = params_.flags[check];
        flag[1] = found;
        flag[2] = row;
        flag[3] = head_;
        flag[4] = b_;
        __threadfence_system();
        flag[0] = 1;
    }

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
            }
            line(walk, number)[word] = bits;
        });
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
                bits |= is_there && is_listed(cell / cells, block) ? 1u << bit : 0;
            }
            line(walk, number)[first_word + word] = bits;
        });
    }

    const BlockMapParams& params_;
    unsigned* const bits_;
    const int first_, head_, b_;
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
        for_each(count, [&](int i) { counts[i] = blocks_of(i); });
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

    __device__ int blocks_of(int tile) const {
        if (*params_.broken != 0) {
            return 0;
        }
        const unsigned* const words = walk_.words + first_word(head_, tile);
        int sum = 0;
        for (int word = 0; word < walk_.num_words; ++word) {
            unsigned some = 0;
            for (int line = 0; line < walk_.num_lines; ++line) {
                some |= words[line * walk_.num_words + word];
            }
            sum += __popc(some);
        }
        return sum;
    }

    // Those of a mean have no words, and as many columns as they have blocks.
    __device__ void write(int head, int place, int tile, int blocks, bool is_mean) const {
        const int b = tile / walk_.num_tiles;
        const int row_begin = b * walk_.total_rows + tile % walk_.num_tiles * walk_.tile_rows;
        const int row_end = min(row_begin + walk_.tile_rows, (b + 1) * walk_.total_rows);
        const int run = head * num_tiles() + place;
        const int col_begin = is_mean ? 0 : b * walk_.total_cols;
        const int col_end = is_mean ? blocks * walk_.block_cols : col_begin + walk_.total_cols;
        walk_.tiles[run] = {row_begin, row_end, run, run + (blocks > 0)};
        walk_.runs[run] = {row_begin,
                           row_end,
                           col_begin,
                           col_end,
                           -kNoDiagonal,
                           kNoDiagonal,
                           col_begin,
                           blocks,
                           0,
                           0,
                           0,
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

extern "C" __global__ void __launch_bounds__(512)
    ffa_block_map_tiles(const __grid_constant__ ffa::BlockMapParams params) {
    extern __shared__ int memory[];
    __shared__ bool is_last;
    ffa::TileWriter(params).run(memory, is_last);
}
