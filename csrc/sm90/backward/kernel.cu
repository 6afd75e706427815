// One backward kernel. The host names the variant: FFA_ELEMENT, FFA_HEAD_DIM, ... come from
// magi_compile/kernels/heuristics.py through the compiler's command line.
#include "backward/kernel.cuh"

namespace ffa {

using Config = BackwardConfig<FFA_ELEMENT, FFA_HEAD_DIM, FFA_CTAS, FFA_BLOCK_COLS, FFA_STAGES, FFA_DOUT_STAGES,
                              FFA_SCORE_STAGES, FFA_PRODUCER_REGISTERS, FFA_DQ_REGISTERS, FFA_CONSUMER_REGISTERS, FFA_HAS_SOFTCAP,
                              FFA_IS_DETERMINISTIC, FFA_ROUNDS_DQ, FFA_HAS_FAR_TILES>;

}  // namespace ffa

extern "C" __global__ void __launch_bounds__(ffa::Config::kThreads, 1)
    ffa_backward(const __grid_constant__ ffa::Config::Params params) {
    ffa::backward<ffa::Config>(params);
}
