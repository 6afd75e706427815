// The cost of a tile, and the order in which tiles are handed out; the numbers are those of
// `magi_compile/plan/cost.py`.
#pragma once

#include "common/tile_plan.cuh"

namespace ffa {

constexpr int kBlockCost = FFA_BLOCK_COST;
constexpr int kMaskCost = FFA_MASK_COST;

__device__ __forceinline__ int cost_of(const Run& run) {
    return kBlockCost * run.num_blocks + kMaskCost * (run.num_lead + run.num_trail);
}

// In increasing order of these keys the most expensive tile comes first, equal ones by number.
__device__ __forceinline__ unsigned long long longest_first(unsigned cost, int tile) {
    return static_cast<unsigned long long>(~cost) << 32 | static_cast<unsigned>(tile);
}

}   // namespace ffa
