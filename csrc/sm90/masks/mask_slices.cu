#include "masks/mask_slices.cuh"

#include "mask_program.cuh"   // made from the program: ffa::Mask

struct Params {
    ffa::MaskSlicesParams fixed;
    ffa::Int words[ffa::Mask::kNumWords + ffa::Mask::kNumChecks + 1];
};

extern "C" __global__ void __launch_bounds__(512) ffa_mask_slices(const __grid_constant__ Params params) {
    ffa::MaskSlices<ffa::Mask>(params.fixed, params.words).run();
}
