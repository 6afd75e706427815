// What the threads of a block share that computes gradients of captured tensors: its shape, and what lies in shared
// memory.
#pragma once

#include "keys/key_loader.cuh"
#include "common/pipeline.cuh"
#include "scores/gradients/params.cuh"

namespace ffa::scores {

// Tiles and blocks are those of the forward pass.
template <class Element_, int kHeadDim_, int kBlockCols_, int kKStages_, int kVStages_, int kConsumers_,
          int kProducerRegisters_, int kConsumerRegisters_, bool kHasBits_, class Score_>
struct TableGradientsConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;   // tensors may be narrower: TMA reads zeros behind their columns
    static constexpr int kBlockCols = kBlockCols_;
    static constexpr int kKStages = kKStages_;
    static constexpr int kVStages = kVStages_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kProducerRegisters = kProducerRegisters_;
    static constexpr int kConsumerRegisters = kConsumerRegisters_;
    static constexpr bool kHasBits = kHasBits_;   // a run may be of a bit block
    static constexpr int kMapLines = 0;           // no run is of a block map
    static constexpr int kMapIntervals = 0;
    static constexpr bool kMapTable = false;
    static constexpr bool kMapAsks = false;
    using Score = Score_;   // made from a score program

    static constexpr int kWarpgroup = 128;
    static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
    static constexpr int kRows = 64;       // of a warpgroup
    static constexpr int kSlabCols = 64;   // 128 bytes, the width of a swizzled row
    static constexpr int kSlabs = (kHeadDim + kSlabCols - 1) / kSlabCols;
    static constexpr int kQSlab = kConsumers * kRows * kSlabCols;   // elements
    static constexpr int kKSlab = kBlockCols * kSlabCols;           // elements

    using Params = TableGradientsParams<Score::kNumWords + 1, Score::kNumSums>;

    static_assert(Score::kNumSums > 0, "else nobody asks");
    static_assert(sizeof(Element) == 2, "bf16 or fp16");
    static_assert(kHeadDim % 32 == 0, "wgmma takes 16 columns a step, and slabs are whole or half");
    static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup <= 65536, "one register file");
};

template <class Config>
struct alignas(1024) SharedStorage {
    using Element = typename Config::Element;

    Element q[Config::kSlabs][Config::kQSlab];
    Element dout[Config::kSlabs][Config::kQSlab];
    Element k[Config::kKStages][Config::kSlabs][Config::kKSlab];
    Element v[Config::kVStages][Config::kSlabs][Config::kKSlab];
    KeyBlock blocks[Config::kKStages];   // travel with k
    uint64_t q_full;                     // dout too
    uint64_t k_full[Config::kKStages], k_empty[Config::kKStages];
    uint64_t v_full[Config::kVStages], v_empty[Config::kVStages];
    int num_blocks;   // of the tile
};

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& smem) {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    mbarrier_init(smem.q_full, 1);
    init_ring(smem.k_full, smem.k_empty, kConsumerWarps);
    init_ring(smem.v_full, smem.v_empty, kConsumerWarps);
    fence_mbarrier_init();
}

}   // namespace ffa::scores
