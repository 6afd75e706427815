// A warpgroup of the forward kernel that owns 64 rows of each tile, and keeps their scores, probabilities and output in
// registers.
#pragma once

#include "keys/key_block.cuh"
#include "common/pipeline.cuh"
#include "common/product.cuh"
#include "common/softmax.cuh"
#include "common/wgmma.cuh"
#include "forward/config.cuh"
#include "forward/max_scores.cuh"
#include "forward/scores.cuh"

namespace ffa::forward {

// Its control flow is uniform, and told so that the compiler sees it: lanes vote, what a single lane does is
// predicated, and the loop over blocks ends by a count. Descriptors, slots and phases then live in uniform registers.
template <class Config>
class Consumer {
public:
    __device__ __forceinline__ Consumer(const typename Config::Params& params, SharedStorage<Config>& smem,
                                        int warpgroup)
        : params_(params), smem_(smem), warpgroup_(warpgroup), warp_(threadIdx.x / 32 % 4), lane_(threadIdx.x % 32) {}

    __device__ __forceinline__ void run() {
        while (true) {
            mbarrier_wait_together(smem_.q_full, q_phase_);
            const TileOfHead& tile = smem_.tiles[q_phase_ % Config::kQBuffers];   // registers are short
            left_ = uniform(tile.num_blocks);
            if (left_ == TileOfHead::kNoMoreWork) {
                break;
            }
            attend(tile);
            q_phase_ ^= 1;
        }
        wait_for_store();
    }

private:
    using Element = typename Config::Element;
    static constexpr int kScores = Config::kBlockCols / 2;   // registers of a thread: 64 rows over 128 threads
    static constexpr int kFirstScores = kScores / 16 * 8;    // the first half, in whole steps of P V
    static constexpr int kOut = Config::kOutCols / 2;
    using Scores = float[kScores];
    using Probs = uint32_t[kScores / 2];
    using Out = float[kOut];

    __device__ __forceinline__ void attend(const TileOfHead& tile) {
        Scores scores;
        Probs probs;
        Out out;
        OnlineSoftmax softmax(params_.scale_log2);
        TileScores<Config> program(params_, first_row(tile), tile.head);
        MaxScores<Config> largest;
#pragma unroll
        for (int i = 0; i < kOut; ++i) {
            out[i] = 0.f;
        }

        if (!kSkipsAhead && !__any_sync(0xffffffff, tile.row_begin + warpgroup_ * Config::kRows < tile.row_end)) {
            while (next_block(tile) != kEnd) {
                skip_block();
            }
        }
        Visibility sees = next_block(tile);
        if constexpr (Config::kQBuffers == 2) {
            release_q();   // of the previous tile
        }
        while (sees != kEnd) {
            begin_stretch();
            if (sees == kNothing) {
                skip_block();
                sees = next_block(tile);
                continue;
            }

            // The first block of a stretch that this warpgroup sees: there is no P V to overlap with.
            const uint32_t q = uniform(q_operand());
            const uint32_t k = k_operand();
            issue_scores(scores, q, k);
            const Asked asked = look_up(sees, tile);
            Visibility next = next_block(tile);
            wgmma_wait_group<0>();
            pin(scores);
            change_and_mask(scores, sees, tile, asked, program);
            largest.update(scores);
            release_k();
            bool is_v_there = test_v();
            float sum[2];
            rescale_and_exponentiate(scores, probs, sum, out, softmax);
            softmax.add(sum);
            sees = move_on(next);

            while (sees == kPartial || sees == kAll) {
                wait_for_v(is_v_there);
                const uint32_t k = k_operand();
                const uint32_t v = v_operand();
                issue_scores(scores, q, k);
                issue_out(out, probs, v);
                const Asked asked = look_up(sees, tile);
                next = next_block(tile);   // while the scores are on their way
                wgmma_wait_group<2>();
                pin(scores);
                change_and_mask(scores, sees, tile, asked, program);
                largest.update(scores);
                float sum[2] = {0.f, 0.f};
                wgmma_wait_group<1>();
                softmax.exponentiate<Element, 0, kFirstScores>(scores, probs, sum);
                // The assembler moves a wait up to the last memory operation in front of it: this one, which seems to
                // depend on the exponentials, keeps them in front of the wait and beside the rest of P V.
                release_k(zero_after(sum[0]) | zero_after(sum[1]));
                wgmma_wait_group<0>();
                pin(out);
                release_v();
                drop_skipped();
                is_v_there = test_v();
                softmax.exponentiate<Element, kFirstScores, kScores>(scores, probs, sum);
                if (softmax.has_unseen_rows() || !softmax.fits(sum)) {
                    rescale_and_exponentiate(scores, probs, sum, out, softmax);
                }
                softmax.add(sum);
                sees = move_on(next);
            }

            wait_for_v(is_v_there);
            issue_out(out, probs, v_operand());
            wgmma_wait_group<0>();
            pin(out);
            release_v();
        }

        begin_stretch();   // of no block: what was skipped at the end is released

        float normalize[2], lse[2];
        softmax.finish(normalize, lse);
        const bool is_split = __any_sync(0xffffffff, split_shift() != kNotASplit);
        if (merges_prior(is_split)) {
            wait_for_split();
            float keep[2];
            merge_weights(normalize, keep, lse, tile);
            scale_rows(out, normalize);
            add_prior(out, keep, tile);
        } else {
            scale_rows(out, normalize);
        }
        const bool is_wide = stores_wide(is_split);
        if (is_wide) {
            store_wide(out, tile);
        } else {
            store(out, tile);
        }
        store_lse(lse, is_wide, tile);
        largest.store(params_, tile, first_row(tile), lane_);
        if (is_wide) {
            announce_split();
        }
        if constexpr (Config::kQBuffers == 1) {
            release_q();
        }
    }

