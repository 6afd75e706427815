// dQ = dS K of a block where heads are wide. There is no room for it in shared memory, so warps add it to the sum in
// global memory from their registers, 64 columns at a time.
#pragma once

#include "backward/config.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace ffa::backward {

// A descriptor of the matmul dQ = dS K. The wait for a turn diverges, and the compiler no longer knows that it is that
// of all lanes.
template <class Config>
__device__ __forceinline__ uint32_t dq_operand(const typename Config::Element* tile, uint32_t leading_bytes) {
    const uint32_t descriptor = wgmma_descriptor(tile, leading_bytes);
    return Config::kIsDeterministic ? uniform(descriptor) : descriptor;
}

template <class Config>
class WideDq {
public:
    __device__ __forceinline__ WideDq(SharedStorage<Config>& smem, int warp, int lane)
        : smem_(smem), warp_(warp), lane_(lane) {}

    // `take_turn` comes in front of the first addition, while a matmul runs.
    template <class TakeTurn>
    __device__ __forceinline__ void differentiate(const DqTarget& rows, const Position<Config::kScoreStages>& scores,
                                                  TakeTurn take_turn) const {
        if constexpr (Config::kSharesDq) {
            half_of_columns(rows, scores, take_turn);
        } else {
            all_columns(rows, scores, take_turn);
        }
    }

private:
    using Element = typename Config::Element;

    template <class TakeTurn>
    __device__ __forceinline__ void all_columns(const DqTarget& rows, const Position<Config::kScoreStages>& scores,
                                                TakeTurn take_turn) const {
#pragma unroll
        for (int slab = 0; slab < Config::kSlabs; ++slab) {
            float dq[Config::kSlabCols / 2];
            issue<Config::kSlabCols>(dq, slab * Config::kSlabCols, scores.slot);
            if (slab == 0) {
                take_turn();
            }
            wgmma_wait_group<0>();
            pin(dq);
            if (slab == Config::kSlabs - 1) {
                release(smem_.dscores_empty[scores.slot], lane_);
            }
            add<Config::kSlabCols>(rows, dq, slab * Config::kSlabCols);
        }
    }

    // For the keys of both thread blocks of the cluster. Each has a slab at one end of the head, and a half of the slab
    // between.
    template <class TakeTurn>
    __device__ __forceinline__ void half_of_columns(const DqTarget& rows, const Position<Config::kScoreStages>& scores,
                                                    TakeTurn take_turn) const {
        static_assert(Config::kSlabs == 3 && Config::kHeadDim % Config::kSlabCols == 0, "one slab between");
        constexpr int kRest = Config::kSlabCols / 2;
        const int rank = rank_in_cluster<Config>();
        const int first = rank * 2 * Config::kSlabCols;
        const int rest = Config::kSlabCols + rank * kRest;
        float dq[Config::kSlabCols / 2], dq_of_rest[kRest / 2];
        mbarrier_wait_together(smem_.peer_barriers.received[scores.slot], scores.phase);
        issue<Config::kSlabCols>(dq, first, scores.slot);
        take_turn();
        wgmma_wait_group<0>();
        pin(dq);
        add<Config::kSlabCols>(rows, dq, first);
        issue<kRest>(dq_of_rest, rest, scores.slot);
        wgmma_wait_group<0>();
        pin(dq_of_rest);
        release(smem_.dscores_empty[scores.slot], lane_);
        if (warp_ == 0) {
            expect_peer(scores.slot);
        }
        mbarrier_arrive_at_rank_if(lane_ == 0, smem_.peer_barriers.taken[scores.slot], peer_rank<Config>());
        add<kRest>(rows, dq_of_rest, rest);
    }

    // From column `col` on, all in one slab.
    template <int kCols>
    __device__ __forceinline__ void issue(float (&dq)[kCols / 2], int col, int slot) const {
        const int slab = col / Config::kSlabCols;
        const uint32_t within = col % Config::kSlabCols * sizeof(Element) >> 4;
        pin(dq);
        wgmma_fence();
        accumulate<kCols>(dq, smem_.dscores[slot][0], smem_.k[slab], within, false);
        if constexpr (Config::kSharesDq) {
            accumulate<kCols>(dq, smem_.peer.dscores[slot], smem_.peer.k[slab - first_peer_slab<Config>()], within,
                              true);
        }
        wgmma_commit_group();
    }

    template <int kCols>
    __device__ __forceinline__ static void accumulate(float (&dq)[kCols / 2], const Element* dscores,
                                                      const Element* keys, uint32_t within, bool adds) {
        const uint32_t a = dq_operand<Config>(dscores, 0);
        const uint32_t b = dq_operand<Config>(keys, sizeof(Element) * Config::kKSlab) + within;
#pragma unroll
        for (int step = 0; step < Config::kRows / 16; ++step) {
            const int rows = step * kSixteenRowsBytes >> 4;
            Wgmma<Element, kCols>::template ss<Major::MN, Major::MN>(dq, a + rows, b + rows, adds || step != 0);
        }
    }

    template <int kCols>
    __device__ __forceinline__ void add(const DqTarget& rows, const float (&dq)[kCols / 2], int col) const {
        float* const sum = rows.sum + col * kWarpRows + 4 * lane_;
#pragma unroll
        for (int i = 0; i < kCols / 8; ++i) {
            add_relaxed_if(rows.are_in_run, sum + 128 * i, {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]});
        }
    }

    // The next gradients of scores from the other thread block, which sends nothing to a slot before it is told that it
    // may.
    __device__ __forceinline__ void expect_peer(int slot) const {
        if (lane_ == 0) {
            mbarrier_arrive_expect_tx(smem_.peer_barriers.received[slot], sizeof(smem_.peer.dscores[0]));
        }
        __syncwarp();
    }

    static constexpr int kSixteenRowsBytes = 16 * 128;

    SharedStorage<Config>& smem_;
    const int warp_;
    const int lane_;
};

}   // namespace ffa::backward
