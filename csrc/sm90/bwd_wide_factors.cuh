// What the gradients of probabilities are multiplied with, P or what a cap makes of it, on the way from the warpgroup that has
// the scores to the one that needs it, thread by thread.
#pragma once

#include "bwd_matmuls.cuh"
#include "ring.cuh"

namespace ffa {

template <class Config>
class Factors {
public:
    using Element = typename Config::Element;
    using Scores = typename Matmuls<Config>::Scores;
    using Operand = typename Matmuls<Config>::Operand;

    __device__ __forceinline__ explicit Factors(SharedStorage<Config>& smem) : smem_(smem) {}

    __device__ __forceinline__ void leave(const Scores& factors, int slot, int lane) const {
        mbarrier_wait_together(smem_.wide.factors_empty, slot ^ 1);
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            four(i, lane) = {factors[4 * i], factors[4 * i + 1], factors[4 * i + 2], factors[4 * i + 3]};
        }
        pass(smem_.wide.factors_full, lane);
    }

    // The gradients of scores, rounded.
    __device__ __forceinline__ void take(const Scores& dprobs, Operand& dscores, int slot, int lane) const {
        mbarrier_wait_together(smem_.wide.factors_full, slot);
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            const float4 factors = four(i, lane);
            dscores[2 * i] = pack<Element>(dprobs[4 * i] * factors.x, dprobs[4 * i + 1] * factors.y);
            dscores[2 * i + 1] = pack<Element>(dprobs[4 * i + 2] * factors.z, dprobs[4 * i + 3] * factors.w);
        }
        pass(smem_.wide.factors_empty, lane);
    }

private:
    using Storage = WideStorage<Config>;
    static_assert(Config::kStages == 2, "the slot of a block is the phase of what there is one of for each");
    static constexpr int kFours = Matmuls<Config>::kScores / 4;
    static constexpr int kFoursOfSlab = kFours / Storage::kSlabs;

    __device__ __forceinline__ float4& four(int i, int lane) const {
        float* const numbers = smem_.factors[i / kFoursOfSlab][threadIdx.x / 32 % Storage::kWarps];
        return *reinterpret_cast<float4*>(numbers + 128 * (i % kFoursOfSlab) + 4 * lane);
    }

    __device__ __forceinline__ void pass(uint64_t& barrier, int lane) const {
        __syncwarp();
        mbarrier_arrive_if(lane == 0, barrier);
    }

    SharedStorage<Config>& smem_;
};

}  // namespace ffa
