// The warpgroup of the backward kernel that has the gradients of a tile's scores where heads are wide, and sums up dK. A turn of
// its loop, " is the next block:
//
//     dS is stored and announced; dK and dP" are issued; dK is done; dP" is done: dS" = P" dP", with P" from its neighbour
#pragma once

#include "bwd_matmuls.cuh"
#include "bwd_scores.cuh"
#include "bwd_wide_factors.cuh"

namespace ffa {

template <class Config>
class DkWalk {
public:
    using Grad = typename Matmuls<Config>::Grad;

    __device__ __forceinline__ DkWalk(const typename Config::Params& params, SharedStorage<Config>& smem, int lane, int row)
        : smem_(smem), lane_(lane), row_(row), matmuls_(smem), math_(params, smem, lane_), factors_(smem) {}

    // Over so many blocks, one at least.
    __device__ __forceinline__ void walk(Grad& dk, int left) {
        Operand dscores;
        differentiate_scores(dscores, [] {});
        // No matmul is in flight where the loop closes: the compiler moves registers there.
        while (true) {
            const Position<Config::kStages> done = block_;
            announce(dscores);
            matmuls_.issue_dk(dk, dscores, block_.slot);
            block_.advance();
            if (--left == 0) {
                release(smem_.kv_empty);   // the next ones may come while the gradient leaves
                wgmma_wait_group<0>();
                pin(dk);
                release(smem_.q_empty[done.slot]);
                await_peer();
                break;
            }
            differentiate_scores(dscores, [&] {
                wgmma_wait_group<1>();
                pin(dk);
                release(smem_.q_empty[done.slot]);
            });
        }
    }

    // From where dK leaves, when nobody needs what is there any more.
    __device__ __forceinline__ auto staging() const { return smem_.dscores[0][0]; }

private:
    using Scores = typename Matmuls<Config>::Scores;
    using Operand = typename Matmuls<Config>::Operand;

    // Leaves dS of the present block to the warpgroups of dQ, here and in the other thread block; it has the slot of its queries.
    __device__ __forceinline__ void announce(const Operand& dscores) {
        static_assert(Config::kScoreStages == Config::kStages, "one position for both");
        const int slot = block_.slot;
        mbarrier_wait_together(smem_.dscores_empty[slot], block_.phase ^ 1);
        mbarrier_wait_together(smem_.wide.to_peer[slot], block_.phase ^ 1);
        math_.store_dscores(dscores, smem_.dscores[slot][0], row_);
        fence_proxy_async_shared();
        release(smem_.dscores_full[slot]);
        if (lane_ == 0) {
            const uint32_t offset = row_ * Config::kSlabCols * sizeof(typename Config::Element);
            cp_async_bulk_to_peer(shared_address(smem_.peer_dscores[slot]) + offset,
                                  shared_address(smem_.dscores[slot][0]) + offset, kBytesOfWarp,
                                  smem_.wide.from_peer[slot], peer_rank<Config>());
        }
        __syncwarp();
    }

    // Until what has been sent to the other thread block has been read: dK leaves from there.
    __device__ __forceinline__ void await_peer() const {
#pragma unroll
        for (int slot = 0; slot < Config::kScoreStages; ++slot) {
            const uint32_t phase = block_.phase ^ (slot < block_.slot ? 1 : 0);   // of the next block there
            mbarrier_wait_together(smem_.wide.to_peer[slot], phase ^ 1);
        }
    }

    // dS of the present block. `meanwhile` is done while gradients of probabilities are computed.
    template <class Meanwhile>
    __device__ __forceinline__ void differentiate_scores(Operand& dscores, Meanwhile meanwhile) {
        Scores dprobs;
        mbarrier_wait_together(smem_.q_full[block_.slot], block_.phase);   // for what they start from
        mbarrier_wait_together(smem_.dout_full[block_.slot], block_.phase);
        matmuls_.issue_dprobs(dprobs, smem_.v[0], block_.slot);
        meanwhile();
        wgmma_wait_group<0>();
        pin(dprobs);
        release(smem_.dout_empty[block_.slot]);
        factors_.take(dprobs, dscores, block_.slot, lane_);
    }

    __device__ __forceinline__ void release(uint64_t& empty) const {
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, empty);
    }

    static constexpr uint32_t kBytesOfWarp = kWarpRows * Config::kSlabCols * sizeof(typename Config::Element);

    SharedStorage<Config>& smem_;
    const int lane_;
    const int row_;   // the first of the warp, of those of its thread block
    const Matmuls<Config> matmuls_;
    const ScoreMath<Config> math_;
    const Factors<Config> factors_;
    Position<Config::kStages> block_;
};

}  // namespace ffa
