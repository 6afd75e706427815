// In which order the backward pass goes through the queries of a tile of keys: over its runs, and in each over blocks
// of queries and the query heads of the group.
#pragma once

#include "common/tile_plan.cuh"

namespace ffa::backward {

// Blocks start at multiples of 16 queries, as dQ is laid out.
constexpr int kBlockAlignment = 16;

// One step: a block of queries for one head of the group.
struct Visit {
    int col;
    int group;
};

// What a thread needs of a run to walk over it: to read that again for each step would wait for the L2 cache wherever
// an acquire of some warp has emptied the L1 cache.
template <int kBlockCols>
class RunWalk {
public:
    // For so many query heads.
    __device__ __forceinline__ RunWalk(const Run& run, int num_groups, bool is_ascending)
        : first_col_(run.first & ~(kBlockAlignment - 1)),
          col_end_(run.col_end),
          num_blocks_((col_end_ - first_col_ + kBlockCols - 1) / kBlockCols),
          lead_end_(run.first + run.num_lead * kBlockCols),
          trail_begin_(run.first + (run.num_blocks - run.num_trail) * kBlockCols),
          num_groups_(num_groups),
          is_window_(run.diag_hi < kNoDiagonal),
          is_ascending_(is_ascending) {}

    // The groups of 16 queries that dQ is added to.
    __device__ __forceinline__ int first_group() const { return first_col_ / kBlockAlignment; }
    __device__ __forceinline__ int end_group() const { return (col_end_ + kBlockAlignment - 1) / kBlockAlignment; }

    __device__ __forceinline__ int col_end() const { return col_end_; }
    __device__ __forceinline__ int num_blocks() const { return num_blocks_; }
    __device__ __forceinline__ int num_visits() const { return num_blocks_ * num_groups_; }
    // Whether a head is walked to its end before the next one.
    __device__ __forceinline__ bool is_window() const { return is_window_; }

    // With `left` visits behind it. All heads of a block in turn, so that tiles whose queries begin or end together
    // stay together. Where a window moves on with the keys, tiles that start together are always as far apart as their
    // keys, and few blocks are loaded in between only if a head is walked to its end before the next one.
    __device__ __forceinline__ Visit visit(int left) const {
        const int per_turn = is_window_ ? num_blocks_ : num_groups_;
        const int turn = left / per_turn, in_turn = left % per_turn;
        const int block = is_window_ ? in_turn : turn;
        return {first_col_ + (is_ascending_ ? num_blocks_ - 1 - block : block) * kBlockCols,
                is_window_ ? turn : in_turn};
    }

    // Visits are not quite the plan's blocks, of which all from `num_lead` on and before the last `num_trail` need no
    // mask.
    __device__ __forceinline__ bool is_masked(int col) const {
        return col < lead_end_ || col + kBlockCols > trail_begin_;
    }

private:
    int first_col_, col_end_, num_blocks_, lead_end_, trail_begin_;
    int num_groups_;
    bool is_window_, is_ascending_;
};

// Blocks of queries, for one head.
template <int kBlockCols>
__device__ __forceinline__ int blocks_of_tile(const Tile& tile, const Run* runs) {
    int sum = 0;
#pragma unroll 1
    for (int i = tile.run_begin; i < tile.run_end; ++i) {
        sum += RunWalk<kBlockCols>{runs[i], 1, false}.num_blocks();
    }
    return sum;
}

// Whether all blocks of a head are visited before those of another one.
template <int kBlockCols>
__device__ __forceinline__ bool is_walked_head_by_head(const Tile& tile, const Run* runs) {
    return tile.run_end - tile.run_begin == 1 && RunWalk<kBlockCols>(runs[tile.run_begin], 1, false).is_window();
}

}   // namespace ffa::backward