    // ---- the matmuls

    __device__ __forceinline__ uint32_t q_operand() const {
        return wgmma_descriptor(q_buffer() + warpgroup_ * Config::kRows * Config::kSlabCols, 0);
    }

    __device__ __forceinline__ uint32_t k_operand() const { return wgmma_descriptor(smem_.k[scored_.slot], 0); }

    __device__ __forceinline__ uint32_t v_operand() const { return wgmma_descriptor(smem_.v[v_.slot], kKSlabBytes); }

    __device__ __forceinline__ void issue_scores(Scores& scores, uint32_t q, uint32_t k) {
        issue_product<Element, Config::kSteps, kKSlabBytes>(scores, SharedRows<kQSlabBytes>{q}, k);
    }

    // In two groups, for the two halves of the columns of P: a half of `probs` is free when its group has ended.
    __device__ __forceinline__ void issue_out(Out& out, const Probs& probs, uint32_t v) {
        constexpr int kStepBytes = 16 * 128;
        pin(out);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kBlockCols / 16; ++step) {
            Wgmma<Element, Config::kOutCols>::template rs<Major::MN>(out, probs + 4 * step,
                                                                     v + ((step * kStepBytes) >> 4), 1);
            if (step + 1 == kFirstScores / 8) {
                wgmma_commit_group();
            }
        }
        wgmma_commit_group();
    }

    // ---- scores to probabilities

    // What a table says of the block whose scores are computed: looked up while they are on their way.
    using Asked = Maybe<Config::kMapTable, SeenByRows<Config::kBlockCols>>;

