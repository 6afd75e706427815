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

// Where lines have warpgroups of their own: the blocks of the walk that a tile is at, in shared memory.
template <int kLines>
struct MapWindow {
    static constexpr int kWords = 16;   // of a line: 512 blocks

    unsigned left[kLines][kWords];   // that were not loaded
    int first[kLines];               // word with one
};

// The same walk in another order: first the blocks of the line that has most left among the next 512. Warpgroups wait
// for each other at the ends of the ring; in the order of columns the blocks that one of them sees come in bunches, so
// that the others have nothing to do.
template <int kBlockCols, int kLines, bool kMayAsk>
class BalancedMapWalk {
    using Walk = MapWalk<kBlockCols, kLines, kMayAsk>;
    using Window = MapWindow<kLines>;

public:
    __device__ __forceinline__ BalancedMapWalk(const Run& run, const unsigned* words, Window& window)
        : words_(words + run.bits),
          to_asks_(run.lane - run.bits),
          stride_(Walk::num_words(run)),
          col_(run.first),
          window_(window) {
        load();
    }

    // There is one: who asks counts.
    __device__ __forceinline__ MappedBlock next() {
        int line = fullest();
        while (line == kNone) {
            words_ += Window::kWords;
            begun_ += Window::kWords;
            load();
            line = fullest();
        }
        int word = window_.first[line];
        while (window_.left[line][word] == 0) {
            ++word;
        }
        window_.first[line] = word;
        const int number = __ffs(window_.left[line][word]) - 1;
        MappedBlock block{col_ + ((begun_ + word) * kBlocksOfWord + number) * kBlockCols, 0,
                          kMayAsk && (words_[to_asks_ + word] >> number & 1) != 0};
#pragma unroll
        for (int i = 0; i < kLines; ++i) {
            const unsigned left = window_.left[i][word];
            const unsigned sees = left >> number & 1;
            block.lines |= sees << i;
            count_[i] -= sees;
            window_.left[i][word] = left & ~(1u << number);
        }
        return block;
    }

private:
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
            count_[line] = 0;
            window_.first[line] = 0;
#pragma unroll 4
            for (int word = 0; word < Window::kWords; ++word) {
                const unsigned left = begun_ + word < stride_ ? words_[line * stride_ + word] : 0;
                window_.left[line][word] = left;
                count_[line] += __popc(left);
            }
        }
    }

    static constexpr int kNone = -1;

    __device__ __forceinline__ int fullest() const {
        int line = kNone;
        int most = 0;
#pragma unroll
        for (int i = 0; i < kLines; ++i) {
            if (count_[i] > most) {
                most = count_[i];
                line = i;
            }
        }
        return line;
    }

    const unsigned* words_;   // of the window, in the first line
    int to_asks_;             // from there to the line of blocks that ask
    int stride_;              // words of a line
    int col_;                 // of the first block of the run
    int begun_ = 0;           // words in front of the window
    Window& window_;
    int count_[kLines];   // blocks left in the window
};

}   // namespace ffa
