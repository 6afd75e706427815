// Bits of columns that each row looks up, in the blocks of a block map that ask: blocks of queries and of keys begin
// and end anywhere. `magi_compile/plan/block_map.py` says what lies where. No other run is there.
#pragma once

#include "visibility/bits.cuh"
#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

// From the line of a row of this run's head and batch entry to the bits of a block of columns, in words.
__device__ __forceinline__ int word_of_block(const Run& run, int col) {
    return run.num_lead + (col - run.first) / kKeysOfWord;
}

// What a row sees of a block of columns, a bit for each.
template <int kCols>
using SeenColumns = BitWords<kCols / kKeysOfWord>;

// Of the two rows of a thread.
template <int kCols>
struct SeenByRows {
    SeenColumns<kCols> of_rows[2];
};

// Rows from `row_end` on see nothing; `word` is that of the block.
template <int kCols>
__device__ __forceinline__ SeenColumns<kCols> look_up_columns(const uint32_t* table, int row, int row_end, int word) {
    static_assert(kCols % kKeysOfWord == 0, "a block of columns is whole words");
    SeenColumns<kCols> seen{};
    if (row < row_end) {
        seen = *reinterpret_cast<const SeenColumns<kCols>*>(table + table[row] + word);
    }
    return seen;
}

// Sets the scores of all columns to -inf that `seen(half)` does not show to the first or the second row of a thread.
template <class Seen, int kCount>
__device__ __forceinline__ void apply_columns(float (&scores)[kCount], Seen seen, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const SeenColumns<2 * kCount> of_row = seen(half);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const uint32_t bits = of_row.words[8 * i / kKeysOfWord] >> 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& score = scores[4 * i + 2 * half + j];
                score = bits >> (8 * i % kKeysOfWord + j) & 1 ? score : -kInfinity;
            }
        }
    }
}

}   // namespace ffa
