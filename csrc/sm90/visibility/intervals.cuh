// Intervals of columns that each query looks up, in the blocks of a block map that ask: no other run is there.
#pragma once

#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

// Sets the scores to -inf that none of a query's intervals shows, of queries by keys. `row` is the first query of this
// thread, `last_row` the last one that has intervals, and `col` this thread's first column.
template <int kIntervals, int kCount>
__device__ __forceinline__ void apply_intervals(float (&scores)[kCount], const Edges* intervals, int row, int last_row,
                                                int col) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Edges* const of_query = intervals + min(row + 8 * half, last_row) * kIntervals;
        Edges seen[kIntervals];
#pragma unroll
        for (int n = 0; n < kIntervals; ++n) {
            seen[n] = {of_query[n].begin - col, of_query[n].end - col};
        }
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int c = 8 * i + j;
                bool is_seen = false;
#pragma unroll
                for (int n = 0; n < kIntervals; ++n) {
                    is_seen |= c >= seen[n].begin && c < seen[n].end;
                }
                float& score = scores[4 * i + 2 * half + j];
                score = is_seen ? score : -kInfinity;
            }
        }
    }
}

// The same of keys by queries: `key` is the first one of this thread, `query` the block's first one, and those from
// `end` on see nothing. A lane looks up every 32nd query, and all lanes ask each other.
template <int kIntervals, int kCount>
__device__ __forceinline__ void apply_intervals_to_keys(float (&scores)[kCount], const Edges* intervals, int key,
                                                        int query, int end) {
    constexpr int kQueries = 2 * kCount;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < kQueries / 32; ++chunk) {
        const int own = query + 32 * chunk + lane;
        Edges seen[kIntervals];
#pragma unroll
        for (int n = 0; n < kIntervals; ++n) {
            seen[n] = own < end ? intervals[own * kIntervals + n] : Edges{0, 0};
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int from = 8 * i + 2 * (lane % 4) + j;
                bool is_seen[2] = {};
#pragma unroll
                for (int n = 0; n < kIntervals; ++n) {
                    const int first = __shfl_sync(0xffffffff, seen[n].begin, from);
                    const int last = __shfl_sync(0xffffffff, seen[n].end, from);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        is_seen[half] |= key + 8 * half >= first && key + 8 * half < last;
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float& score = scores[4 * (4 * chunk + i) + 2 * half + j];
                    score = is_seen[half] ? score : -kInfinity;
                }
            }
        }
    }
}

}   // namespace ffa
