// Where dq is summed up in fp32, in the order in which the warps hold it, so that 16 rows are one contiguous piece:
// [nheads_q][row / 16][col / 8][lane][4], a lane's four as in the accumulator of a wgmma: two neighbouring columns of row
// lane / 4, and of row lane / 4 + 8. When all have added to 16 rows of a head what they have, these are rounded.
#pragma once

#include "common/ptx.cuh"

namespace ffa {

constexpr int kDqGroupRows = 16;
constexpr int kDqGroupCols = 8;

struct DqSums {
    float* data;
    int row_groups;   // of a head
};

static_assert(sizeof(DqSums) == 16, "packed by magi_compile/kernels/cuda/params.py");

// How many have added to 16 rows of a head, of all that will. One visit is a run of a tile that holds some of them, by one thread
// block: where a cluster shares a tile, each of its blocks counts as `done`.
struct DqVisits {
    int* done;           // [nheads_q][row_groups]; zero at launch
    const int* wanted;   // [row_groups]: how many there will be, for each head; null where rows are rounded behind the kernel
    const int* turns;    // [num_tiles][row_groups], where additions have an order, which is that of the plan's tiles: how
                         // many come from the tiles before
};

// Where 16 rows of a warp go.
struct DqTarget {
    float* sum;
    int head;
    int first;
    bool are_in_run;
};

// The group of rows that `row` is the first of.
template <int kHeadDim>
__device__ __forceinline__ float* dq_rows(const DqSums& sums, int head, int row) {
    return sums.data + (static_cast<long long>(head) * sums.row_groups * kDqGroupRows + row) * kHeadDim;
}

}  // namespace ffa
