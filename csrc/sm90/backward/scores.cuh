// The arithmetic of the backward kernel on scores, keys by queries, as a warpgroup holds them: from scores to probabilities,
// and the gradients of scores on their way to shared memory.
#pragma once

#include "backward/matmuls.cuh"
#include "common/mask.cuh"

namespace ffa {

template <class Config>
class ScoreMath {
public:
    using Element = typename Config::Element;
    static constexpr int kScores = Matmuls<Config>::kScores;
    using Scores = typename Matmuls<Config>::Scores;
    using Operand = typename Matmuls<Config>::Operand;

    __device__ __forceinline__ ScoreMath(const typename Config::Params& params, const SharedStorage<Config>& smem, int lane)
        : params_(params), smem_(smem), lane_(lane) {}

    // `row` is the first one of the warp in its tile.
    __device__ __forceinline__ void mask(Scores& scores, int slot, int mask_row, int row) const {
        if (__any_sync(0xffffffff, mask_row != kNoMask)) {
            const Block& block = smem_.blocks[slot];
            apply_mask<true>(scores, block.run, params_.edges, mask_row + row + lane_ / 4, block.first + 2 * (lane_ % 4));
        }
    }

    // The exponents of P to base 2.
    __device__ __forceinline__ void scale(Scores& scores) const {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            scores[i] *= params_.scale_log2;
        }
        pin(scores);
    }

    __device__ __forceinline__ void exponentiate(Scores& exponents) const {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            exponents[i] = ex2(exponents[i]);
        }
    }

    __device__ __forceinline__ void cap(Scores& scores) const {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            scores[i] = tanh_approx(scores[i] * params_.cap_scale);
        }
    }

    // Of two neighbouring queries.
    __device__ __forceinline__ float2 exponentiate_capped(const float* capped, float2 minus_lse) const {
        return {ex2(capped[0] * params_.scale_log2 + minus_lse.x), ex2(capped[1] * params_.scale_log2 + minus_lse.y)};
    }

    // Of the cap. Hidden scores are -inf, and their slope must not be.
    __device__ __forceinline__ static float slope(float capped) { return fmaxf(1.f - capped * capped, 0.f); }

    // Of this lane's queries among the next 8.
    __device__ __forceinline__ float2 minus_lse(const Stats& stats) const {
        return statistic_of_pair(stats, Statistic::kOfScores, opaque(lane_) % 4);
    }

    // `row` as in mask().
    __device__ __forceinline__ void store_dscores(const Operand& dscores, const Element* slabs, int warp_row) const {
        const int row = lane_ % 16;
        const uint32_t address = shared_address(slabs) + (warp_row + row) * 128;
        const uint32_t first = address + ((lane_ / 16 ^ row % 8) << 4);
#pragma unroll
        for (int i = 0; i < kScores / 8; ++i) {
            // Both lead to the same place. The first one takes fewer registers, but where heads are not wide it costs 2 %.
            const int chunk = 2 * (i % 4) + lane_ / 16;
            const uint32_t swizzled = Config::kIsWide ? first ^ i % 4 << 5 : address + ((chunk ^ row % 8) << 4);
            stmatrix_x4(swizzled + i / 4 * kKSlabBytes, dscores[4 * i], dscores[4 * i + 1], dscores[4 * i + 2],
                        dscores[4 * i + 3]);
        }
    }

private:
    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);

    const typename Config::Params& params_;
    const SharedStorage<Config>& smem_;
    const int lane_;
};

}  // namespace ffa
