// In which order the backward pass goes through the queries of a tile of keys: over its runs, and in each over blocks of
// queries and the query heads of the group.
#pragma once

#include "plan.cuh"

namespace ffa {

// Blocks start at multiples of 16 queries, as dQ is laid out.
constexpr int kBlockAlignment = 16;

// One step: a block of queries for one head of the group.
struct Visit {
    int col;
    int group;
};

template <int kBlockCols>
struct RunWalk {
    const Run& run;   // read anew for each step, as the thread that walks has few registers
    int num_groups;   // query heads
    bool is_ascending;

    __device__ __forceinline__ int first_col() const { return run.first & ~(kBlockAlignment - 1); }
    __device__ __forceinline__ int num_blocks() const { return (run.col_end - first_col() + kBlockCols - 1) / kBlockCols; }
    // The groups of 16 queries that dQ is added to.
    __device__ __forceinline__ int first_group() const { return first_col() / kBlockAlignment; }
    __device__ __forceinline__ int end_group() const { return (run.col_end + kBlockAlignment - 1) / kBlockAlignment; }
    __device__ __forceinline__ int num_visits() const { return num_blocks() * num_groups; }

    // With `left` visits behind it. All heads of a block in turn, so that tiles whose queries begin or end together stay
    // together. Where a window moves on with the keys, tiles that start together are always as far apart as their keys,
    // and few blocks are loaded in between only if a head is walked to its end before the next one.
    __device__ __forceinline__ Visit visit(int left) const {
        const bool is_window = run.diag_hi < kNoDiagonal;
        const int group = is_window ? left / num_blocks() : left % num_groups;
        const int block = is_window ? left % num_blocks() : left / num_groups;
        return {first_col() + (is_ascending ? num_blocks() - 1 - block : block) * kBlockCols, group};
    }

    // Visits are not quite the plan's blocks, of which all from `num_lead` on and before the last `num_trail` need no mask.
    __device__ __forceinline__ bool is_masked(int col) const {
        return col < run.first + run.num_lead * kBlockCols ||
               col + kBlockCols > run.first + (run.num_blocks - run.num_trail) * kBlockCols;
    }
};

// Blocks of queries, for one head.
template <int kBlockCols>
__device__ __forceinline__ int blocks_of_tile(const Tile& tile, const Run* runs) {
    int sum = 0;
#pragma unroll 4
    for (int i = tile.run_begin; i < tile.run_end; ++i) {
        sum += RunWalk<kBlockCols>{runs[i], 1, false}.num_blocks();
    }
    return sum;
}

}  // namespace ffa
