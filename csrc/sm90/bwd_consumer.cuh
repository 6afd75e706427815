// A warpgroup of the backward kernel: the matmuls of a tile's keys with block after block of queries.
//
// A block of a warpgroup, what is in flight above what is done meanwhile (" is the next block); with dQ, and without:
//
//     dV      | dQ, dK  | dK, S" | dP"                 dV         | S", dK | dK, dP"
//     wait    |         | add dQ | exponentials"       announce   |        | exponentials"
//
// then dS" = P" (dP" - delta), which is stored. The other warpgroup's matmuls fill the gaps. A warp's memory operations
// queue up behind the matmuls that it has issued: what can be read or stored is, in front of them.
#pragma once

#include "bwd_dq.cuh"
#include "bwd_gradients.cuh"
#include "bwd_shared.cuh"
#include "mask.cuh"
#include "ring.cuh"

namespace ffa {

// A warpgroup that owns 64 keys of each tile. Its control flow is uniform, and told so that the compiler sees it (all
// lanes vote, single lanes do by predicates what others would branch around): only then do loop counts, barriers and
// operands' descriptors live in uniform registers. Where additions to dq have an order, the wait for a turn diverges.
template <class Config>
class Consumer {
public:
    __device__ __forceinline__ Consumer(const BackwardParams& params, SharedStorage<Config>& smem, int warpgroup)
        : params_(params),
          smem_(smem),
          warpgroup_(warpgroup),
          warp_(threadIdx.x / 32 % 4),
          lane_(threadIdx.x % 32),
          dq_(params, smem, warp_, lane_),
          gradients_(params, warpgroup, warp_, lane_) {}

    __device__ __forceinline__ void run() {
        while (true) {
            mbarrier_wait_together(smem_.kv_full, kv_.phase);
            left_ = uniform(smem_.work.num_visits);
            if (left_ == TileOfHead::kNoMoreWork) {
                break;
            }
            differentiate();
            kv_.advance();
        }
    }

private:
    using Element = typename Config::Element;
    static constexpr int kScores = Config::kBlockCols / 2;   // registers of a thread: 64 rows over 128 threads
    static constexpr int kGrad = Config::kHeadDim / 2;
    using Scores = float[kScores];
    using Operand = uint32_t[kScores / 2];
    using Grad = float[kGrad];
    using Dq = typename DqAdder<Config>::Dq;

    // lse, in base 2, of the queries of this thread.
    struct Lse {
        float2 of_cols[kScores / 4];
        bool is_masked;   // the block
    };

    // Where there are registers for them, K and V of the warpgroup's keys stay there for all blocks of a tile: products of
    // 64 x 64 with both operands in shared memory would need all of its bandwidth.
    static constexpr bool kHoldsKeys = Config::kHeadDim <= 64 && !Config::kHasSoftcap && !Config::kIsDeterministic;
    struct Keys {
        uint32_t fragments[kHoldsKeys ? Config::kHeadDim / 16 : 1][4];
    };

    // Otherwise there are no registers to hold it.
    static constexpr bool kReadsLseEarly = !Config::kHasSoftcap && !Config::kIsDeterministic;

    __device__ __forceinline__ void differentiate() {
        Grad dk, dv;
#pragma unroll
        for (int i = 0; i < kGrad; ++i) {
            dk[i] = dv[i] = 0.f;
        }
        if (left_ > 0) {
            walk(dk, dv);
        }
        if constexpr (Config::kIsDeterministic) {
            dq_.publish();
        }
        const TileOfHead& work = smem_.work;
        int store_end = work.tile.row_end;
        if (__any_sync(0xffffffff, work.num_parts > 1)) {
            store_end = gradients_.join_parts(dk, dv, work);
        }
#pragma unroll
        for (int i = 0; i < kGrad; ++i) {
            dk[i] *= params_.softmax_scale;
        }
        barrier_sync(kConsumersMeet, Config::kConsumers * Config::kWarpgroup);   // nobody reads K and V any more
        gradients_.store(dv, smem_.v[0], params_.dv, params_.dv_rows, work, store_end);
        gradients_.store(dk, smem_.k[0], params_.dk, params_.dk_rows, work, store_end);
        if (lane_ == 0) {
            cp_async_bulk_wait_group_read<0>();
        }
        release(smem_.kv_empty);
    }

