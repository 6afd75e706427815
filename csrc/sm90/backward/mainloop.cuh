// A warpgroup of the backward kernel that owns 64 keys of each tile, and sums up their gradients over block after block
// of queries. A turn of its loop, " is the next block:
//
//     dS is stored and announced, dV and dK are issued
//     dV is done: S" is issued; dK is done; S" is done: P" = exp2(scale S"), dP" is issued
//     dP" is done: dS" = P" dP"
//
// The compiler wants 32 registers beyond the accumulators and operands in flight, so S" waits for dV, and dP" for S".
// The matmuls of the other warpgroups fill the gaps. S and dP start from what would have to be subtracted from them
// later. A warp's memory operations queue up behind the matmuls that it has issued: what can be read or stored is, in
// front of them.
#pragma once

#include "backward/config.cuh"
#include "backward/epilogue.cuh"
#include "backward/scores.cuh"
#include "visibility/bits.cuh"
#include "visibility/block_table.cuh"
#include "visibility/intervals.cuh"
#include "visibility/mask.cuh"
#include "common/pipeline.cuh"
#include "common/product.cuh"
#include "common/wgmma.cuh"

namespace ffa::backward {

// The matmuls of a warpgroup of the backward kernel that owns 64 keys. Scores and their gradients are transposed, keys
// by queries, so that they are operands of the next matmul as they lie in registers.
template <class Config>
class Matmuls {
public:
    using Element = typename Config::Element;
    static constexpr int kScores = Config::kBlockCols / 2;   // registers of a thread: 64 rows over 128 threads
    static constexpr int kGrad = Config::kHeadDim / 2;
    using Scores = float[kScores];
    using Operand = uint32_t[kScores / 2];
    using Grad = float[kGrad];

    __device__ __forceinline__ explicit Matmuls(const SharedStorage<Config>& smem)
        : q_operands_(smem.q),
          dout_operands_(smem.dout),
          stats_operands_(smem.stats),
          selector_operands_(smem.selectors) {}

    // 64 keys as an operand: in registers, or where they lie.
    static constexpr int kKeySteps = Config::kHasKeysInRegisters ? Config::kHeadDim / 16 : 1;
    struct Keys {
        const Element* rows;
        uint32_t steps[kKeySteps][4];

        template <class Multiply>
        __device__ __forceinline__ void multiply(Scores& product, int step, uint32_t queries, bool adds) const {
            Multiply::template rs<Major::K>(product, steps[step], queries, adds);
        }
    };

    // Those from `rows` on, of which this warp's begin at `row`.
    __device__ __forceinline__ static Keys keys(const Element* rows, int row) {
        Keys keys{rows};
        if constexpr (Config::kHasKeysInRegisters) {
            const int lane = threadIdx.x % 32;
            const uint32_t address = shared_address(rows) + (row + lane % 16) * 128;
#pragma unroll
            for (int step = 0; step < kKeySteps; ++step) {
                const int chunk = 2 * (step % 4) + lane / 16;
                ldmatrix_x4(address + step / 4 * kKSlabBytes + ((chunk ^ (lane % 8)) << 4), keys.steps[step]);
            }
        }
        return keys;
    }

    // S^T = K Q^T, from -lse / scale on, where it may be.
    __device__ __forceinline__ void issue_scores(Scores& scores, const Keys& k, int slot) const {
        issue_rows<Config::kBeginsWithLse, Config::kCols>(scores, Statistic::kOfScores, k, q_operands_[slot], slot);
    }

    // dP^T = V dO^T, from -delta on, which travels with Q.
    __device__ __forceinline__ void issue_dprobs(Scores& dprobs, const Keys& v, int slot, int stats_slot) const {
        issue_rows<true, Config::kColsOfV>(dprobs, Statistic::kOfDprobs, v, dout_operands_[slot], stats_slot);
    }

    // dV += P^T dO
    __device__ __forceinline__ void issue_dv(Grad& dv, const Operand& probs, int slot) const {
        accumulate_registers(dv, probs, dout_operands_[slot]);
    }

    // dK += dS^T Q
    __device__ __forceinline__ void issue_dk(Grad& dk, const Operand& dscores, int slot) const {
        accumulate_registers(dk, dscores, q_operands_[slot]);
    }

