// dq from its accumulator: scaled, rounded, in the order of its columns.
#include "dq_accumulator.cuh"
#include "ptx.cuh"

namespace ffa {

struct PostprocessParams {
    DqSum sum;
    uint4* dq;   // [total_q, nheads_q, head_dim], contiguous
    int total_q;
    float scale;
};

static_assert(sizeof(PostprocessParams) == 32, "packed by magi_compile/kernels/cuda/backward.py");

constexpr int kHeadDim = FFA_HEAD_DIM;
constexpr int kThreads = 256;
constexpr int kRows = FFA_ROWS;   // of a thread block
constexpr int kHalfRows = kDqGroupRows / 2;
constexpr int kPairs = kHeadDim / (2 * kDqGroupCols);   // of column groups

// 8 columns of a row from the four lanes that hold them: `half` 0 or 1 of each.
__device__ __forceinline__ uint4 round_row(const float4 (&lanes)[4], int half, float scale) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float first = half ? lanes[i].z : lanes[i].x;
        const float second = half ? lanes[i].w : lanes[i].y;
        words[i] = pack<FFA_ELEMENT>(first * scale, second * scale);
    }
    return {words[0], words[1], words[2], words[3]};
}

// A thread takes 16 columns of two rows, 8 apart.
__device__ __forceinline__ void postprocess(const PostprocessParams& params) {
    const int head = gridDim.y - 1 - blockIdx.y;   // the last ones are still in the L2 cache
    griddepcontrol_wait();
    for (int i = threadIdx.x; i < kRows / 2 * kPairs; i += kThreads) {
        const int pair = i % kPairs;
        const int row_pair = i / kPairs;
        const int first_row = blockIdx.x * kRows + row_pair / kHalfRows * kDqGroupRows;
        if (first_row >= params.total_q) {
            break;
        }
        const float4* const group =
            reinterpret_cast<const float4*>(dq_rows<kHeadDim>(params.sum, head, first_row)) +
            pair * 64 + row_pair % kHalfRows * 4;
        float4 lanes[2][4];
#pragma unroll
        for (int lane = 0; lane < 8; ++lane) {
            lanes[lane / 4][lane % 4] = group[lane / 4 * 32 + lane % 4];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + row_pair % kHalfRows + half * kHalfRows;
            if (row < params.total_q) {
                const long long dq_row = static_cast<long long>(row) * gridDim.y + head;
                uint4* const dq = params.dq + (dq_row * kPairs + pair) * 2;
                dq[0] = round_row(lanes[0], half, params.scale);
                dq[1] = round_row(lanes[1], half, params.scale);
            }
        }
    }
}

}  // namespace ffa

extern "C" __global__ void __launch_bounds__(ffa::kThreads)
    ffa_backward_postprocess(const __grid_constant__ ffa::PostprocessParams params) {
    ffa::postprocess(params);
}
