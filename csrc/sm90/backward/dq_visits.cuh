// When rows of dq will be complete: how many times the main kernel adds to each 16 of them, once for each run of a tile that holds
// some, and whether it does so head by head.
#pragma once

#include "backward/dq_accumulator.cuh"
#include "backward/walk.cuh"
#include "common/block.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

// `wanted` of DqVisits, with an int behind it for the way there, comes about in three steps; each by one thread block.
inline __device__ void clear_dq_visits(int* wanted, int row_groups) {
    compact_for_each(row_groups + 1, [&](int group) { wanted[group] = 0; });
}

// Where visits begin and end, of each list of tiles.
template <int kBlockCols>
__device__ void note_dq_visits(const Tile* tiles, const Run* runs, int num_tiles, int* wanted) {
    compact_for_each(num_tiles, [&](int i) {
        const Tile& tile = tiles[i];
#pragma unroll 1
        for (int run = tile.run_begin; run < tile.run_end && tile.row_begin < tile.row_end; ++run) {
            const RunWalk<kBlockCols> walk{runs[run], 1, false};
            if (walk.first_group() < walk.end_group()) {
                atomicAdd(&wanted[walk.first_group()], 1);
                atomicAdd(&wanted[walk.end_group()], -1);
            }
        }
    });
}

inline __device__ void count_dq_visits(int* wanted, int row_groups) {
    compact_prefix_sum(
        row_groups, [&](int group) { return __ldcg(&wanted[group]); },
        [&](int group, int before) { wanted[group] = before + __ldcg(&wanted[group]); });
}

// Adds 1 to `more_head_by_head` for each tile that is walked so, -1 for others; by one thread block.
template <int kBlockCols>
__device__ void count_walks(const Tile* tiles, const Run* runs, int num_tiles, int& more_head_by_head) {
    compact_for_each(num_tiles, [&](int i) {
        if (tiles[i].row_begin < tiles[i].row_end) {
            atomicAdd(&more_head_by_head, is_walked_head_by_head<kBlockCols>(tiles[i], runs) ? 1 : -1);
        }
    });
}

}  // namespace ffa
