// One forward kernel. The host names the variant: FFA_ELEMENT, FFA_HEAD_DIM, ... come from
// magi_compile/kernels/heuristics.py through the compiler's command line.
#include "forward/kernel.cuh"

namespace ffa {

using Config =
    ForwardConfig<FFA_ELEMENT, FFA_HEAD_DIM, FFA_BLOCK_COLS, FFA_K_STAGES, FFA_V_STAGES, FFA_Q_BUFFERS,
                  FFA_CONSUMERS, FFA_MIN_BLOCKS_IN_TURNS, FFA_PRODUCER_REGISTERS, FFA_CONSUMER_REGISTERS,
                  FFA_HAS_SOFTCAP, FFA_HAS_STAIRS, FFA_HAS_FAR_KEYS, FFA_IS_EARLY>;

}  // namespace ffa

extern "C" __global__ void __launch_bounds__(ffa::Config::kThreads, 1)
    ffa_forward(const __grid_constant__ ffa::Config::Params params) {
    ffa::forward<ffa::Config>(params);
}