    __device__ __forceinline__ void walk(Grad& dk, Grad& dv) {
        Operand probs, rounded_dscores;
        if constexpr (kHoldsKeys) {
            load_keys(k_, smem_.k[0]);
            load_keys(v_, smem_.v[0]);
        }
        start(probs, rounded_dscores);

        // No matmul is in flight where the loop or a branch closes: the compiler moves registers there.
        while (true) {
            const int slot = block_.slot;
            const DqRows rows = dq_.rows_of_warp(smem_.blocks[slot]);
            store_dscores(rounded_dscores);
            issue_dv(dv, probs);
            fence_proxy_async_shared();
            const bool is_last = --left_ == 0;
            Position<Config::kStages> next = block_;
            next.advance();
            Scores scores, dscores;
            Lse lse;
            if (dscores_slot_ == warpgroup_) {   // our turn at dQ
                Dq dq;
                barrier_sync(kScoresReady + dscores_slot_, Config::kConsumers * Config::kWarpgroup);
                wgmma_wait_group<0>();
                pin(dv);
                release(smem_.dout_empty[slot]);
                issue_dq(dq);
                issue_dk(dk, rounded_dscores);
                wgmma_wait_group<1>();
                pin(dq);
                dq_.add(dq, rows);
                block_ = next;
                dscores_slot_ ^= 1;
                if (is_last) {
                    wgmma_wait_group<0>();
                    pin(dk);
                    release(smem_.q_empty[slot]);
                    break;
                }
                wait_for_q(next);
                if constexpr (kReadsLseEarly) {
                    load_lse(lse, next.slot);
                }
                issue_scores(scores, next.slot);
                wgmma_wait_group<1>();
                pin(dk);
                release(smem_.q_empty[slot]);
                wait_for_dout();
                issue_dprobs(dscores);
                wgmma_wait_group<1>();
                pin(scores);
                if constexpr (!kReadsLseEarly) {
                    load_lse(lse, next.slot);
                }
                if constexpr (!Config::kHasSoftcap) {
                    to_probs(scores, probs, lse);
                    stay_in_front_of_wait(scores);
                }
                wgmma_wait_group<0>();
                pin(dscores);
            } else {
                dq_.leave_buffer();
                barrier_arrive(kScoresReady + dscores_slot_, Config::kConsumers * Config::kWarpgroup);
                dscores_slot_ ^= 1;
                if (is_last) {
                    issue_dk(dk, rounded_dscores);
                    block_ = next;
                    wgmma_wait_group<0>();
                    pin(dv);
                    pin(dk);
                    release(smem_.dout_empty[slot]);
                    release(smem_.q_empty[slot]);
                    break;
                }
                wait_for_q(next);
                if constexpr (kReadsLseEarly) {
                    load_lse(lse, next.slot);
                }
                issue_scores(scores, next.slot);
                issue_dk(dk, rounded_dscores);
                block_ = next;
                wgmma_wait_group<1>();
                pin(dv);
                pin(scores);
                release(smem_.dout_empty[slot]);
                wait_for_dout();
                issue_dprobs(dscores);
                if constexpr (!kReadsLseEarly) {
                    load_lse(lse, next.slot);
                }
                if constexpr (!Config::kHasSoftcap) {
                    to_probs(scores, probs, lse);
                    stay_in_front_of_wait(scores);
                }
                wgmma_wait_group<0>();
                pin(dk);
                pin(dscores);
                release(smem_.q_empty[slot]);
            }
            if constexpr (Config::kHasSoftcap) {
                to_probs(scores, probs, lse);   // the slope of the cap needs the registers of dK's operand
            }
            to_dscores(dscores, scores, probs);
            round(dscores, rounded_dscores);
        }
    }

    // P and dS of the first block of a tile.
    __device__ __forceinline__ void start(Operand& probs, Operand& rounded_dscores) {
        Scores scores, dscores;
        Lse lse;
        wait_for_q(block_);
        load_lse(lse, block_.slot);
        issue_scores(scores, block_.slot);
        wait_for_dout();
        issue_dprobs(dscores);
        wgmma_wait_group<1>();
        pin(scores);
        to_probs(scores, probs, lse);
        wgmma_wait_group<0>();
        pin(dscores);
        to_dscores(dscores, scores, probs);
        round(dscores, rounded_dscores);
    }

