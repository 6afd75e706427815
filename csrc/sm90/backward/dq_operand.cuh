// The descriptors of the matmul dQ = dS K.
#pragma once

#include "backward/config.cuh"

namespace ffa {

// The wait for a turn diverges, and the compiler no longer knows that the descriptor is that of all lanes.
template <class Config>
__device__ __forceinline__ uint32_t dq_operand(const typename Config::Element* tile, uint32_t leading_bytes) {
    const uint32_t descriptor = wgmma_descriptor(tile, leading_bytes);
    return Config::kIsDeterministic ? uniform(descriptor) : descriptor;
}

}  // namespace ffa
