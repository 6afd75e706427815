// The warpgroup of the backward kernel that has the gradients of a tile's scores where heads are wide, and sums up dK. A turn of
// its loop, " is the next block:
//
//     dK; dP"; dS" = P" dP", with P" from its neighbour, is stored and announced
//
// Its matmuls follow one another: those of the others fill the gaps. Or, where dK takes dS from shared memory:
//
//     dP"; beside dK, dS" is computed, stored and announced
#pragma once

#include "backward/matmuls.cuh"
#include "backward/scores.cuh"
#include "backward/wide_factors.cuh"
#include "backward/wide_position.cuh"

namespace ffa {

template <class Config>
class DkWalk {
public:
    using Grad = typename Matmuls<Config>::Grad;

    __device__ __forceinline__ DkWalk(const typename Config::Params& params, SharedStorage<Config>& smem, int lane, int row)
        : smem_(smem), lane_(lane), row_(row), matmuls_(smem), math_(params, smem, lane), factors_(smem) {
        factors_.open();
    }

    // Over so many blocks, one at least.
    __device__ __forceinline__ void walk(Grad& dk, int left) {
        Scores dprobs;
        Operand dscores;
        const auto values = matmuls_.keys(smem_.v[0], row_);
        issue_dprobs(dprobs, values);
        wgmma_wait_group<0>();
        differentiate_scores(dprobs, dscores);
        // No matmul is in flight where the loop closes: the compiler moves registers there.
        while (--left > 0) {
            block_.advance();
            if constexpr (kOverlaps) {
                issue_dprobs(dprobs, values);
                issue_dk(dk, dscores, block_.before());
                wgmma_wait_group<1>();
                differentiate_scores(dprobs, dscores);
                finish_dk(dk, block_.before());
            } else {
                issue_dk(dk, dscores, block_.before());
                finish_dk(dk, block_.before());
                issue_dprobs(dprobs, values);
                wgmma_wait_group<0>();
                differentiate_scores(dprobs, dscores);
            }
        }
        issue_dk(dk, dscores, block_);
        release(smem_.kv_empty, lane_);   // the next ones may come while the gradient leaves
        finish_dk(dk, block_);
        block_.advance();
        if constexpr (Config::kSharesDq) {
            await_peer();
        }
    }

    static constexpr int kStagingSlabs = Config::kScoreStages * Config::kScoreSlabs;

    // From where dK leaves, when nobody needs what is there any more.
    __device__ __forceinline__ auto staging() const { return smem_.dscores[0][0]; }

private:
    using Scores = typename Matmuls<Config>::Scores;
    using Operand = typename Matmuls<Config>::Operand;

    static constexpr bool kOverlaps = Config::kHasDscoresOfDkInShared;
    using At = WidePosition<Config>;

    __device__ __forceinline__ void issue_dk(Grad& dk, const Operand& dscores, const At& block) const {
        if constexpr (kOverlaps) {
            mbarrier_wait_together(smem_.dscores_full[block.dout().slot], block.dout().phase);   // those of the other warps
            matmuls_.issue_dk(dk, smem_.dscores[block.dout().slot][0], block.q().slot);
        } else {
            matmuls_.issue_dk(dk, dscores, block.q().slot);
        }
    }

    __device__ __forceinline__ void finish_dk(Grad& dk, const At& block) const {
        wgmma_wait_group<0>();
        pin(dk);
        release_in_all<Config::kCtas>(smem_.q_empty[block.q().slot], lane_);
        if constexpr (kOverlaps) {
            release(smem_.dscores_empty[block.dout().slot], lane_);
        }
    }

    // Of the present block.
    __device__ __forceinline__ void issue_dprobs(Scores& dprobs, const typename Matmuls<Config>::Keys& values) const {
        mbarrier_wait_together(smem_.q_full[block_.q().slot], block_.q().phase);   // for what dP starts from
        mbarrier_wait_together(smem_.dout_full[block_.dout().slot], block_.dout().phase);
        matmuls_.issue_dprobs(dprobs, values, block_.dout().slot, block_.q().slot);
    }

    // dS of the present block, which is left to the warpgroups of dQ, here and in the other thread block.
    __device__ __forceinline__ void differentiate_scores(Scores& dprobs, Operand& dscores) const {
        pin(dprobs);
        release_in_all<Config::kCtas>(smem_.dout_empty[block_.dout().slot], lane_);
        factors_.take(dprobs, dscores, lane_);
        const auto [slot, phase] = block_.dout();
        mbarrier_wait_together(smem_.dscores_empty[slot], phase ^ 1);
        if constexpr (Config::kSharesDq) {
            mbarrier_wait_together(smem_.cluster.to_peer[slot], phase ^ 1);
        }
        math_.store_dscores(dscores, smem_.dscores[slot][0], row_);
        fence_proxy_async_shared();
        release(smem_.dscores_full[slot], lane_);
        if constexpr (Config::kSharesDq) {
            send(slot);
        }
    }

    __device__ __forceinline__ void send(int slot) const {
        if (lane_ == 0) {
            const uint32_t offset = row_ * Config::kSlabCols * sizeof(typename Config::Element);
            cp_async_bulk_to_peer(shared_address(smem_.peer_dscores[slot]) + offset,
                                  shared_address(smem_.dscores[slot][0]) + offset, kBytesOfWarp,
                                  smem_.cluster.from_peer[slot], peer_rank<Config>());
        }
        __syncwarp();
    }

    // Until what has been sent to the other thread block has been read: dK leaves from there.
    __device__ __forceinline__ void await_peer() const {
        auto next = block_.dout();
#pragma unroll
        for (int i = 0; i < Config::kScoreStages; ++i) {
            mbarrier_wait_together(smem_.cluster.to_peer[next.slot], next.phase ^ 1);
            next.advance();
        }
    }

    static constexpr uint32_t kBytesOfWarp = kWarpRows * Config::kSlabCols * sizeof(typename Config::Element);

    SharedStorage<Config>& smem_;
    const int lane_;
    const int row_;   // the first of the warp, of those of its thread block
    const Matmuls<Config> matmuls_;
    const ScoreMath<Config> math_;
    const Factors<Config> factors_;
    WidePosition<Config> block_;
};

}  // namespace ffa
