// The consumers of the backward kernel where heads are wide, of 192 or 256: two warpgroups share the 64 keys of a tile.
// One computes the scores and sums up dV, the other one computes their gradients and sums up dK, and gets P through
// shared memory. So each has one sum in its registers, whose operand it has there as well, and the matmuls of the three
// warpgroups fill each other's gaps.
//
// Two thread blocks, a cluster, share a tile of 128 keys: they load Q and dO for each other. What 64 keys add to dq is
// as much as the way to the L2 cache takes. So where there is room, they also send each other dS, and each adds one
// half of the columns of dQ, of all keys.
#pragma once

#include "backward/epilogue.cuh"
#include "backward/mainloop.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace ffa::backward {

// Where a consumer of wide heads stands in the rings of a block. Rings that are as long share a position, and so
// registers.
template <class Config>
class WidePosition {
public:
    __device__ __forceinline__ auto q() const { return q_; }

    // And of dS.
    __device__ __forceinline__ auto dout() const {
        if constexpr (Config::kDoutStages == Config::kStages) {
            return q_;
        } else {
            return dout_;
        }
    }

    __device__ __forceinline__ WidePosition before() const {
        WidePosition block;
        block.q_ = q_.before();
        block.dout_ = dout_.before();
        return block;
    }

    __device__ __forceinline__ void advance() {
        q_.advance();
        dout_.advance();
    }

private:
    Position<Config::kStages> q_;
    Position<Config::kDoutStages> dout_;
};

// What the gradients of probabilities are multiplied with, P or what a cap makes of it, on the way from the warpgroup
// that has the scores to the one that needs it, thread by thread. It is rounded as P is for dV: there is no room for
// more.
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
        return reinterpret_cast<uint4*>(
            smem_.factors.of_warps[threadIdx.x / 32 % SharedStorage<Config>::Factors::kWarps])[32 * i + lane];
    }

    SharedStorage<Config>& smem_;
};

// The warpgroup of the backward kernel that has the scores of a tile where heads are wide, and sums up dV. A turn of
// its loop, " is the next block:
//
//     dV; S"; P" = exp2(scale S"), of which the warpgroup of dK gets what it needs
template <class Config>
class DvWalk {
public:
    using Grad = typename Matmuls<Config>::Grad;

    __device__ __forceinline__ DvWalk(const typename Config::Params& params, SharedStorage<Config>& smem, int lane,
                                      int row)
        : params_(params),
          smem_(smem),
          lane_(lane),
          row_(row),
          matmuls_(smem),
          math_(params, smem, lane),
          factors_(smem) {}