    // ---- the matmuls

    // S^T = K Q^T
    __device__ __forceinline__ void issue_scores(Scores& scores, int slot) {
        multiply_rows(scores, smem_.k[0], k_, smem_.q[slot][0]);
    }

    // dP^T = V dO^T
    __device__ __forceinline__ void issue_dprobs(Scores& dprobs) {
        multiply_rows(dprobs, smem_.v[0], v_, smem_.dout[block_.slot][0]);
    }

    // The fragments of an A operand, from 16 rows of the swizzle.
    __device__ __forceinline__ void load_keys(Keys& keys, const Element* tile) const {
        const int row = lane_ % 16;
        const uint32_t address = shared_address(tile) + (gradients_.row_in_tile() + row) * 128;
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            const int chunk = 2 * step + lane_ / 16;
            ldmatrix_x4(address + ((chunk ^ (row % 8)) << 4), keys.fragments[step]);
        }
    }

    __device__ __forceinline__ void multiply_rows(Scores& product, const Element* keys, const Keys& held,
                                                  const Element* queries) {
        const uint32_t a = operand(keys + warpgroup_ * Config::kRows * Config::kSlabCols, 0);
        const uint32_t b = operand(queries, 0);
        constexpr int kStepsPerSlab = Config::kSlabCols / 16;
        constexpr int kStepBytes = 32;
        pin(product);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            const int slab = step / kStepsPerSlab;
            const int within = step % kStepsPerSlab * kStepBytes;
            const uint32_t b_step = b + ((slab * kQSlabBytes + within) >> 4);
            if constexpr (kHoldsKeys) {
                Wgmma<Element, Config::kBlockCols>::template rs<Major::K>(product, held.fragments[step], b_step, step != 0);
            } else {
                Wgmma<Element, Config::kBlockCols>::template ss<Major::K, Major::K>(
                    product, a + ((slab * kKSlabBytes + within) >> 4), b_step, step != 0);
            }
        }
        wgmma_commit_group();
    }

    // dV += P^T dO
    __device__ __forceinline__ void issue_dv(Grad& dv, const Operand& probs) {
        accumulate(dv, probs, smem_.dout[block_.slot][0]);
    }

    // dK += dS^T Q
    __device__ __forceinline__ void issue_dk(Grad& dk, const Operand& dscores) {
        accumulate(dk, dscores, smem_.q[block_.slot][0]);
    }

    __device__ __forceinline__ void accumulate(Grad& sum, const Operand& a, const Element* queries) {
        const uint32_t b = operand(queries, kQSlabBytes);
        pin(sum);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kBlockCols / 16; ++step) {
            Wgmma<Element, Config::kHeadDim>::template rs<Major::MN>(sum, a + 4 * step,
                                                                     b + ((step * kSixteenRowsBytes) >> 4), 1);
        }
        wgmma_commit_group();
    }

    // dQ = dS K
    __device__ __forceinline__ void issue_dq(Dq& dq) {
        const uint32_t a = operand(smem_.dscores[dscores_slot_], 0);
        const uint32_t b = operand(smem_.k[0], kKSlabBytes);
        pin(dq);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kTileRows / 16; ++step) {
            const int within = (step * kSixteenRowsBytes) >> 4;
            Wgmma<Element, Config::kHeadDim>::template ss<Major::MN, Major::MN>(dq, a + within, b + within, step != 0);
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ static uint32_t operand(const Element* tile, uint32_t leading_bytes) {
        const uint32_t descriptor = wgmma_descriptor(tile, leading_bytes);
        return Config::kIsDeterministic ? uniform(descriptor) : descriptor;
    }

    // ---- scores to probabilities and to their gradients

    __device__ __forceinline__ void load_lse(Lse& lse, int slot) const {
        const float2* const of_cols = reinterpret_cast<const float2*>(smem_.stats[slot].lse_log2) + lane_ % 4;
        lse.is_masked = smem_.blocks[slot].is_masked;
#pragma unroll
        for (int i = 0; i < kScores / 4; ++i) {
            lse.of_cols[i] = of_cols[4 * i];
        }
    }

    // P = exp2(S - lse). Where scores are capped, P is rounded at once, and P times the slope of the cap stays.
    __device__ __forceinline__ void to_probs(Scores& scores, Operand& probs, const Lse& lse) const {
        if constexpr (Config::kHasSoftcap) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                scores[i] = tanh_approx(scores[i] * params_.cap_scale);
            }
        }
        if (__any_sync(0xffffffff, lse.is_masked)) {
            const Block& block = smem_.blocks[block_.slot];
            apply_mask(scores, block.run, smem_.work.tile.row_begin + gradients_.row_in_tile() + lane_ / 4,
                       block.first + 2 * (lane_ % 4));
        }
