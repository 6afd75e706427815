// Where dq is summed up in fp32, in the order in which the warps hold it, so that 16 rows of what a warpgroup computes
// are one contiguous piece: [nheads_q][2 warpgroups][row / 8][col / 16][row % 8][16], the 16 columns as the accumulator
// of a wgmma lies in four neighbouring lanes. The second warpgroup has fewer columns where head_dim is 96.
#pragma once

#include "ptx.cuh"

namespace ffa {

constexpr int kDqGroupRows = 8;
constexpr int kDqGroupCols = 16;

struct DqSum {
    float* data;
    int row_groups;   // of a head
};

static_assert(sizeof(DqSum) == 16, "packed by magi_compile/kernels/cuda/backward.py");

// The order of additions, where they have one: that of the plan's tiles.
struct DqOrder {
    const int* turns;   // [num_tiles][row_groups]: how many additions to 8 rows come from the tiles before
    int* visits;        // [nheads_q][2 warpgroups][row_groups]: how many have arrived
};

template <int kHeadDim>
struct DqAccumulator {
    static constexpr int kFirstCols = kHeadDim > 64 ? 64 : kHeadDim / 2;   // of the first warpgroup
    static_assert(kFirstCols % kDqGroupCols == 0 && kHeadDim % kDqGroupCols == 0, "whole groups of columns");

    DqSum sum;

    __device__ __forceinline__ explicit DqAccumulator(const DqSum& sum) : sum(sum) {}

    __device__ __forceinline__ static constexpr int col_groups(int warpgroup) {
        return (warpgroup == 0 ? kFirstCols : kHeadDim - kFirstCols) / kDqGroupCols;
    }

    // The group of rows that `row` is the first of.
    __device__ __forceinline__ float* rows(int head, int warpgroup, int row) const {
        const long long first_row = static_cast<long long>(head) * sum.row_groups * kDqGroupRows;
        return sum.data + first_row * kHeadDim + warpgroup * kFirstCols * sum.row_groups * kDqGroupRows +
               static_cast<long long>(row) * kDqGroupCols * col_groups(warpgroup);
    }

    // The 16 columns [16 * col_group, ...) of `row`.
    __device__ __forceinline__ float* cols(int head, int row, int col_group) const {
        const int warpgroup = col_group >= col_groups(0);
        const int within = col_group - warpgroup * col_groups(0);
        return rows(head, warpgroup, row / kDqGroupRows * kDqGroupRows) +
               (within * kDqGroupRows + row % kDqGroupRows) * kDqGroupCols;
    }
};

}  // namespace ffa
