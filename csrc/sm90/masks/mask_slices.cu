#include "masks/mask_slices.cuh"

#include "mask_program.cuh"   // made from the program: ffa::Mask

namespace ffa {

struct MaskProgramParams {
    MaskSlicesParams fixed;
    Int words[Mask::kNumWords + Mask::kNumChecks + 1];
};

}   // namespace ffa

extern "C" __global__ void __launch_bounds__(512)
    ffa_mask_slices(const __grid_constant__ ffa::MaskProgramParams params) {
    ffa::MaskSlices<ffa::Mask>(params.fixed, params.words).run();
}
