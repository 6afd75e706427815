// Bits of columns that each row looks up, in the blocks of a block map that ask: blocks of queries and of keys begin
// and end anywhere. `magi_compile/plan/block_map.py` says what lies where. No other run is there.
#pragma once

#include "common/bits.cuh"
#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

// From the line of a row of this run's head and batch entry to the bits of a block of columns, in words.
__device__ __forceinline__ int word_of_block(const Run& run, int col) {
    return run.num_lead + (col - run.first) / kKeysOfWord;
}

// What the two rows of a thread see of a block of columns, a bit for each.
template <int kCols>
struct SeenColumns {
    static_assert(kCols % kKeysOfWord == 0, "a block of columns is whole words");

    BitWords<kCols / kKeysOfWord> of_rows[2];
};

// `row` is the first one, those from `row_end` on see nothing, and `word` is that of the block.
template <int kCols>
__device__ __forceinline__ SeenColumns<kCols> look_up_columns(const uint32_t* table, int row, int row_end, int word) {
    SeenColumns<kCols> seen;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + 8 * half;
        const uint32_t line = table[min(own, row_end - 1)];
        auto& of_row = seen.of_rows[half];
        of_row = *reinterpret_cast<const BitWords<kCols / kKeysOfWord>*>(table + line + word);
#pragma unroll
        for (uint32_t& bits : of_row.words) {
            bits = own < row_end ? bits : 0;
        }
    }
    return seen;
}

// Sets the scores of all other columns to -inf.
template <int kCols, int kCount>
__device__ __forceinline__ void apply_columns(float (&scores)[kCount], const SeenColumns<kCols>& seen, int lane) {
    static_assert(2 * kCount == kCols, "a quarter of two rows");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const uint32_t bits = seen.of_rows[half].words[8 * i / kKeysOfWord] >> 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& score = scores[4 * i + 2 * half + j];
                score = bits >> (8 * i % kKeysOfWord + j) & 1 ? score : -kInfinity;
            }
        }
    }
}

}   // namespace ffa
