// Gradients of the tensors that a score_mod captures, which are added up in fp32, in any order. A kernel of its own, in
// front of the main one of the backward pass: that has no registers to spare, and this needs only two of the five
// products.
//
// A thread block works on one (q tile, head) of the plan. Its producer thread loads Q and dO once and streams K and V;
// the consumer warpgroups own 64 rows each.
//
// The host names the variant: FFA_ELEMENT, FFA_HEAD_DIM, ... come from
// magi_compile/kernels/heuristics.py through the compiler's command line.
#include "common/scheduler.cuh"
#include "scores/gradients/mainloop.cuh"
#include "scores/gradients/producer.cuh"
#include "score_mod.cuh"   // made from the score program: ffa::Score

namespace ffa::scores {

template <class Config>
__device__ __forceinline__ void run(const typename Config::Params& params) {
    static_assert(sizeof(SharedStorage<Config>) <= kMaxSharedBytes, "the buffers do not fit in shared memory");
    auto& smem = *reinterpret_cast<SharedStorage<Config>*>(memory);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const WorkItem item = Scheduler(params.schedule, blockIdx.x).item();
    const Tile tile = params.schedule.tiles[item.tile];
    if (tile.run_begin == tile.run_end) {
        return;
    }
    if (threadIdx.x == 0) {
        init_barriers(smem);
        smem.num_blocks = count_blocks(params.runs, tile);
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / Config::kWarpgroup;
    if (warpgroup == 0) {
        setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) {
            Producer<Config>(params, smem).run(tile, item.head);
        }
    } else {
        setmaxnreg_inc<Config::kConsumerRegisters>();
        Consumer<Config>(params, smem, warpgroup - 1).run(tile, item.head);
    }
}

using Config = TableGradientsConfig<FFA_ELEMENT, FFA_HEAD_DIM, FFA_BLOCK_COLS, FFA_K_STAGES, FFA_V_STAGES,
                                    FFA_CONSUMERS, FFA_PRODUCER_REGISTERS, FFA_CONSUMER_REGISTERS, FFA_HAS_BITS, Score>;

}   // namespace ffa::scores

extern "C" __global__ void __launch_bounds__(ffa::scores::Config::kThreads, 1)
    ffa_table_gradients(const __grid_constant__ ffa::scores::Config::Params params) {
    ffa::scores::run<ffa::scores::Config>(params);
}
