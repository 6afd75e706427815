// Rounds what the main kernel has left of dq: nothing, where all its thread blocks have run at a time and end together.
#include "backward/dq_convert.cuh"

namespace ffa::backward {

struct PostprocessParams {
    DqItems items;
    DqProgress* progress;
};

static_assert(sizeof(PostprocessParams) == 48, "packed by magi_compile/kernels/sm90/params.py");

constexpr int kColGroupsAtOnce = 4;

__device__ __forceinline__ void postprocess(const PostprocessParams& params) {
    griddepcontrol_wait();
    const DqRounding<FFA_ELEMENT, FFA_HEAD_DIM, FFA_COLS, kColGroupsAtOnce> rounding(params.items);
    const DqOrder order = params.progress->order(params.items);
    const int num_left = params.progress->num_left;
    const int first_not_drawn = params.progress->first_not_drawn(params.items.count());
    const int count = num_left + params.items.count() - first_not_drawn;
    const int warps = blockDim.x / 32;
    for (int i = blockIdx.x * warps + threadIdx.x / 32; i < count; i += gridDim.x * warps) {
        const int item = i < num_left ? params.progress->left()[i] : first_not_drawn + i - num_left;
        const auto [head, group] = params.items.item(item, order);
        rounding.round(head, group);
    }
}

}   // namespace ffa::backward

extern "C" __global__ void __launch_bounds__(FFA_THREADS)
    ffa_backward_postprocess(const __grid_constant__ ffa::backward::PostprocessParams params) {
    ffa::backward::postprocess(params);
}
