// The splits of each cut tile into its output: by how much each weighs, in the order of the splits, so that it repeats
// bit for bit.
#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa::forward {

struct MergeParams {
    const float* split_out;                      // [split_rows, nheads_q, head_dim_v], contiguous
    const float* split_lse;                      // [nheads_q, split_rows]
    FFA_ELEMENT* out;                            // [total_q, nheads_q, head_dim_v]
    float* lse;                                  // [nheads_q, total_q]
    const Cut* cuts;                             // [num_cuts]: those of no splits come last
    long long out_row_stride, out_head_stride;   // in elements
    int num_cuts;
    int tile_rows;
    int num_heads;
    int total_q;
    int split_rows;
};

static_assert(sizeof(MergeParams) == 80, "packed by magi_compile/kernels/sm90/params.py");

constexpr int kThreads = 256;
constexpr int kChunks = FFA_COLS_OF_V / 4;   // of a row: a thread takes one at a time

__device__ __forceinline__ void merge(const MergeParams& params, const Cut& cut, int row_in_tile, int head, int chunk) {
    const int row = cut.row_begin + row_in_tile;
    const int first = cut.split_row + row_in_tile;
    const float* const lses = params.split_lse + static_cast<long long>(head) * params.split_rows + first;
    float peak = -kInfinity;
#pragma unroll 4
    for (int i = 0; i < cut.num_splits; ++i) {
        peak = fmaxf(peak, lses[i * params.tile_rows]);
    }
    const float reference = peak == -kInfinity ? 0.f : peak;
    const auto at = [&](int row) { return (static_cast<long long>(row) * params.num_heads + head) * kChunks + chunk; };
    float total = 0.f;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
    for (int i = 0; i < cut.num_splits; ++i) {
        const float weight = __expf(lses[i * params.tile_rows] - reference);
        const float4 split = reinterpret_cast<const float4*>(params.split_out)[at(first + i * params.tile_rows)];
        total += weight;
        sum.x += weight * split.x;
        sum.y += weight * split.y;
        sum.z += weight * split.z;
        sum.w += weight * split.w;
    }
    const float scale = total == 0.f ? 0.f : 1.f / total;
    FFA_ELEMENT* const out = params.out + row * params.out_row_stride + head * params.out_head_stride;
    reinterpret_cast<uint2*>(out)[chunk] = {pack<FFA_ELEMENT>(sum.x * scale, sum.y * scale),
                                            pack<FFA_ELEMENT>(sum.z * scale, sum.w * scale)};
    if (chunk == 0) {
        params.lse[static_cast<long long>(head) * params.total_q + row] = reference + __logf(total);
    }
}

__device__ __forceinline__ void run(const MergeParams& params) {
    griddepcontrol_wait();
    for (int i = blockIdx.x * kThreads + threadIdx.x;; i += gridDim.x * kThreads) {
        const int row = i / kChunks / params.num_heads;
        const int number = row / params.tile_rows;
        if (number >= params.num_cuts) {
            break;
        }
        const Cut cut = params.cuts[number];
        if (cut.num_splits == 0) {
            break;
        }
        const int row_in_tile = row - number * params.tile_rows;
        if (row_in_tile < cut.row_end - cut.row_begin) {
            merge(params, cut, row_in_tile, i / kChunks % params.num_heads, i % kChunks);
        }
    }
}

}   // namespace ffa::forward

extern "C" __global__ void __launch_bounds__(ffa::forward::kThreads)
    ffa_forward_merge(const __grid_constant__ ffa::forward::MergeParams params) {
    ffa::forward::run(params);
}
