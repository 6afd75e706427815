// What the backward pass needs of each query row before it starts: what scores start from, a multiple of -lse, and what
// gradients of probabilities start from, -delta = dlse - rowsum(dout * out). Clears on the way what the main kernel
// counts with and adds to, and writes its agenda.
#include "backward/dq_convert.cuh"
#include "backward/params.cuh"
#include "backward/schedule/writer.cuh"
#include "common/ptx.cuh"
#include "common/statistics.cuh"

namespace ffa::backward {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 5;   // left to itself, the compiler takes 40 registers, and spills
using Writer = AgendaWriter<FFA_BLOCK_COLS, FFA_TILE_WARPS>;

struct PreprocessParams {
    const FFA_ELEMENT* out;    // [total_q, nheads_q, head_dim_v], rows of 16-byte multiples
    const FFA_ELEMENT* dout;   // likewise
    const float* lse;          // [nheads_q, total_q], natural log
    const float* dlse;         // [nheads_q, total_q], or null
    Stats* stats;              // [nheads_q, rows / 8]: lse times lse_factor, -delta
    DqSums dq;
    int* done;     // [nheads_q, dq.row_groups] of DqVisits
    int* wanted;   // [dq.row_groups + 1], or null where nobody asks
    DqProgress* dq_progress;
    long long out_row_stride, out_head_stride;   // in elements
    long long dout_row_stride, dout_head_stride;
    int total_q;
    float lse_factor;
    Writer::Params agenda;
};

static_assert(sizeof(PreprocessParams) == 232, "packed by magi_compile/kernels/sm90/params.py");

constexpr int kHeadDim = FFA_HEAD_DIM;
constexpr int kElementsPerLane = 8;   // 16 bytes
constexpr int kLanesPerRow = kHeadDim > 128 ? 32 : kHeadDim > 64 ? 16 : 8;
constexpr int kRowsAtOnce = kThreads / kLanesPerRow;
constexpr int kRows = FFA_ROWS;   // of a thread block
static_assert(kHeadDim <= 32 * kElementsPerLane, "a warp reads a row at once");
static_assert(kRows % kRowsAtOnce == 0 && kRows % kDqGroupRows == 0, "whole steps, whole groups");

__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
    return dot_pair<FFA_ELEMENT>(a.x, b.x) + dot_pair<FFA_ELEMENT>(a.y, b.y) + dot_pair<FFA_ELEMENT>(a.z, b.z) +
           dot_pair<FFA_ELEMENT>(a.w, b.w);
}

__device__ __forceinline__ void preprocess(const PreprocessParams& params) {
    griddepcontrol_launch_dependents();
    const auto block = [] {
        return opaque(blockIdx.y) * int(gridDim.x) + opaque(blockIdx.x);
    };   // no register keeps it
    const Writer::Params& list = params.agenda;
    if (block() == 0) {
        const DqOrder order = Writer(list).write();
        compact_for_each(1, [&](int) { params.dq_progress->order_of_tiles = order; });
    }
    if (block() == 1) {
        compact_for_each(1, [&](int) { params.dq_progress->reset(); });
        if (params.wanted != nullptr) {
            clear_dq_visits(params.wanted, params.dq.row_groups);
            note_dq_visits<FFA_BLOCK_COLS>(list.tiles, list.runs, list.num_tiles, params.wanted);
            count_walks<FFA_BLOCK_COLS>(list.tiles, list.runs, list.num_tiles, params.dq_progress->more_head_by_head);
            count_dq_visits(params.wanted, params.dq.row_groups);
        }
    }
    const int first_row = blockIdx.x * kRows;
    const int head = gridDim.y - 1 - blockIdx.y;   // the first ones, with which the main kernel starts, come last
    const int padded_q = params.dq.row_groups * kDqGroupRows;
    const int lane = threadIdx.x % kLanesPerRow;
    const FFA_ELEMENT* out = params.out + head * params.out_head_stride + lane * kElementsPerLane;
    const FFA_ELEMENT* dout = params.dout + head * params.dout_head_stride + lane * kElementsPerLane;
#pragma unroll
    for (int step = 0; step < kRows / kRowsAtOnce; ++step) {
        const int row = first_row + step * kRowsAtOnce + threadIdx.x / kLanesPerRow;
        const bool is_live = row < params.total_q;
        float sum = 0.f;
        if (is_live && lane * kElementsPerLane < FFA_COLS_OF_V) {
            sum = dot(*reinterpret_cast<const uint4*>(out + row * params.out_row_stride),
                      *reinterpret_cast<const uint4*>(dout + row * params.dout_row_stride));
        }
#pragma unroll
        for (int offset = kLanesPerRow / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffff, sum, offset);
        }
        if (row < padded_q && lane < kStatsRows) {
            const long long index = static_cast<long long>(head) * params.total_q + row;
            const float lse = is_live ? params.lse[index] : -kInfinity;
            float statistic = 0.f;   // of rows that see nothing: masks hide all of them
            if (lse != -kInfinity) {
                statistic = lane < kTerms ? lse * params.lse_factor : (params.dlse ? params.dlse[index] : 0.f) - sum;
            }
            Stats& stats = params.stats[(static_cast<long long>(head) * padded_q + row) / kStatsQueries];
            stats.terms[lane][row % kStatsQueries] = term_of(statistic, lane % kTerms);
        }
    }
    const int num_rows = max(min(kRows, padded_q - first_row), 0);
    if (threadIdx.x < num_rows / kDqGroupRows) {
        params.done[static_cast<long long>(head) * params.dq.row_groups + first_row / kDqGroupRows + threadIdx.x] = 0;
    }
    float4* const dq = reinterpret_cast<float4*>(dq_rows<kHeadDim>(params.dq, head, first_row));
    for (int i = threadIdx.x; i < num_rows * kHeadDim / 4; i += kThreads) {
        dq[i] = {0.f, 0.f, 0.f, 0.f};
    }
}

}   // namespace ffa::backward

extern "C" __global__ void __launch_bounds__(ffa::backward::kThreads, ffa::backward::kBlocksPerSm)
    ffa_backward_preprocess(const __grid_constant__ ffa::backward::PreprocessParams params) {
    ffa::backward::preprocess(params);
}
