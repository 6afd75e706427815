// Which part of a tile is that of a thread block of the backward kernel, where a cluster of two shares it.
#pragma once

#include "ring.cuh"

namespace ffa {

// The number of this thread block among those that share a tile, and the other one's. No register keeps it.
template <class Config>
__device__ __forceinline__ int rank_in_cluster() {
    return Config::kCtas > 1 ? opaque(blockIdx.x) % Config::kCtas : 0;
}

template <class Config>
__device__ __forceinline__ int peer_rank() {
    return rank_in_cluster<Config>() ^ 1;
}

// Its first key, of the tile's.
template <class Config>
__device__ __forceinline__ int first_row_of_block() {
    return rank_in_cluster<Config>() * Config::kRows;
}

// Of the other one's keys, the first slab of columns that this one needs.
template <class Config>
__device__ __forceinline__ int first_peer_slab() {
    return rank_in_cluster<Config>() * (Config::kSlabs - Config::kPeerSlabs);
}

// By all lanes of a warp: it has no more use for a buffer that is filled for all thread blocks at a time.
template <class Config>
__device__ __forceinline__ void release_for_all(uint64_t& barrier, int lane) {
    if constexpr (Config::kCtas > 1) {
        __syncwarp();
        mbarrier_arrive_at_rank_if(lane < Config::kCtas, barrier, lane);
    } else {
        release(barrier, lane);
    }
}

}  // namespace ffa