#pragma unroll
        for (int i = 0; i < kScores / 4; ++i) {
            const float2 of_cols = lse.of_cols[i];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* const pair = scores + 4 * i + 2 * half;
                const float first = ex2(pair[0] * params_.scale_log2 - of_cols.x);
                const float second = ex2(pair[1] * params_.scale_log2 - of_cols.y);
                if constexpr (Config::kHasSoftcap) {
                    probs[2 * i + half] = pack<Element>(first, second);
                    // Hidden scores are -inf, and their slope must not be.
                    pair[0] = first * fmaxf(1.f - pair[0] * pair[0], 0.f);
                    pair[1] = second * fmaxf(1.f - pair[1] * pair[1], 0.f);
                } else {
                    pair[0] = first;
                    pair[1] = second;
                }
            }
        }
    }

    // dS = P (dP - delta), in place of dP, and P rounded.
    __device__ __forceinline__ void to_dscores(Scores& dprobs, const Scores& scores, Operand& probs) const {
        const float2* const delta = reinterpret_cast<const float2*>(smem_.stats[block_.slot].delta) + lane_ % 4;
#pragma unroll
        for (int i = 0; i < kScores / 4; ++i) {
            const float2 of_cols = delta[4 * i];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = 4 * i + 2 * half;
                dprobs[at] = scores[at] * (dprobs[at] - of_cols.x);
                dprobs[at + 1] = scores[at + 1] * (dprobs[at + 1] - of_cols.y);
            }
        }
        if constexpr (!Config::kHasSoftcap) {
            round(scores, probs);
        }
    }

    // An accumulator of 16 columns is, packed, the A operand of the next matmul.
    __device__ __forceinline__ static void round(const Scores& scores, Operand& operand) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
            operand[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
        }
    }

    __device__ __forceinline__ void store_dscores(const Operand& dscores) {
        const int row = lane_ % 16;
        const uint32_t address = shared_address(smem_.dscores[dscores_slot_]) + (gradients_.row_in_tile() + row) * 128;
#pragma unroll
        for (int i = 0; i < kScores / 8; ++i) {
            const int chunk = 2 * i + lane_ / 16;
            stmatrix_x4(address + ((chunk ^ (row % 8)) << 4), dscores[4 * i], dscores[4 * i + 1], dscores[4 * i + 2],
                        dscores[4 * i + 3]);
        }
    }

    __device__ __forceinline__ void wait_for_q(const Position<Config::kStages>& block) {
        mbarrier_wait_together(smem_.q_full[block.slot], block.phase);
    }

    __device__ __forceinline__ void wait_for_dout() { mbarrier_wait_together(smem_.dout_full[block_.slot], block_.phase); }

    // The assembler moves a wait for wgmma up to the last memory operation in front of it, over arithmetic that should
    // run meanwhile. This is one, and depends on every other score; the others follow.
    __device__ __forceinline__ void stay_in_front_of_wait(const Scores& scores) const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
            bits |= __float_as_uint(scores[i]);
        }
        st_shared_if(zero_after(__uint_as_float(bits)), smem_.never_written, bits);
    }

    __device__ __forceinline__ void release(uint64_t& empty) const {
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, empty);
    }

    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);
    static constexpr int kQSlabBytes = Config::kQSlab * sizeof(Element);
    static constexpr int kSixteenRowsBytes = 16 * 128;

    const BackwardParams& params_;
    SharedStorage<Config>& smem_;
    const int warpgroup_;
    const int warp_;
    const int lane_;
    DqAdder<Config> dq_;
    const KeyGradients<Config> gradients_;
    Keys k_, v_;
    Position<1> kv_;
    Position<Config::kStages> block_;
    int left_ = 0;   // blocks of the tile
    int dscores_slot_ = 0;
};

}  // namespace ffa
