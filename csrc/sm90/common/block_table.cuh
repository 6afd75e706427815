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

// Sets the scores to -inf that the line of a row does not show. `row` is the first one of this thread, those from
// `row_end` on see nothing, and `word` is that of the block.
template <int kCount>
__device__ __forceinline__ void apply_table(float (&scores)[kCount], const uint32_t* table, int row, int row_end,
                                            int word, int lane) {
    using Words = BitWords<2 * kCount / kKeysOfWord>;
    static_assert(2 * kCount % kKeysOfWord == 0, "a block of columns is whole words");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + 8 * half;
        const uint32_t line = table[min(own, row_end - 1)];
        const Words seen = *reinterpret_cast<const Words*>(table + line + word);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const uint32_t bits = own < row_end ? seen.words[8 * i / kKeysOfWord] >> 2 * (lane % 4) : 0;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& score = scores[4 * i + 2 * half + j];
                score = bits >> (8 * i % kKeysOfWord + j) & 1 ? score : -kInfinity;
            }
        }
    }
}

}   // namespace ffa
