// Stairs of one tile: runs below one another that are walked as one, whose rows look up what they see. What
// magi_compile/plan/stairs.py computes.
#pragma once

#include "common/search.cuh"
#include "common/tile_plan.cuh"
#include "planner/rects.cuh"

namespace ffa {

__device__ __forceinline__ int blocks_of(int cols, int block_cols) { return (cols + block_cols - 1) / block_cols; }

// What a tile sees of one rectangle, or of several next to one another: a run, or a step of one.
struct Step {
    Rect rect;
    int above;         // the step above this one; its own number if there is none
    int first, last;   // of its stairs, where this is the first one
    int lane;          // where its stairs look, or 0
};

// By one thread.
class Stairs {
public:
    // `steps [count]` are to be put, by row and column; no two of them overlap.
    __device__ __forceinline__ Stairs(Step* steps, int count, int block_cols, bool may_have_stairs)
        : steps_(steps), count_(count), block_cols_(block_cols), may_have_stairs_(may_have_stairs) {}

    __device__ __forceinline__ int count() const { return count_; }
    __device__ __forceinline__ void put(int i, const Rect& rect) { steps_[i] = {rect, i, i, i, 0}; }

    // Neighbours whose union is one rectangle become one, but those that are steps of stairs next to one another: both
    // above or both below others.
    __device__ __forceinline__ void join_neighbours() {
        look_above();
        for (int i = 0; i < count_; ++i) {
            steps_[steps_[i].above].last = i;   // of those that have one below: not their own number
        }
        int num_left = 0;
        bool was_above = false, was_below = false;
        for (int i = 0; i < count_; ++i) {
            const Rect next = steps_[i].rect;
            const bool is_below = steps_[i].above != i, is_above = steps_[i].last != i;
            if (num_left > 0 && steps_[num_left - 1].rect.joins(next) && !(was_above && is_above) &&
                !(was_below && is_below)) {
                steps_[num_left - 1].rect.col_end = next.col_end;
                steps_[num_left - 1].rect.diag_hi = next.diag_hi;
            } else {
                steps_[num_left].rect = next;
                ++num_left;
            }
            was_above = is_above;
            was_below = is_below;
        }
        for (int i = 0; i < num_left; ++i) {
            steps_[i].above = steps_[i].first = steps_[i].last = i;
        }
        count_ = num_left;
    }

    // Notes which steps are of which stairs, and their lanes; how many runs there are.
    __device__ __forceinline__ int find() {
        look_above();
        for (int i = 0; i < count_; ++i) {
            const int first = steps_[steps_[i].above].first;
            steps_[i].first = first;
            steps_[first].last = i;
        }
        int num_stairs = 0;
        int num_runs = 0;
        for (int i = 0; i < count_; ++i) {
            const int first = steps_[i].first;
            if (first == i && steps_[i].last != i && num_stairs < kLanes) {
                steps_[i].lane = ++num_stairs;
            }
            steps_[i].lane = steps_[first].lane;
            num_runs += first == i || steps_[i].lane == 0;
        }
        return num_runs;
    }

private:
    // Which step is above which.
    __device__ __forceinline__ void look_above() {
        if (!may_have_stairs_) {
            return;
        }
        for (int i = 0; i < count_; ++i) {
            const int below = step_below(i);
            if (below < count_) {
                steps_[below].above = i;   // if there are two, the later one
            }
        }
    }

    // Of the steps that begin in the next row the first one that sees nothing further left, if it leads on and that
    // saves a block.
    __device__ __forceinline__ int step_below(int i) const {
        const Rect r = steps_[i].rect;
        const int row = r.row_end, col = r.common_begin();
        const Step* const later = steps_ + i + 1;
        const int found = i + 1 + partition_point(count_ - i - 1, [=](int j) {   // by value: by reference spills
                              const Rect& other = later[j].rect;
                              return other.row_begin < row || (other.row_begin == row && other.col_begin < col);
                          });
        if (found == count_ || !r.is_step_above(steps_[found].rect)) {
            return count_;
        }
        const Rect& below = steps_[found].rect;
        const int apart =
            blocks_of(r.col_end - r.col_begin, block_cols_) + blocks_of(below.col_end - below.col_begin, block_cols_);
        return blocks_of(below.col_end - r.col_begin, block_cols_) < apart ? found : count_;
    }

    Step* const steps_;
    int count_;
    const int block_cols_;
    const bool may_have_stairs_;
};

// The run of a tile from one step of stairs to the last one below it, or of a step alone, which has no lane.
__device__ __forceinline__ Run run_from(const Rect& top, const Rect& bottom, int lane, bool covers_tile,
                                        int block_cols) {
    const int num_blocks = blocks_of(bottom.col_end - top.col_begin, block_cols);
    const int left = bottom.common_begin() - top.col_begin;
    const int right = covers_tile ? top.common_end() - top.col_begin : 0;
    const int num_trail = num_blocks - right / block_cols;
    const int num_lead = min(blocks_of(left, block_cols), num_blocks - num_trail);
    return {top.row_begin,
            bottom.row_end,
            top.col_begin,
            bottom.col_end,
            lane > 0 ? -kNoDiagonal : top.diag_lo,
            lane > 0 ? kNoDiagonal : top.diag_hi,
            top.col_begin,
            num_blocks,
            num_lead,
            num_trail,
            lane,
            0};
}

}   // namespace ffa