    // With dS^T from shared memory.
    __device__ __forceinline__ void issue_dk(Grad& dk, const Element* dscores, int slot) const {
        const uint32_t a = wgmma_descriptor(dscores, 0);
        accumulate(dk, q_operands_[slot], [a](GradPanel& panel, int step, uint32_t b) {
            Wgmma<Element, kGradCols>::template ss<Major::K, Major::MN>(panel, a + (step * kStepBytes >> 4), b, 1);
        });
    }

private:
    // Of `kCols` columns: behind those there are zeros.
    template <bool kHasStart, int kCols>
    __device__ __forceinline__ void issue_rows(Scores& product, Statistic start, const Keys& keys, uint32_t queries,
                                               int slot) const {
        set_unread(product);
        pin(product);
        wgmma_fence();
        if constexpr (kHasStart) {
            Wgmma<bfloat16, Config::kBlockCols>::template ss<Major::K, Major::MN, kSelectorDescriptorHigh,
                                                             kStatsDescriptorHigh>(
                product, selector_operands_[static_cast<int>(start)], stats_operands_[slot], 0);
        }
        constexpr int kSteps = (kCols + 15) / 16;
        if constexpr (Config::kHasKeysInRegisters) {
            issue_steps<Element, kSteps, kQSlabBytes>(product, keys, queries, kHasStart);
        } else {
            const SharedRows<kKSlabBytes> rows{wgmma_descriptor(keys.rows, 0)};
            issue_steps<Element, kSteps, kQSlabBytes>(product, rows, queries, kHasStart);
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ void accumulate_registers(Grad& sum, const Operand& a, uint32_t queries) const {
        accumulate(sum, queries, [&a](GradPanel& panel, int step, uint32_t b) {
            Wgmma<Element, kGradCols>::template rs<Major::MN>(panel, a + 4 * step, b, 1);
        });
    }

    // `multiply` adds the products of 16 queries to some columns.
    template <class Multiply>
    __device__ __forceinline__ void accumulate(Grad& sum, uint32_t queries, Multiply multiply) const {
        const uint32_t b = queries + leading_stride(kQSlabBytes);
        pin(sum);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kBlockCols / 16; ++step) {
#pragma unroll
            for (int panel = 0; panel < Config::kHeadDim / kGradCols; ++panel) {
                const int within = step * kSixteenRowsBytes + panel * kGradCols / Config::kSlabCols * kQSlabBytes;
                multiply(reinterpret_cast<GradPanel&>(sum[panel * kGradCols / 2]), step, b + (within >> 4));
            }
        }
        wgmma_commit_group();
    }

    // The assembler takes no instruction with more registers than all threads have on average.
    static constexpr int kGradCols = Config::kHeadDim > 192 ? Config::kHeadDim / 2 : Config::kHeadDim;
    using GradPanel = float[kGradCols / 2];
    static constexpr int kStepBytes = 32;   // 16 columns
    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);
    static constexpr int kQSlabBytes = Config::kQSlab * sizeof(Element);
    static constexpr int kSixteenRowsBytes = 16 * 128;

    const SlotDescriptors<sizeof(SharedStorage<Config>::q[0])> q_operands_;
    const SlotDescriptors<sizeof(SharedStorage<Config>::dout[0])> dout_operands_;
    const SlotDescriptors<sizeof(SharedStorage<Config>::stats[0])> stats_operands_;
    const SlotDescriptors<sizeof(SharedStorage<Config>::selectors[0])> selector_operands_;
};

// The arithmetic of the backward kernel on scores, keys by queries, as a warpgroup holds them: from scores to
// probabilities, and the gradients of scores on their way to shared memory.
template <class Config>
class ScoreMath {
public:
    using Element = typename Config::Element;
    static constexpr int kScores = Matmuls<Config>::kScores;
    using Scores = typename Matmuls<Config>::Scores;
    using Operand = typename Matmuls<Config>::Operand;
    static constexpr int kLoadsAhead = 2;   // of statistics

    __device__ __forceinline__ ScoreMath(const typename Config::Params& params, const SharedStorage<Config>& smem,
                                         int lane)
        : params_(params), smem_(smem), lane_(lane) {}

    // What a table says of a block.
    using Asked = Maybe<Config::kMapTable, SeenByRows<Config::kBlockCols>>;

