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
constexpr int kColGroups = kHeadDim / kDqGroupCols;

__device__ __forceinline__ void postprocess(const PostprocessParams& params) {
    const int head = gridDim.y - 1 - blockIdx.y;   // the last ones are still in the L2 cache
    griddepcontrol_wait();
    for (int i = threadIdx.x; i < kRows * kColGroups; i += kThreads) {
        const int row = blockIdx.x * kRows + i / kColGroups;
        const int col_group = i % kColGroups;
        if (row >= params.total_q) {
            break;
        }
        const float4* const quad = reinterpret_cast<const float4*>(
            DqAccumulator<kHeadDim>(params.sum).cols(head, row, col_group));
        uint32_t low[4], high[4];
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            const float4 x = quad[lane];
            low[lane] = pack<FFA_ELEMENT>(x.x * params.scale, x.y * params.scale);
            high[lane] = pack<FFA_ELEMENT>(x.z * params.scale, x.w * params.scale);
        }
        const long long dq_row = static_cast<long long>(row) * gridDim.y + head;
        uint4* const dq = params.dq + (dq_row * kColGroups + col_group) * 2;
        dq[0] = {low[0], low[1], low[2], low[3]};
        dq[1] = {high[0], high[1], high[2], high[3]};
    }
}

}  // namespace ffa

extern "C" __global__ void __launch_bounds__(ffa::kThreads)
    ffa_backward_postprocess(const __grid_constant__ ffa::PostprocessParams params) {
    ffa::postprocess(params);
}
