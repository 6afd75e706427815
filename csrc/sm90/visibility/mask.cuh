// What a block of scores shows: the question of who sees what, and the mask.
#pragma once

#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

// What a warpgroup sees of a block; kEnd: there is none left.
enum Visibility : uint32_t { kNothing, kPartial, kAll, kEnd };

// Both ends of a row's interval never move left with the row, so the outermost rows decide. A run has a lane only if
// `kHasStairs`.
template <bool kHasStairs>
__device__ __forceinline__ Visibility visibility(const Run& run, const Edges* edges, int row_begin, int row_end,
                                                 int first, int num_cols) {
    const int begin = max(row_begin, run.row_begin);
    const int end = min(row_end, run.row_end);
    if (begin >= end) {
        return kNothing;
    }
    const bool is_stairs = kHasStairs && run.lane > 0;
    const Edges top = is_stairs ? run.looked_up(begin, edges) : run.band(begin);
    const Edges bottom = is_stairs ? run.looked_up(end - 1, edges) : run.band(end - 1);
    if (top.begin >= first + num_cols || bottom.end <= first) {
        return kNothing;
    }
    const bool all_rows = begin == row_begin && end == row_end;
    const bool all_cols = bottom.begin <= first && top.end >= first + num_cols;
    return all_rows && all_cols ? kAll : kPartial;
}

// Sets the scores that `run` hides to -inf. `scores` is this thread's share of a wgmma accumulator whose first row is
// `row` (and row + 8) and whose first column is `col`. All threads of a warp have the same run.
template <bool kHasStairs, int kCount>
__device__ __forceinline__ void apply_mask(float (&scores)[kCount], const Run& run, const Edges* edges, int row,
                                           int col) {
    Edges seen[2] = {run.band(row), run.band(row + 8)};
    if (kHasStairs && __any_sync(0xffffffff, run.lane > 0)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            seen[half] = run.looked_up(min(max(row + 8 * half, run.row_begin), run.row_end - 1), edges);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        const bool in_run = r >= run.row_begin && r < run.row_end;
        const int begin = seen[half].begin - col;
        const int end = in_run ? seen[half].end - col : begin;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int c = 8 * i + j;
                float& score = scores[4 * i + 2 * half + j];
                score = c >= begin && c < end ? score : -kInfinity;
            }
        }
    }
}

}   // namespace ffa
