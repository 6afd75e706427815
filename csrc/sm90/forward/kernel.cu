// The forward pass: out = softmax(q k^T) v over the runs of a plan, and the log-sum-exp of each row.
//
// A persistent thread block works on one (q tile, head) after another. In one warpgroup, a thread hands out the tiles
// with their Q, and a thread streams K and V into shared memory with TMA and says, block by block, what is to be seen.
// The consumer warpgroups own 64 rows each and keep scores, probabilities and output in registers. Softmax of block j
// overlaps with P V of block j - 1 in the same warpgroup, and with the matmuls of the other warpgroups. The stream of
// blocks does not stop at the borders of runs, and a warpgroup masks only the blocks that hide something from it.
//
// What a tile sees of only some of its keys is a split, and leaves in fp32. A second launch may merge the splits of a
// first with the rest of their keys; or two that run side by side share the tiles (scheduler_overlap.cuh); or one walks
// all splits of a tile, and the kernel behind it (combine.cu) merges them.
//
// The host names the variant through the compiler's command line: FFA_ELEMENT, FFA_COLS and FFA_COLS_OF_V are those of
// the problem, tile sizes come from magi_compile/kernels/heuristics.py.
#include "forward/epilogue.cuh"
#include "forward/mainloop.cuh"
#include "forward/producer.cuh"
#if FFA_HAS_SCORE
#include "score_mod.cuh"   // made from the score program: ffa::Score
#endif

namespace ffa::forward {

template <class Config>
__device__ __forceinline__ void run(const typename Config::Params& params) {
    static_assert(sizeof(SharedStorage<Config>) <= kMaxSharedBytes, "the buffers do not fit in shared memory");
    auto& smem = *reinterpret_cast<SharedStorage<Config>*>(memory);
    const int warpgroup = threadIdx.x / Config::kWarpgroup;
    if (threadIdx.x == 0) {
        init_barriers(smem);
        griddepcontrol_launch_dependents();   // what merges splits waits for them itself
    }
    __syncthreads();
    if (warpgroup == 0) {
        setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) {
            Producer<Config>(params, smem).run();
        } else if (threadIdx.x == 32) {
            Dispatcher<Config>(params, smem).run();
        }
    } else {
        setmaxnreg_inc<Config::kConsumerRegisters>();
        Consumer<Config>(params, smem, warpgroup - 1).run();
    }
}

using Config = ForwardConfig<FFA_ELEMENT, FFA_COLS, FFA_COLS_OF_V, FFA_BLOCK_COLS, FFA_K_STAGES, FFA_V_STAGES,
                             FFA_Q_BUFFERS, FFA_CONSUMERS, FFA_PRODUCER_REGISTERS, FFA_CONSUMER_REGISTERS,
                             FFA_HAS_SOFTCAP, FFA_HAS_STAIRS, FFA_HAS_BITS, FFA_MAP_LINES, FFA_MAP_INTERVALS,
                             FFA_MAP_TABLE, FFA_HAS_REMOTE_KEYS, FFA_IS_EARLY, FFA_HAS_MAX_SCORES, FFA_SCORE>;

}   // namespace ffa::forward

extern "C" __global__ void __launch_bounds__(ffa::forward::Config::kThreads, 1)
    ffa_forward(const __grid_constant__ ffa::forward::Config::Params params) {
    ffa::forward::run<ffa::forward::Config>(params);
}
