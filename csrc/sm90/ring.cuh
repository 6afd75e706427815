// Rings of buffers in shared memory: how large they may be together, and where one stands in them.
#pragma once

#include "ptx.cuh"

namespace ffa {

// What a thread block of this chip can have; the host asks for all of it.
constexpr int kMaxSharedBytes = 227 * 1024;

// A position in a ring of buffers. Consumers wait for `phase` of full, producers for the opposite phase of empty.
template <int kStages>
struct Position {
    int slot = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kStages) {
            slot = 0;
            phase ^= 1;
        }
    }
};

}  // namespace ffa
