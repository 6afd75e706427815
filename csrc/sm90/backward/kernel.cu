// The backward pass: dk and dv of one tile of keys at a time, and its share of dq.
//
// A persistent thread block works on one (k tile, kv head) of the agenda after another, or on a part of the query heads
// of the group, where the whole of a tile would end after everything else. For all these heads and all runs of the
// tile, one producer thread streams blocks of Q and dO into shared memory; two consumer warpgroups own 64 keys each.
// Scores are transposed, keys by queries, so that P^T and dS^T are already operands of dV += P^T dO and dK += dS^T Q,
// whose sums never leave the registers until the tile is done. dS also goes through shared memory to a third warpgroup,
// which computes dQ = dS K and adds it to a sum in global memory: so the consumers wait for nobody. Warps that are free
// make dq of the sums that are complete. Where heads are wide, consumers share keys, and thread blocks may share tiles:
// see mainloop_wide.cuh.
//
// The host names the variant: FFA_ELEMENT, FFA_HEAD_DIM, ... come from
// magi_compile/kernels/heuristics.py through the compiler's command line.
#include "backward/dq.cuh"
#include "backward/dq_rows.cuh"
#include "backward/mainloop.cuh"
#include "backward/mainloop_wide.cuh"
#include "backward/producer.cuh"
#if FFA_HAS_SCORE
#include "score_mod.cuh"   // made from the score program: ffa::Score
#endif

namespace ffa::backward {

template <class Config>
__device__ __forceinline__ void run(const typename Config::Params& params) {
    static_assert(sizeof(SharedStorage<Config>) <= kMaxSharedBytes, "the buffers do not fit in shared memory");
    auto& smem = *reinterpret_cast<SharedStorage<Config>*>(memory);
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / Config::kWarpgroup, 0);
    if (threadIdx.x == 0) {
        init_barriers(smem);
    }
    init_stats(smem);
    __syncthreads();
    if constexpr (Config::kCtas > 1) {
        cluster_arrive();
        cluster_wait();
    }
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (warpgroup < Config::kConsumers) {
        setmaxnreg_inc<Config::kConsumerRegisters>();
        if constexpr (Config::kIsWide) {
            consume_wide(params, smem, warpgroup);
        } else {
            Consumer<Config>(params, smem, warpgroup).run();
        }
    } else if (warpgroup == Config::kConsumers) {
        setmaxnreg_dec<Config::kDqRegisters>();
        DqWarpgroup<Config>(params, smem).run();
    } else {
        setmaxnreg_dec<Config::kProducerRegisters>();
        constexpr int kFirst = (Config::kConsumers + 1) * Config::kWarpgroup;
        const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
        if (Config::kElects ? warp == kFirst / 32 && elect_one() : threadIdx.x == kFirst) {
            Producer<Config>(params, smem).run();
        }
        __syncwarp();
    }
    if constexpr (Config::kCtas > 1) {
        cluster_arrive();
    }
    if constexpr (Config::kRoundsDq) {
        DqRows<Config>(params, smem).run();
    }
    if constexpr (Config::kCtas > 1) {
        cluster_wait();   // the other thread block writes here until it is through
    }
}

using Config = BackwardConfig<FFA_ELEMENT, FFA_HEAD_DIM, FFA_COLS, FFA_COLS_OF_V, FFA_CTAS, FFA_BLOCK_COLS, FFA_STAGES,
                              FFA_DOUT_STAGES, FFA_SCORE_STAGES, FFA_PRODUCER_REGISTERS, FFA_DQ_REGISTERS,
                              FFA_CONSUMER_REGISTERS, FFA_HAS_SOFTCAP, FFA_HAS_BITS, FFA_MAP_LINES, FFA_MAP_INTERVALS,
                              FFA_MAP_TABLE, FFA_IS_DETERMINISTIC, FFA_ROUNDS_DQ, FFA_SCORE>;

}   // namespace ffa::backward

extern "C" __global__ void __launch_bounds__(ffa::backward::Config::kThreads, 1)
    ffa_backward(const __grid_constant__ ffa::backward::Config::Params params) {
    ffa::backward::run<ffa::backward::Config>(params);
}
