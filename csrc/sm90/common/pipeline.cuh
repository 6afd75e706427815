// Rings of buffers in shared memory: how large they may be together, and where one stands in them.
#pragma once

#include "common/ptx.cuh"
#include "common/wgmma.cuh"

namespace ffa {

// What a thread block of this chip can have; the host asks for all of it.
constexpr int kMaxSharedBytes = 227 * 1024;

// All of it, for a kernel to lay out.
extern __shared__ __align__(1024) unsigned char memory[];

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

    __device__ __forceinline__ Position before() const {
        return slot == 0 ? Position{kStages - 1, phase ^ 1} : Position{slot - 1, phase};
    }
};

// By one thread, in front of `fence_mbarrier_init`: a thread fills a buffer, and each of `num_warps` warps releases it.
template <int kStages>
__device__ __forceinline__ void init_ring(uint64_t (&full)[kStages], uint64_t (&empty)[kStages], int num_warps) {
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(full[i], 1);
        mbarrier_init(empty[i], num_warps);
    }
}

// By all lanes of a warp: it has no more use for a buffer, or has filled it.
__device__ __forceinline__ void release(uint64_t& barrier, int lane) {
    __syncwarp();
    mbarrier_arrive_if(lane == 0, barrier);
}

// Likewise, of the buffer at `position`, which moves on to the next one.
template <int kStages>
__device__ __forceinline__ void release(uint64_t (&empty)[kStages], Position<kStages>& position, int lane) {
    release(empty[position.slot], lane);
    position.advance();
}

// Likewise, of a buffer that is filled for all thread blocks of a cluster at a time.
template <int kCtas>
__device__ __forceinline__ void release_in_all(uint64_t& barrier, int lane) {
    if constexpr (kCtas > 1) {
        __syncwarp();
        mbarrier_arrive_at_rank_if(lane < kCtas, barrier, lane);
    } else {
        release(barrier, lane);
    }
}

// The descriptors for wgmma of what lies in the slots of a ring. That of the first one stays in a uniform register,
// from which one multiplication leads to the others.
template <int kSlotBytes>
class SlotDescriptors {
public:
    __device__ __forceinline__ explicit SlotDescriptors(const void* ring)
        : first_(uniform(wgmma_descriptor(ring, 0))) {}

    __device__ __forceinline__ uint32_t operator[](int slot) const {
        return first_ + slot * static_cast<uint32_t>(kSlotBytes >> 4);
    }

private:
    static_assert(kSlotBytes % 16 == 0, "addresses in descriptors are multiples of 16 bytes");

    const uint32_t first_;
};

}   // namespace ffa
