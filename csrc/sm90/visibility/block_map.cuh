// A run of a block map: which blocks of columns the rows of a tile see, by bits. `magi_compile/plan/block_map.py` says
// what lies where. A block is seen by all rows that a line of bits is for, or by none; where a query sees intervals
// besides, another line says which blocks ask for these (intervals.cuh).
#pragma once

#include "common/tile_plan.cuh"

namespace ffa {

constexpr int kBlocksOfWord = 32;

// The block that a walk is at, by the bits of which lines it is seen, and whether pairs are asked.
struct MappedBlock {
    int col;
    unsigned lines;
    bool asks;
};

// The walk over a run of a map, in the order of columns, of blocks that some of the `kLines` lines of a tile see.
template <int kBlockCols, int kLines, bool kMayAsk>
class MapWalk {
public:
    // From word `first_word` of each line on.
    __device__ __forceinline__ MapWalk(const Run& run, const unsigned* words, int first_word = 0)
        : words_(words + run.bits + first_word),
          to_asks_(run.lane - run.bits),
          stride_(num_words(run)),
          col_(run.first + first_word * kBlocksOfWord * kBlockCols) {
        load();
    }

    __device__ __forceinline__ static int num_words(const Run& run) {
        return (run.col_end - run.first + kBlocksOfWord * kBlockCols - 1) / (kBlocksOfWord * kBlockCols);
    }

    // The blocks of some words.
    __device__ __forceinline__ static int count(const Run& run, const unsigned* words, int first_word, int end_word) {
        const unsigned* const line = words + run.bits;
        const int stride = num_words(run);
        int sum = 0;
#pragma unroll 2
        for (int word = first_word; word < end_word; ++word) {
            unsigned some = line[word];
#pragma unroll
            for (int i = 1; i < kLines; ++i) {
                some |= line[i * stride + word];
            }
            sum += __popc(some);
        }
        return sum;
    }

    // There is one: who asks counts.
    __device__ __forceinline__ MappedBlock next() {
        unsigned some = any();
        while (some == 0) {
            ++words_;
            col_ += kBlocksOfWord * kBlockCols;
            load();
            some = any();
        }
        const int number = __ffs(some) - 1;
        MappedBlock block{col_ + number * kBlockCols, 0, kMayAsk && (words_[to_asks_] >> number & 1) != 0};
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
            block.lines |= (left_[line] >> number & 1) << line;
            left_[line] &= ~(1u << number);
        }
        return block;
    }

private:
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
            left_[line] = words_[line * stride_];
        }
    }

    __device__ __forceinline__ unsigned any() const {
        unsigned some = left_[0];
#pragma unroll
        for (int line = 1; line < kLines; ++line) {
            some |= left_[line];
        }
        return some;
    }

    const unsigned* words_;
    int to_asks_;   // from the first line of a tile; read again for each block, since registers are few
    int stride_;    // from line to line
    int col_;       // of the first block of these words
    unsigned left_[kLines];
};

}   // namespace ffa
