// Slices as the planner cuts them; `magi_compile/plan/rects.py` says what each of these is.
#pragma once

#include "common/tile_plan.cuh"

namespace ffa {

// A rectangle with up to two corners cut off; see `Rects` in magi_compile/plan/rects.py.
struct Rect {
    int row_begin, row_end, col_begin, col_end, diag_lo, diag_hi;

    __device__ __forceinline__ static Rect nothing() { return {0, 0, 0, 0, -kNoDiagonal, kNoDiagonal}; }

    // The same area: every row sees a column, every column is seen, no diagonal that cuts nothing.
    __device__ __forceinline__ Rect trimmed() const {
        Rect r;
        r.row_begin = max(row_begin, col_begin - diag_hi + 1);
        r.row_end = min(row_end, col_end - diag_lo);
        r.col_begin = max(col_begin, r.row_begin + diag_lo);
        r.col_end = min(col_end, r.row_end - 1 + diag_hi);
        if (r.row_begin >= r.row_end || col_begin >= col_end || diag_lo >= diag_hi) {
            return nothing();
        }
        r.diag_lo = r.row_end - 1 + diag_lo > r.col_begin ? diag_lo : -kNoDiagonal;
        r.diag_hi = r.row_begin + diag_hi < r.col_end ? diag_hi : kNoDiagonal;
        return r;
    }

    __device__ __forceinline__ Rect transposed() const {
        return {col_begin,
                col_end,
                row_begin,
                row_end,
                diag_hi == kNoDiagonal ? -kNoDiagonal : 1 - diag_hi,
                diag_lo == -kNoDiagonal ? kNoDiagonal : 1 - diag_lo};
    }

    __device__ __forceinline__ Rect clipped(int begin, int end) const {
        Rect r = *this;
        r.row_begin = max(row_begin, begin);
        r.row_end = min(row_end, end);
        return r.trimmed();
    }

    __device__ __forceinline__ bool operator==(const Rect& r) const {
        return row_begin == r.row_begin && row_end == r.row_end && col_begin == r.col_begin && col_end == r.col_end &&
               diag_lo == r.diag_lo && diag_hi == r.diag_hi;
    }

    // This and what is below it down to `last`, if that goes on where this ends.
    __device__ __forceinline__ Rect down_to(const Rect& last) const {
        return {row_begin, last.row_end, col_begin, last.col_end, last.diag_lo, diag_hi};
    }

    // Whether both are one rectangle.
    __device__ __forceinline__ bool goes_on(const Rect& below) const {
        const Rect both = down_to(below);
        return row_begin < row_end && row_end == below.row_begin && both.clipped(row_begin, row_end) == *this &&
               both.clipped(below.row_begin, below.row_end) == below;
    }

    // Whether `below` is the next step of a staircase to the right.
    __device__ __forceinline__ bool leads_down(const Rect& below) const {
        const bool are_full = diag_lo == -kNoDiagonal && diag_hi == kNoDiagonal && below.diag_lo == -kNoDiagonal &&
                              below.diag_hi == kNoDiagonal;
        return are_full && row_begin < row_end && row_end == below.row_begin && col_begin == below.col_begin &&
               col_end < below.col_end;
    }

    // Columns that all rows see, if there are some.
    __device__ __forceinline__ int common_begin() const { return max(col_begin, row_end - 1 + diag_lo); }
    __device__ __forceinline__ int common_end() const { return min(col_end, row_begin + diag_hi); }

    // Whether `below` is the next step of stairs; see magi_compile/plan/stairs.py.
    __device__ __forceinline__ bool is_step_above(const Rect& below) const {
        return row_end == below.row_begin && common_begin() <= below.col_begin && below.col_begin <= col_end &&
               col_end <= below.common_end();
    }

    // Whether `next`, of the same rows, goes on in the column where this ends, and no diagonal cuts there.
    __device__ __forceinline__ bool joins(const Rect& next) const {
        return row_begin == next.row_begin && row_end == next.row_end && col_end == next.col_begin &&
               diag_hi == kNoDiagonal && next.diag_lo == -kNoDiagonal;
    }
};

}   // namespace ffa