    __device__ __forceinline__ Asked look_up(Visibility sees, const TileOfHead& tile) const {
        Asked asked;
        if constexpr (Config::kMapTable) {
            if (sees == kPartial) {
                const int word = smem_.blocks[scored_.slot].word;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = first_row(tile) + 8 * half;
                    asked.of_rows[half] =
                        look_up_columns<Config::kBlockCols>(params_.table, row, params_.total_q, word);
                }
            }
        }
        return asked;
    }

    __device__ __forceinline__ void change_and_mask(Scores& scores, Visibility sees, const TileOfHead& tile,
                                                    const Asked& asked, TileScores<Config>& program) {
        if constexpr (Config::kHasSoftcap) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                scores[i] = tanh_approx(scores[i] * params_.cap_scale);
            }
        }
        if constexpr (Config::kHasScore) {
            program.change(scores, uniform(smem_.blocks[scored_.slot].first));
        }
        if (sees == kPartial) {
            if constexpr (Config::kMapTable) {
                apply_columns(scores, [&](int half) { return asked.of_rows[half]; }, lane_);
            }
            mask_block<Config, Config::kHasStairs>(scores, smem_.blocks[scored_.slot], params_, first_row(tile), lane_);
        }
    }

    // The probabilities of a block that moves the reference of the softmax.
    __device__ __forceinline__ static void rescale_and_exponentiate(const Scores& scores, Probs& probs, float (&sum)[2],
                                                                    Out& out, OnlineSoftmax& softmax) {
        float factor[2];
        softmax.move_reference(scores, factor);
        scale_rows(out, factor);
        sum[0] = sum[1] = 0.f;
        softmax.exponentiate<Element, 0, kScores>(scores, probs, sum);
    }

    __device__ __forceinline__ static void scale_rows(Out& out, const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) {
            out[i] *= factor[i / 2 % 2];
        }
    }

    // ---- the result, in epilogue.cuh

    __device__ void merge_weights(float (&normalize)[2], float (&keep)[2], float (&lse)[2],
                                  const TileOfHead& tile) const;
    __device__ void add_prior(Out& out, const float (&keep)[2], const TileOfHead& tile) const;
    __device__ void store_wide(const Out& out, const TileOfHead& tile) const;
    __device__ void store_lse(const float (&lse)[2], bool is_wide, const TileOfHead& tile) const;
    __device__ bool merges_prior(bool is_split) const;
    __device__ bool stores_wide(bool is_split) const;
    __device__ void wait_for_split() const;
    __device__ void announce_split() const;
    __device__ int split_shift() const;
    __device__ long long wide_lse_offset(const TileOfHead& tile) const;
    __device__ long long wide_offset(const TileOfHead& tile, int row) const;
    __device__ void store(const Out& out, const TileOfHead& tile);
    __device__ void store_rows(const Element* staging, int warp_row, const TileOfHead& tile) const;

    // ---- buffers

    // Waits for the next block of the tile, if there is one, and tells what this warpgroup sees of it.
    __device__ __forceinline__ Visibility next_block(const TileOfHead& tile) {
        if constexpr (kSkipsAhead) {
            return next_seen_block(tile);
        }
        if (left_ == 0) {
            return kEnd;
        }
        --left_;
        mbarrier_wait_together(smem_.k_full[k_.slot], k_.phase);
        const KeyBlock& block = smem_.blocks[k_.slot];
        k_.advance();
        return visibility_of_block<Config, Config::kHasStairs>(block, params_, tile, warpgroup_);
    }

    // Where warpgroups see different blocks, those that this one does not see leave its pipeline as it is: it releases
    // their keys at once, and their values behind those in front of them. It looks no further than the producer gets
    // while that is in work which it holds.
    static constexpr bool kSkipsAhead = Config::kMapLines > 1;
    static constexpr int kMostAhead = Config::kVStages < Config::kKStages ? Config::kVStages : Config::kKStages - 1;

    __device__ __forceinline__ Visibility next_seen_block(const TileOfHead& tile) {
        Visibility sees = kEnd;
        while (left_ > 0) {
            --left_;
            ++ahead_;
            mbarrier_wait_together(smem_.k_full[k_.slot], k_.phase);
            upcoming_ = k_;
            k_.advance();
            sees = visibility_of_block<Config, Config::kHasStairs>(smem_.blocks[upcoming_.slot], params_, tile,
                                                                   warpgroup_);
            if (sees != kNothing || ahead_ >= kMostAhead) {
                break;
            }
            release(smem_.k_empty[upcoming_.slot], lane_);
            ++skipped_;
            sees = kEnd;
        }
        return sees;
    }

    // The next block becomes that in work: what is skipped from now on lies behind it.
    __device__ __forceinline__ Visibility move_on(Visibility next) {
        if constexpr (kSkipsAhead) {
            in_front_ = skipped_;
            skipped_ = 0;
        }
        return next;
    }

    // Nothing is in work in front of the next block.
    __device__ __forceinline__ void begin_stretch() {
        if constexpr (kSkipsAhead) {
            in_front_ += skipped_;
            skipped_ = 0;
            drop_skipped();
            scored_ = upcoming_;
        }
    }

    // Releases the values of what was skipped in front of the block in work.
    __device__ __forceinline__ void drop_skipped() {
        if constexpr (kSkipsAhead) {
            for (; in_front_ > 0; --in_front_) {
                wait_for_v(false);
                release_v();
            }
        }
    }

    __device__ __forceinline__ bool test_v() {
        return __all_sync(0xffffffff, mbarrier_test_wait(smem_.v_full[v_.slot], v_.phase));
    }

    __device__ __forceinline__ void wait_for_v(bool is_there) {
        if (!is_there) {
            mbarrier_wait_together(smem_.v_full[v_.slot], v_.phase);
        }
    }

    __device__ __forceinline__ Element* q_buffer() const { return smem_.q[q_phase_ % Config::kQBuffers][0]; }

    // Until the last output has left its buffer, which the thread that stored it knows.
    __device__ __forceinline__ void wait_for_store() const {
        if (lane_ == 0) {
            cp_async_bulk_wait_group_read<0>();
        }
    }

    __device__ __forceinline__ void release_q() {
        wait_for_store();
        release(smem_.q_empty, lane_);
    }

    __device__ __forceinline__ void release_k(uint32_t zero = 0) {
        release(smem_.k_empty[scored_.slot + zero], lane_);
        if constexpr (kSkipsAhead) {
            scored_ = upcoming_;
        } else {
            scored_.advance();
        }
    }

    __device__ __forceinline__ void release_v() {
        release(smem_.v_empty, v_, lane_);
        if constexpr (kSkipsAhead) {
            --ahead_;
        }
    }

    // Every warpgroup releases every buffer, in order, also those it does not use.
    __device__ __forceinline__ void skip_block() {
        release_k();
        wait_for_v(false);
        release_v();
    }

    __device__ __forceinline__ int first_row(const TileOfHead& tile) const {
        return tile.row_begin + warpgroup_ * Config::kRows + warp_ * kWarpRows + lane_ / 4;
    }

    static constexpr int kQSlabBytes = Config::kQSlab * sizeof(Element);
    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    const int warpgroup_;
    const int warp_;
    const int lane_;
    uint32_t q_phase_ = 0;
    Position<Config::kKStages> k_;        // of the block to look at next
    Position<Config::kKStages> scored_;   // of the block in work
    Position<Config::kVStages> v_;
    int left_ = 0;   // blocks of the tile

    // Only where a warpgroup skips blocks.
    Position<Config::kKStages> upcoming_;   // of the block that was looked at last
    int ahead_ = 0;                         // blocks looked at whose values are not released
    int in_front_ = 0;                      // of these, those skipped in front of the block in work
    int skipped_ = 0;                       // and those behind it
};

}   // namespace ffa::forward
