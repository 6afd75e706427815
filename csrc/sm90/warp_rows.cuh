// How a warp rounds 16 rows of a sum in its registers on their way out: to shared memory, where they lie as TMA stores them, in slabs
// of 64 columns in the 128-byte swizzle.
#pragma once

#include "ptx.cuh"

namespace ffa {

constexpr int kWarpRows = 16;

// 16-byte chunk c of row r lies at c ^ (r % 8).
template <class Element, int kSlabBytes, int kValues>
__device__ __forceinline__ void stage_rows(const float (&rows)[kValues], const Element* staging, int lane) {
    const int row = lane % 16;
    const uint32_t address = shared_address(staging) + row * 128;
#pragma unroll
    for (int i = 0; i < kValues / 8; ++i) {
        const int slab = i / 4;
        const int chunk = 2 * (i % 4) + lane / 16;
        stmatrix_x4(address + slab * kSlabBytes + ((chunk ^ (row % 8)) << 4),
                    pack<Element>(rows[8 * i], rows[8 * i + 1]), pack<Element>(rows[8 * i + 2], rows[8 * i + 3]),
                    pack<Element>(rows[8 * i + 4], rows[8 * i + 5]), pack<Element>(rows[8 * i + 6], rows[8 * i + 7]));
    }
}

}  // namespace ffa
