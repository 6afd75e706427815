// The warpgroup of the backward kernel that has the scores of a tile where heads are wide, and sums up dV. A turn of its loop,
// " is the next block:
//
//     dV; S"; P" = exp2(scale S"), of which the warpgroup of dK gets what it needs
#pragma once

#include "backward/matmuls.cuh"
#include "backward/scores.cuh"
#include "backward/wide_factors.cuh"
#include "backward/wide_position.cuh"

namespace ffa {

template <class Config>
class DvWalk {
public:
    using Grad = typename Matmuls<Config>::Grad;

    __device__ __forceinline__ DvWalk(const typename Config::Params& params, SharedStorage<Config>& smem, int lane, int row)
        : smem_(smem), lane_(lane), row_(row), matmuls_(smem), math_(params, smem, lane), factors_(smem) {}

    // Over so many blocks, one at least.
    __device__ __forceinline__ void walk(Grad& dv, int left) {
        Scores scores;
        Operand probs;
        const auto keys = matmuls_.keys(smem_.k[0], row_);
        mbarrier_wait_together(smem_.q_full[block_.q().slot], block_.q().phase);
        matmuls_.issue_scores(scores, keys, block_.q().slot);
        wgmma_wait_group<0>();
        exponentiate(scores, probs);
        // No matmul is in flight where the loop closes: the compiler moves registers there.
        while (--left > 0) {
            const auto done = block_.dout();
            block_.advance();
            issue_dv(dv, probs, done);
            wgmma_wait_group<0>();
            pin(dv);
            release_in_all<Config::kCtas>(smem_.dout_empty[done.slot], lane_);
            mbarrier_wait_together(smem_.q_full[block_.q().slot], block_.q().phase);
            matmuls_.issue_scores(scores, keys, block_.q().slot);
            wgmma_wait_group<0>();
            exponentiate(scores, probs);
        }
        issue_dv(dv, probs, block_.dout());
        release(smem_.kv_empty, lane_);   // the next ones may come while the gradient leaves
        wgmma_wait_group<0>();
        pin(dv);
        release_in_all<Config::kCtas>(smem_.dout_empty[block_.dout().slot], lane_);
        block_.advance();
    }

    static constexpr int kStagingSlabs = 1;

    // From where dV leaves, when nobody needs what is there any more.
    __device__ __forceinline__ auto staging() const {
        return reinterpret_cast<typename Config::Element*>(smem_.factors);
    }

private:
    using Scores = typename Matmuls<Config>::Scores;
    using Operand = typename Matmuls<Config>::Operand;

    template <class Position>
    __device__ __forceinline__ void issue_dv(Grad& dv, const Operand& probs, const Position& dout) const {
        mbarrier_wait_together(smem_.dout_full[dout.slot], dout.phase);
        matmuls_.issue_dv(dv, probs, dout.slot);
    }

    // P of the present block, and what others need of it.
    __device__ __forceinline__ void exponentiate(Scores& scores, Operand& probs) const {
        const int mask_row = smem_.blocks[block_.q().slot].mask_row;
        pin(scores);
        if constexpr (Config::kHasSoftcap) {
            math_.cap(scores);
            math_.mask(scores, block_.q().slot, mask_row, first_row_of_block<Config>() + row_);
            Operand factors;
            exponentiate_capped(scores, probs, factors);
            release_in_all<Config::kCtas>(smem_.q_empty[block_.q().slot], lane_);
            factors_.leave(factors, lane_);
        } else {
            math_.mask(scores, block_.q().slot, mask_row, first_row_of_block<Config>() + row_);
            math_.scale(scores);
            math_.exponentiate(scores);
            round(scores, probs);
            release_in_all<Config::kCtas>(smem_.q_empty[block_.q().slot], lane_);
            factors_.leave(probs, lane_);
        }
    }

    __device__ __forceinline__ static void round(const Scores& p, Operand& rounded) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
            rounded[i] = pack<typename Config::Element>(p[2 * i], p[2 * i + 1]);
        }
    }

    // And what gradients of probabilities are multiplied with.
    __device__ __forceinline__ void exponentiate_capped(const Scores& scores, Operand& probs, Operand& factors) const {
#pragma unroll
        for (int i = 0; i < kScores / 4; ++i) {
            const float2 minus_lse = math_.minus_lse(smem_.stats[block_.q().slot][i]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* const pair = scores + 4 * i + 2 * half;
                const float2 p = math_.exponentiate_capped(pair, minus_lse);
                probs[2 * i + half] = pack<typename Config::Element>(p.x, p.y);
                factors[2 * i + half] =
                    pack<typename Config::Element>(p.x * math_.slope(pair[0]), p.y * math_.slope(pair[1]));
            }
        }
    }

    static constexpr int kScores = Matmuls<Config>::kScores;

    SharedStorage<Config>& smem_;
    const int lane_;
    const int row_;   // the first of the warp, of those of its thread block
    const Matmuls<Config> matmuls_;
    const ScoreMath<Config> math_;
    const Factors<Config> factors_;
    WidePosition<Config> block_;
};

}  // namespace ffa
