// Which half of a tile is that of a thread block of the backward kernel, where a cluster of two shares it.
#pragma once

#include "common/ptx.cuh"

namespace ffa::backward {

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

}   // namespace ffa::backward