    // Over so many blocks, one at least.
    __device__ __forceinline__ void walk(Grad& dv, int left, int first_key) {
        Scores scores;
        Operand probs;
        TileScores<Config> program(params_, first_key);
        const auto keys = matmuls_.keys(smem_.k[0], row_);
        mbarrier_wait_together(smem_.q_full[block_.q().slot], block_.q().phase);
        matmuls_.issue_scores(scores, keys, block_.q().slot);
        wgmma_wait_group<0>();
        exponentiate(scores, probs, program);
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
            exponentiate(scores, probs, program);
        }
        issue_dv(dv, probs, block_.dout());
        release(smem_.kv_empty, lane_);   // the next ones may come while the gradient leaves
        wgmma_wait_group<0>();
        pin(dv);
        release_in_all<Config::kCtas>(smem_.dout_empty[block_.dout().slot], lane_);
        block_.advance();
    }

    static constexpr int kCols = Config::kColsOfV;   // of dV
    static constexpr int kStagingSlabs = 1;

    // From where dV leaves, when nobody needs what is there any more.
    __device__ __forceinline__ auto staging() const {
        return reinterpret_cast<typename Config::Element*>(smem_.factors.of_warps);
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
    __device__ __forceinline__ void exponentiate(Scores& scores, Operand& probs, TileScores<Config>& program) const {
        const int mask_row = smem_.blocks[block_.q().slot].mask_row;
        pin(scores);
        if constexpr (Config::kHasSoftcap) {
            math_.cap(scores);
            math_.mask(scores, block_.q().slot, mask_row, first_row_of_block<Config>() + row_);
            Operand factors;
            exponentiate_capped(scores, probs, factors);
            release_in_all<Config::kCtas>(smem_.q_empty[block_.q().slot], lane_);
            factors_.leave(factors, lane_);
        } else if constexpr (!Config::kBeginsWithLse) {
            const Block& block = smem_.blocks[block_.q().slot];
            program.move_to(uniform(block.first), uniform(block.template head<Config>()));
            math_.mask(scores, block_.q().slot, mask_row, first_row_of_block<Config>() + row_);
            Operand factors;
            math_.exponentiate_changed(scores, probs, factors, program, smem_.stats[block_.q().slot]);
            release_in_all<Config::kCtas>(smem_.q_empty[block_.q().slot], lane_);
            factors_.leave(factors, lane_);
        } else {
            if constexpr (Config::kHasScore) {
                const Block& block = smem_.blocks[block_.q().slot];
                program.move_to(uniform(block.first), uniform(block.template head<Config>()));
                program.shift(scores);
                math_.mask(scores, block_.q().slot, mask_row, first_row_of_block<Config>() + row_);
            } else {
                math_.mask(scores, block_.q().slot, mask_row, first_row_of_block<Config>() + row_);
                math_.scale(scores);
            }
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

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    const int lane_;
    const int row_;   // the first of the warp, of those of its thread block
    const Matmuls<Config> matmuls_;
    const ScoreMath<Config> math_;
    const Factors<Config> factors_;
    WidePosition<Config> block_;
};

// The warpgroup of the backward kernel that has the gradients of a tile's scores where heads are wide, and sums up dK.
// A turn of its loop, " is the next block:
//
//     dK; dP"; dS" = P" dP", with P" from its neighbour, is stored and announced
//
// Its matmuls follow one another: those of the others fill the gaps. Or, where dK takes dS from shared memory:
//
//     dP"; beside dK, dS" is computed, stored and announced
template <class Config>
class DkWalk {
public:
    using Grad = typename Matmuls<Config>::Grad;

    __device__ __forceinline__ DkWalk(const typename Config::Params& params, SharedStorage<Config>& smem, int lane,
                                      int row)
        : smem_(smem), lane_(lane), row_(row), matmuls_(smem), math_(params, smem, lane), factors_(smem) {
        factors_.open();
    }

    // Over so many blocks, one at least.
    __device__ __forceinline__ void walk(Grad& dk, int left, int) {
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

    static constexpr int kCols = Config::kCols;   // of dK
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
            mbarrier_wait_together(smem_.dscores_full[block.dout().slot],
                                   block.dout().phase);   // those of the other warps
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
            mbarrier_wait_together(smem_.peer_barriers.taken[slot], phase ^ 1);
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
            cp_async_bulk_to_peer(shared_address(smem_.peer.dscores[slot]) + offset,
                                  shared_address(smem_.dscores[slot][0]) + offset, kBytesOfWarp,
                                  smem_.peer_barriers.received[slot], peer_rank<Config>());
        }
        __syncwarp();
    }

    // Until what has been sent to the other thread block has been read: dK leaves from there.
    __device__ __forceinline__ void await_peer() const {
        auto next = block_.dout();
#pragma unroll
        for (int i = 0; i < Config::kScoreStages; ++i) {
            mbarrier_wait_together(smem_.peer_barriers.taken[next.slot], next.phase ^ 1);
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

// One of the two, tile by tile.
template <class Config, template <class> class Walk>
class WideConsumer {
public:
    __device__ __forceinline__ WideConsumer(const typename Config::Params& params, SharedStorage<Config>& smem)
        : params_(params),
          smem_(smem),
          lane_(threadIdx.x % 32),
          gradients_(params, lane_),
          walk_(params, smem, lane_, gradients_.row_in_block()) {}

    // `map` and `rows` are those of the gradient, `scale` what it is multiplied with.
    __device__ __forceinline__ void run(const TensorMap& map, void* rows, float scale) {
        while (true) {
            mbarrier_wait_together(smem_.kv_full, kv_.phase);
            const int num_visits = uniform(work().num_visits);
            if (num_visits == TileOfHead::kNoMoreWork) {
                break;
            }
            differentiate(num_visits, map, rows, scale);
            kv_.advance();
        }
    }

private:
    __device__ __forceinline__ void differentiate(int num_visits, const TensorMap& map, void* rows, float scale) {
        typename Matmuls<Config>::Grad grad;
#pragma unroll
        for (float& x : grad) {
            x = 0.f;
        }
        if (num_visits > 0) {
            walk_.walk(grad, num_visits, first_key_of_thread());
            barrier_sync(kScoresAreRead, (Config::kConsumers + 1) * Config::kWarpgroup);
        } else {
            mbarrier_arrive_if(lane_ == 0, smem_.kv_empty);
        }
        const TileOfHead& work = this->work();
        int store_end = work.tile.row_end;
        if (__any_sync(0xffffffff, work.num_parts > 1)) {
            store_end = gradients_.join_parts(work, grad);
        }
#pragma unroll
        for (float& x : grad) {
            x *= scale;
        }
        gradients_.template store<Walk<Config>::kStagingSlabs, Walk<Config>::kCols>(grad, walk_.staging(), map, rows,
                                                                                    work, store_end);
    }

    // Where a score program asks.
    __device__ __forceinline__ int first_key_of_thread() const {
        if constexpr (Config::kHasScore) {
            return work().tile.row_begin + gradients_.row_in_tile() + lane_ / 4;
        }
        return 0;
    }

    // No register keeps the address.
    __device__ __forceinline__ const TileOfHead& work() const { return smem_.work[opaque(kv_.phase)]; }

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    const int lane_;
    const KeyGradients<Config> gradients_;
    Walk<Config> walk_;
    Position<1> kv_;
};

template <class Config>
__device__ __forceinline__ void consume_wide(const typename Config::Params& params, SharedStorage<Config>& smem,
                                             int warpgroup) {
    if (warpgroup == 0) {
        WideConsumer<Config, DvWalk>(params, smem).run(params.dv, params.dv_rows, 1.f);
    } else {
        WideConsumer<Config, DkWalk>(params, smem).run(params.dk, params.dk_rows, params.dq.softmax_scale);
    }
}

}   // namespace ffa::backward