    // Of a block that asks, to one half of the rows; the rest as for `mask`.
    __device__ __forceinline__ SeenColumns<Config::kBlockCols> look_up(int slot, int mask_row, int row,
                                                                       int half) const {
        if constexpr (Config::kMapTable) {
            const Block& block = smem_.blocks[slot];
            return look_up_columns<Config::kBlockCols>(params_.table, mask_row + row + lane_ / 4 + 8 * half,
                                                       block.key_end(), block.word());
        }
        return {};
    }

    __device__ __forceinline__ void mask(Scores& scores, int slot, int mask_row, int row) const {
        if constexpr (Config::kMapTable) {
            mask(scores, slot, mask_row, row, [&](int half) { return look_up(slot, mask_row, row, half); });
        } else {
            mask(scores, slot, mask_row, row, 0);   // what refers to a variable costs registers, unused too
        }
    }

    // `row` is the first one of the warp in its tile, and `asked(half)` what a table says to one half
    // of the rows.
    template <class Columns>
    __device__ __forceinline__ void mask(Scores& scores, int slot, int mask_row, int row, Columns asked) const {
        if constexpr (Config::kMapLines > 1 && Config::kIsWide) {
            if (!__any_sync(0xffffffff, smem_.blocks[slot].lines() >> row / Config::kRows & 1)) {
#pragma unroll
                for (int i = 0; i < kScores; ++i) {
                    scores[i] = -kInfinity;
                }
                return;
            }
        }
        if (__any_sync(0xffffffff, mask_row != kNoMask)) {
            const Block& block = smem_.blocks[slot];
            if constexpr (Config::kMapIntervals > 0) {
                apply_intervals_to_keys<Config::kMapIntervals>(scores, params_.intervals, mask_row + row + lane_ / 4,
                                                               block.first, block.end);
            }
            if constexpr (Config::kMapTable) {
                apply_columns(scores, asked, lane_);
            }
            if constexpr (Config::kMapAsks) {
                return;
            }
            apply_mask<Config::kMapLines == 0>(scores, block.run, params_.edges, mask_row + row + lane_ / 4,
                                               block.first + 2 * (lane_ % 4));
            if constexpr (Config::kHasBits) {
                if (has_bits(block.run)) {
                    apply_bits_to_keys(scores, block.run, params_.bits, mask_row + row, block.first);
                }
            }
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

    // From products of queries and keys, -inf where they are hidden, P by a score program, and P times its slopes.
    __device__ __forceinline__ void exponentiate_changed(const Scores& products, Operand& probs, Operand& factors,
                                                         const TileScores<Config>& program, const Stats* stats) const {
        program.for_each_pair([&](int i, const typename TileScores<Config>::Query(&queries)[2]) {
            // A load waits for what an earlier one was for: registers are short.
            const uint32_t zero = i < kLoadsAhead ? 0 : zero_after(__uint_as_float(probs[2 * (i - kLoadsAhead)]));
            const float2 minus_lse = this->minus_lse(stats[i + zero]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* const pair = products + 4 * i + 2 * half;
                const float2 left = changed(pair[0], program, queries[0], half, minus_lse.x);
                const float2 right = changed(pair[1], program, queries[1], half, minus_lse.y);
                probs[2 * i + half] = pack<Element>(left.x, right.x);
                factors[2 * i + half] = pack<Element>(left.y, right.y);
            }
        });
    }

    // A probability, and the same times the slope of the program; both are 0 where the score is hidden.
    template <class Query>
    __device__ __forceinline__ float2 changed(float product, const TileScores<Config>& program, const Query& query,
                                              int half, float minus_lse) const {
        const auto [score, slope] = program.score_and_slope(product, query, half);
        const float p = ex2(score * params_.scale_log2 + minus_lse);
        return product == -kInfinity ? float2{0.f, 0.f} : float2{p, p * slope};
    }

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
            // Both lead to the same place. The first one takes fewer registers, but where heads are not wide it costs 2
            // %.
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

// Its control flow is uniform, and told so that the compiler sees it (all lanes vote, single lanes do by predicates
// what others would branch around): only then do loop counts, barriers and operands' descriptors live in uniform
// registers.
template <class Config>
class Consumer {
public:
    __device__ __forceinline__ Consumer(const typename Config::Params& params, SharedStorage<Config>& smem,
                                        int warpgroup)
        : params_(params),
          smem_(smem),
          warpgroup_(warpgroup),
          lane_(threadIdx.x % 32),
          gradients_(params, lane_),
          matmuls_(smem),
          math_(params, smem, lane_) {}

    __device__ __forceinline__ void run() {
        while (true) {
            mbarrier_wait_together(smem_.kv_full, kv_.phase);
            left_ = uniform(work().num_visits);
            if (left_ == TileOfHead::kNoMoreWork) {
                break;
            }
            differentiate();
            kv_.advance();
        }
    }

private:
    using Element = typename Config::Element;
    static constexpr int kScores = Matmuls<Config>::kScores;
    static constexpr int kGrad = Matmuls<Config>::kGrad;
    using Scores = typename Matmuls<Config>::Scores;
    using Operand = typename Matmuls<Config>::Operand;
    using Grad = typename Matmuls<Config>::Grad;

    // Measured: it pays where products are short beside the exponentials.
    static constexpr bool kExponentialsBesideDprobs = Config::kHeadDim <= 64 && Config::kBeginsWithLse;
    // A wait amid the arithmetic that makes operands: the assembler orders what is in front and behind for itself, and
    // needs fewer registers.
    static constexpr bool kBufferIsAwaitedBefore = kExponentialsBesideDprobs;
    // Probabilities of a score program are rounded, times its slopes too, before there are their gradients: that takes
    // as few registers as the scores.
    static constexpr bool kHasFactors = Config::kHasScore && !Config::kBeginsWithLse;
    // dS of a block then has the slot of its queries, which saves registers.
    static constexpr bool kScoresGoWithBlocks = Config::kScoreStages == Config::kStages;

    __device__ __forceinline__ void differentiate() {
        Grad dk, dv;
#pragma unroll
        for (int i = 0; i < kGrad; ++i) {
            dk[i] = dv[i] = 0.f;
        }
        if (left_ > 0) {
            walk(dk, dv);
            barrier_sync(kScoresAreRead, (Config::kConsumers + 1) * Config::kWarpgroup);
        } else {
            release(smem_.kv_empty, lane_);
        }
        const TileOfHead& work = this->work();
        int store_end = work.tile.row_end;
        if (__any_sync(0xffffffff, work.num_parts > 1)) {
            store_end = gradients_.join_parts(work, dv, dk);
        }
#pragma unroll
        for (int i = 0; i < kGrad; ++i) {
            dk[i] *= params_.dq.softmax_scale;
        }
        gradients_.template store<Config::kSlabs, Config::kColsOfV>(dv, smem_.dscores[0][0], params_.dv,
                                                                    params_.dv_rows, work, store_end);
        gradients_.template store<Config::kSlabs, Config::kCols>(dk, smem_.dscores[0][0], params_.dk, params_.dk_rows,
                                                                 work, store_end);
    }

    __device__ __forceinline__ void walk(Grad& dk, Grad& dv) {
        Operand probs, dscores;
        TileScores<Config> program(params_, first_key_of_thread());
        if constexpr (kSkips) {
            skip_unseen();
            if (left_ == 0) {
                release(smem_.kv_empty, lane_);
                return;
            }
        }
        differentiate_scores(probs, dscores, program, [] {});

        // No matmul is in flight where the loop closes: the compiler moves registers there.
        while (true) {
            const Position<Config::kStages> done = block_;
            announce(dscores, [&] { matmuls_.issue_dv(dv, probs, block_.slot); });
            matmuls_.issue_dk(dk, dscores, block_.slot);
            block_.advance();
            if (--left_ == 0) {
                release(smem_.kv_empty, lane_);   // the next ones may come while these gradients leave
                wgmma_wait_group<0>();
                pin(dv);
                pin(dk);
                release(smem_.dout_empty[done.slot], lane_);
                release(smem_.q_empty[done.slot], lane_);
                break;
            }
            wgmma_wait_group<1>();
            pin(dv);
            release(smem_.dout_empty[done.slot], lane_);
            bool is_released = false;
            if constexpr (kSkips) {
                if (!sees_block()) {
                    // What lies ahead comes only when this buffer is free.
                    wgmma_wait_group<0>();
                    pin(dk);
                    release(smem_.q_empty[done.slot], lane_);
                    is_released = true;
                    skip_unseen();
                    if (left_ == 0) {
                        release(smem_.kv_empty, lane_);
                        break;
                    }
                }
            }
            differentiate_scores(probs, dscores, program, [&] {
                wgmma_wait_group<1>();
                pin(dk);
                if (!is_released) {
                    release(smem_.q_empty[done.slot], lane_);
                }
            });
        }
    }

    // Of a block map with a line for each warpgroup, what the keys of this one do not see is neither computed nor part
    // of dQ. Where heads are wide, both warpgroups share the keys, and a mask hides them.
    static constexpr bool kSkips = Config::kMapLines > 1 && !Config::kIsWide;

    // Whether this warpgroup's keys see the present block, which it waits for.
    __device__ __forceinline__ bool sees_block() const {
        mbarrier_wait_together(smem_.q_full[block_.slot], block_.phase);
        return __any_sync(0xffffffff, smem_.blocks[block_.slot].lines() >> warpgroup_ & 1);
    }

    // It releases every buffer all the same, each when that is full: an arrival before would count for the last block.
    __device__ __forceinline__ void skip_unseen() {
        while (left_ > 0 && !sees_block()) {
            --left_;
            await_buffer();
            release(smem_.dscores_full[scores_position().slot], lane_);
            dscores_.advance();
            mbarrier_wait_together(smem_.dout_full[block_.slot], block_.phase);
            release(smem_.dout_empty[block_.slot], lane_);
            release(smem_.q_empty[block_.slot], lane_);
            block_.advance();
        }
    }

    // Leaves dS of the present block to the warpgroup of dQ. `between` comes behind the stores and in front of the
    // fence.
    template <class Between>
    __device__ __forceinline__ void announce(const Operand& dscores, Between between) {
        const auto at = scores_position();
        if constexpr (!kBufferIsAwaitedBefore) {
            await_buffer();
        }
        math_.store_dscores(dscores, smem_.dscores[at.slot][0], gradients_.row_in_block());
        between();
        fence_proxy_async_shared();
        release(smem_.dscores_full[at.slot], lane_);
        dscores_.advance();
    }

    // For dS of the present block.
    __device__ __forceinline__ void await_buffer() const {
        const auto at = scores_position();
        mbarrier_wait_together(smem_.dscores_empty[at.slot], at.phase ^ 1);
    }

    __device__ __forceinline__ auto scores_position() const {
        if constexpr (kScoresGoWithBlocks) {
            return block_;
        } else {
            return dscores_;
        }
    }

    // What a table says, while the scores are computed; where much is made of these, there are no registers for it.
    static constexpr bool kLooksUpAhead = Config::kMapTable && Config::kBeginsWithLse;

    // The scores of the present block, with what a table said of it ahead.
    __device__ __forceinline__ void mask(Scores& scores, int mask_row,
                                         const typename ScoreMath<Config>::Asked& ahead) const {
        if constexpr (kLooksUpAhead) {
            math_.mask(scores, block_.slot, mask_row, gradients_.row_in_tile(),
                       [&](int half) { return ahead.of_rows[half]; });
        } else {
            math_.mask(scores, block_.slot, mask_row, gradients_.row_in_tile());
        }
    }

    // P and dS of the present block. `meanwhile` is done while the scores are computed.
    template <class Meanwhile>
    __device__ __forceinline__ void differentiate_scores(Operand& probs, Operand& dscores, TileScores<Config>& program,
                                                         Meanwhile meanwhile) {
        Scores scores, dprobs;
        mbarrier_wait_together(smem_.q_full[block_.slot], block_.phase);
        matmuls_.issue_scores(scores, matmuls_.keys(smem_.k[0] + first_key(), 0), block_.slot);
        meanwhile();
        const int mask_row = smem_.blocks[block_.slot].mask_row;
        typename ScoreMath<Config>::Asked ahead;
        if constexpr (kLooksUpAhead) {
            if (__any_sync(0xffffffff, mask_row != kNoMask)) {
                ahead.of_rows[0] = math_.look_up(block_.slot, mask_row, gradients_.row_in_tile(), 0);
                ahead.of_rows[1] = math_.look_up(block_.slot, mask_row, gradients_.row_in_tile(), 1);
            }
        }
        if constexpr (Config::kHasScore) {
            const Block& block = smem_.blocks[block_.slot];
            program.move_to(uniform(block.first), uniform(block.template head<Config>()));
        }
        wgmma_wait_group<0>();
        pin(scores);
        if constexpr (Config::kHasSoftcap) {
            math_.cap(scores);
        }
        if constexpr (!Config::kBeginsWithLse) {
            mask(scores, mask_row, ahead);
        } else if constexpr (Config::kHasScore) {
            program.shift(scores);
            mask(scores, mask_row, ahead);
            pin(scores);
        } else {
            mask(scores, mask_row, ahead);
            math_.scale(scores);
        }
        Operand factors;
        if constexpr (kHasFactors) {
            math_.exponentiate_changed(scores, probs, factors, program, smem_.stats[block_.slot]);
        } else if constexpr (Config::kBeginsWithLse && !kExponentialsBesideDprobs) {
            math_.exponentiate(scores);
        }
        mbarrier_wait_together(smem_.dout_full[block_.slot], block_.phase);
        matmuls_.issue_dprobs(dprobs, matmuls_.keys(smem_.v[0] + first_key(), 0), block_.slot, block_.slot);
        if constexpr (kExponentialsBesideDprobs) {
            math_.exponentiate(scores);
            stay_in_front_of_wait(scores);
        }
        wgmma_wait_group<0>();
        pin(dprobs);
        if constexpr (Config::kHasSoftcap) {
            capped_to_operands(dprobs, scores, probs, dscores);
        } else if constexpr (kHasFactors) {
            factors_to_operands(dprobs, factors, dscores);
        } else {
            to_operands(dprobs, scores, probs, dscores);
        }
    }

    // Where a score program asks.
    __device__ __forceinline__ int first_key_of_thread() const {
        if constexpr (Config::kHasScore) {
            return work().tile.row_begin + gradients_.row_in_tile() + lane_ / 4;
        }
        return 0;
    }

    __device__ __forceinline__ int first_key() const { return warpgroup_ * Config::kRows * Config::kSlabCols; }

    // No register keeps the address.
    __device__ __forceinline__ const TileOfHead& work() const { return smem_.work[opaque(kv_.phase)]; }

    // ---- scores to probabilities and to their gradients

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

    // dS = P (dP - delta), and P, rounded: packed, an accumulator of 16 columns is the A operand of the next matmul.
    __device__ __forceinline__ void to_operands(const Scores& dprobs, const Scores& p, Operand& probs,
                                                Operand& dscores) const {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
            if (kBufferIsAwaitedBefore && i == kScores / 4) {
                await_buffer();
            }
            dscores[i] = pack<Element>(p[2 * i] * dprobs[2 * i], p[2 * i + 1] * dprobs[2 * i + 1]);
            probs[i] = pack<Element>(p[2 * i], p[2 * i + 1]);
        }
    }

    // The same from capped scores, for whose probabilities there are no registers until now, nor for what is subtracted
    // from them: a load waits for what an earlier one was for.
    __device__ __forceinline__ void capped_to_operands(const Scores& dprobs, const Scores& capped, Operand& probs,
                                                       Operand& dscores) const {
        constexpr int kLoadsAhead = ScoreMath<Config>::kLoadsAhead;
        const Stats* const stats = smem_.stats[block_.slot];
#pragma unroll
        for (int i = 0; i < kScores / 4; ++i) {
            const uint32_t zero = i < kLoadsAhead ? 0 : zero_after(__uint_as_float(probs[2 * (i - kLoadsAhead)]));
            const float2 minus_lse = math_.minus_lse(stats[i + zero]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* const pair = capped + 4 * i + 2 * half;
                const float* const dp = dprobs + 4 * i + 2 * half;
                const float2 p = math_.exponentiate_capped(pair, minus_lse);
                probs[2 * i + half] = pack<Element>(p.x, p.y);
                dscores[2 * i + half] =
                    pack<Element>(p.x * math_.slope(pair[0]) * dp[0], p.y * math_.slope(pair[1]) * dp[1]);
            }
        }
    }

    // Likewise from what gradients of probabilities are multiplied with, rounded: there are no registers for more.
    __device__ __forceinline__ static void factors_to_operands(const Scores& dprobs, const Operand& factors,
                                                               Operand& dscores) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
            const float2 pair = unpack<Element>(factors[i]);
            dscores[i] = pack<Element>(pair.x * dprobs[2 * i], pair.y * dprobs[2 * i + 1]);
        }
    }

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    const int warpgroup_;
    const int lane_;
    const KeyGradients<Config> gradients_;
    const Matmuls<Config> matmuls_;
    const ScoreMath<Config> math_;
    Position<1> kv_;
    Position<Config::kStages> block_;
    Position<Config::kScoreStages> dscores_;   // unless it is that of the block
    int left_ = 0;                             // blocks of the tile
};

}   // namespace ffa::backward
