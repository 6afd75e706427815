// What the gradients of probabilities are multiplied with, P or what a cap makes of it, on the way from the warpgroup that has
// the scores to the one that needs it, thread by thread. It is rounded as P is for dV: there is no room for more.
#pragma once

#include "backward/matmuls.cuh"

namespace ffa {

template <class Config>
class Factors {
public:
    using Element = typename Config::Element;
    using Scores = typename Matmuls<Config>::Scores;
    using Operand = typename Matmuls<Config>::Operand;

    __device__ __forceinline__ explicit Factors(SharedStorage<Config>& smem) : smem_(smem) {}

    // By the one that takes them, to begin with.
    __device__ __forceinline__ static void open() { barrier_arrive(kFactorsAreTaken, 2 * Config::kWarpgroup); }

    __device__ __forceinline__ void leave(const Operand& factors, int lane) const {
        barrier_sync(kFactorsAreTaken, 2 * Config::kWarpgroup);
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            four(i, lane) = {factors[4 * i], factors[4 * i + 1], factors[4 * i + 2], factors[4 * i + 3]};
        }
        barrier_arrive(kFactorsAreThere, 2 * Config::kWarpgroup);
    }

    // The gradients of scores, rounded.
    __device__ __forceinline__ void take(const Scores& dprobs, Operand& dscores, int lane) const {
        barrier_sync(kFactorsAreThere, 2 * Config::kWarpgroup);
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            const uint4 factors = four(i, lane);
            const uint32_t words[] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 pair = unpack<Element>(words[j]);
                dscores[4 * i + j] = pack<Element>(dprobs[8 * i + 2 * j] * pair.x, dprobs[8 * i + 2 * j + 1] * pair.y);
            }
        }
        barrier_arrive(kFactorsAreTaken, 2 * Config::kWarpgroup);
    }

private:
    static constexpr int kFours = Matmuls<Config>::kScores / 8;

    __device__ __forceinline__ uint4& four(int i, int lane) const {
        return reinterpret_cast<uint4*>(smem_.factors[threadIdx.x / 32 % FactorStorage<Config>::kWarps])[32 * i + lane];
    }

    SharedStorage<Config>& smem_;
};

}  // namespace ffa
