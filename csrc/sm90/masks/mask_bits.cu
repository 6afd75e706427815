#include "masks/mask_bits.cuh"

#include "mask_mod.cuh"   // made from the mask_mod: ffa::Mask

namespace ffa {

constexpr bool kHasLists = FFA_HAS_LISTS;

struct MaskModParams {
    MaskBitsParams fixed;
    Int words[Mask::kNumWords + MaskBits<Mask, kHasLists>::kNumChecks + 1];
};

}   // namespace ffa

extern "C" __global__ void __launch_bounds__(ffa::kBitsThreads, 2)
    ffa_mask_bits(const __grid_constant__ ffa::MaskModParams params) {
    __shared__ ffa::BitsOfBlock shared;
    ffa::MaskBits<ffa::Mask, ffa::kHasLists>(params.fixed, params.words, shared).run(blockIdx.x, gridDim.x);
}
