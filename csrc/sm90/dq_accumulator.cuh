// Where dq is summed up in fp32, in the order in which the warps hold it, so that 16 rows are one contiguous piece:
// [nheads_q][row / 16][col / 8][lane][4], a lane's four as in the accumulator of a wgmma: two neighbouring columns of row
// lane / 4, and of row lane / 4 + 8.
#pragma once

#include "ptx.cuh"

namespace ffa {

constexpr int kDqGroupRows = 16;
constexpr int kDqGroupCols = 8;

struct DqSum {
    float* data;
    int row_groups;   // of a head
};

static_assert(sizeof(DqSum) == 16, "packed by magi_compile/kernels/cuda/backward.py");

// The order of additions, where they have one: that of the plan's tiles.
struct DqOrder {
    const int* turns;   // [num_tiles][row_groups]: how many additions to 16 rows come from the tiles before
    int* visits;        // [nheads_q][row_groups]: how many have arrived
};

// The group of rows that `row` is the first of.
template <int kHeadDim>
__device__ __forceinline__ float* dq_rows(const DqSum& sum, int head, int row) {
    return sum.data + (static_cast<long long>(head) * sum.row_groups * kDqGroupRows + row) * kHeadDim;
}

}  // namespace ffa
