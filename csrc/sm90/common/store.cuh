// How a warp rounds 16 rows of a sum in its registers on their way out: to shared memory, where they lie as TMA stores
// them, in slabs of 64 columns in the 128-byte swizzle.
#pragma once

#include "common/ptx.cuh"

namespace ffa {

constexpr int kWarpRows = 16;

// 16-byte chunk c of row r lies at c ^ (r % 8). Of all values those from `kFirst` on, from a first slab on.
template <class Element, int kSlabBytes, int kFirst, int kEnd, int kValues>
__device__ __forceinline__ void stage_rows(const float (&rows)[kValues], const Element* staging, int lane) {
    const int row = lane % 16;
    const uint32_t address = shared_address(staging) + row * 128;
#pragma unroll
    for (int i = kFirst; i < kEnd; i += 8) {
        const int slab = (i - kFirst) / 32;
        const int chunk = 2 * ((i - kFirst) / 8 % 4) + lane / 16;
        stmatrix_x4(address + slab * kSlabBytes + ((chunk ^ (row % 8)) << 4), pack<Element>(rows[i], rows[i + 1]),
                    pack<Element>(rows[i + 2], rows[i + 3]), pack<Element>(rows[i + 4], rows[i + 5]),
                    pack<Element>(rows[i + 6], rows[i + 7]));
    }
}

template <class Element, int kSlabBytes, int kValues>
__device__ __forceinline__ void stage_rows(const float (&rows)[kValues], const Element* staging, int lane) {
    stage_rows<Element, kSlabBytes, 0, kValues>(rows, staging, lane);
}

}   // namespace ffa
