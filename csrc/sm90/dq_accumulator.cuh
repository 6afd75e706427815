// Where dq is summed up in fp32, in the order in which a warp holds it: [nheads_q][row / 8][col / 16][row % 8][16],
// the 16 columns as the accumulator of a wgmma lies in four neighbouring lanes. A warp that adds 8 rows x 16 columns
// touches 512 contiguous bytes if its first row is a multiple of 8, and two contiguous pieces otherwise.
#pragma once

#include "ptx.cuh"

namespace ffa {

constexpr int kDqGroupRows = 8;
constexpr int kDqGroupCols = 16;

struct DqAccumulator {
    float* data;
    int row_groups;   // of a head

    // What lane `lane_in_quad` holds of columns [16 * col_group, ...) of a row: the columns 2 * lane_in_quad + {0, 1}
    // and those 8 further right.
    template <int kHeadDim>
    __device__ __forceinline__ float* quad_chunk(int head, int row, int col_group, int lane_in_quad) const {
        static_assert(kHeadDim % kDqGroupCols == 0, "a row is whole groups of columns");
        const long long group = static_cast<long long>(head) * row_groups + row / kDqGroupRows;
        return data + group * (kDqGroupRows * kHeadDim) + (col_group * kDqGroupRows + row % kDqGroupRows) * kDqGroupCols +
               4 * lane_in_quad;
    }
};

static_assert(sizeof(DqAccumulator) == 16, "packed by magi_compile/kernels/cuda/backward.py");

}  // namespace ffa
