// What a block of scores shows: a run's interval of columns per row, the question of who sees what, and the mask.
#pragma once

#include "plan.cuh"
#include "ptx.cuh"

namespace ffa {

// What a warpgroup sees of a block; kEnd: there is none left.
enum Visibility : uint32_t { kNothing, kPart, kAll, kEnd };

// Both ends of a row's interval move right with the row, so the outermost rows decide.
__device__ __forceinline__ Visibility visibility(const Run& run, int row_begin, int row_end, int first, int num_cols) {
    const int begin = max(row_begin, run.row_begin);
    const int end = min(row_end, run.row_end);
    if (begin >= end || run.visible_begin(begin) >= first + num_cols || run.visible_end(end - 1) <= first) {
        return kNothing;
    }
    const bool all_rows = begin == row_begin && end == row_end;
    const bool all_cols = run.visible_begin(end - 1) <= first && run.visible_end(begin) >= first + num_cols;
    return all_rows && all_cols ? kAll : kPart;
}

// Sets the scores that `run` hides to -inf. `scores` is this thread's part of a wgmma accumulator whose first row is
// `row` (and row + 8) and whose first column is `col`.
template <int kCount>
__device__ __forceinline__ void apply_mask(float (&scores)[kCount], const Run& run, int row, int col) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        const bool in_run = r >= run.row_begin && r < run.row_end;
        const int begin = run.visible_begin(r) - col;
        const int end = in_run ? run.visible_end(r) - col : begin;
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

}  // namespace ffa
