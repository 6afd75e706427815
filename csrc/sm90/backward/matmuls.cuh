// The matmuls of a warpgroup of the backward kernel that owns 64 keys. Scores and their gradients are transposed, keys by
// queries, so that they are operands of the next matmul as they lie in registers.
#pragma once

#include "backward/config.cuh"
#include "common/pipeline.cuh"

namespace ffa {

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

    // S^T = K Q^T, from -lse / scale on, unless scores are capped.
    __device__ __forceinline__ void issue_scores(Scores& scores, const Keys& k, int slot) const {
        issue_rows<!Config::kHasSoftcap>(scores, Statistic::kOfScores, k, q_operands_[slot], slot);
    }

    // dP^T = V dO^T, from -delta on, which travels with Q.
    __device__ __forceinline__ void issue_dprobs(Scores& dprobs, const Keys& v, int slot, int stats_slot) const {
        issue_rows<true>(dprobs, Statistic::kOfDprobs, v, dout_operands_[slot], stats_slot);
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
        accumulate(dk, q_operands_[slot], [a](GradPart& part, int step, uint32_t b) {
            Wgmma<Element, kGradCols>::template ss<Major::K, Major::MN>(part, a + (step * kStepBytes >> 4), b, 1);
        });
    }

private:
    template <bool kHasStart>
    __device__ __forceinline__ void issue_rows(Scores& product, Statistic start, const Keys& keys, uint32_t queries,
                                               int slot) const {
        const uint32_t a = Config::kHasKeysInRegisters ? 0 : wgmma_descriptor(keys.rows, 0);
        constexpr int kStepsPerSlab = Config::kSlabCols / 16;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            product[i] = 0.f;   // never read, but the compiler keeps registers for what is not set
        }
        pin(product);
        wgmma_fence();
        if constexpr (kHasStart) {
            Wgmma<bfloat16, Config::kBlockCols>::template ss<Major::K, Major::MN, kSelectorDescriptorHigh,
                                                             kStatsDescriptorHigh>(
                product, selector_operands_[static_cast<int>(start)], stats_operands_[slot], 0);
        }
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            const int slab = step / kStepsPerSlab;
            const int within = step % kStepsPerSlab * kStepBytes;
            const uint32_t b = queries + ((slab * kQSlabBytes + within) >> 4);
            const bool accumulates = kHasStart || step != 0;
            using Multiply = Wgmma<Element, Config::kBlockCols>;
            if constexpr (Config::kHasKeysInRegisters) {
                Multiply::template rs<Major::K>(product, keys.steps[step], b, accumulates);
            } else {
                Multiply::template ss<Major::K, Major::K>(product, a + ((slab * kKSlabBytes + within) >> 4), b, accumulates);
            }
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ void accumulate_registers(Grad& sum, const Operand& a, uint32_t queries) const {
        accumulate(sum, queries, [&a](GradPart& part, int step, uint32_t b) {
            Wgmma<Element, kGradCols>::template rs<Major::MN>(part, a + 4 * step, b, 1);
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
            for (int part = 0; part < Config::kHeadDim / kGradCols; ++part) {
                const int within = step * kSixteenRowsBytes + part * kGradCols / Config::kSlabCols * kQSlabBytes;
                multiply(reinterpret_cast<GradPart&>(sum[part * kGradCols / 2]), step, b + (within >> 4));
            }
        }
        wgmma_commit_group();
    }

    // The assembler takes no instruction with more registers than all threads have on average.
    static constexpr int kGradCols = Config::kHeadDim > 192 ? Config::kHeadDim / 2 : Config::kHeadDim;
    using GradPart = float[kGradCols / 2];
    static constexpr int kStepBytes = 32;   // 16 columns
    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);
    static constexpr int kQSlabBytes = Config::kQSlab * sizeof(Element);
    static constexpr int kSixteenRowsBytes = 16 * 128;

    const SlotDescriptors<sizeof(SharedStorage<Config>::q[0])> q_operands_;
    const SlotDescriptors<sizeof(SharedStorage<Config>::dout[0])> dout_operands_;
    const SlotDescriptors<sizeof(SharedStorage<Config>::stats[0])> stats_operands_;
    const SlotDescriptors<sizeof(SharedStorage<Config>::selectors[0])> selector_operands_;
};

}  // namespace ffa
