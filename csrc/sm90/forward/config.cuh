// What the threads of a block of the forward kernel share: its shape, and what lies in shared memory.
#pragma once

#include "common/choose.cuh"
#include "keys/key_loader.cuh"
#include "common/pipeline.cuh"
#include "common/ptx.cuh"
#include "common/store.cuh"
#include "common/tile_plan.cuh"
#include "forward/params.cuh"
#include "scores/none.cuh"

namespace ffa::forward {

constexpr int kMaxConsumers = 3;

template <class Element_, int kCols_, int kColsOfV_, int kBlockCols_, int kKStages_, int kVStages_, int kQBuffers_,
          int kConsumers_, int kProducerRegisters_, int kConsumerRegisters_, bool kHasSoftcap_, bool kHasStairs_,
          bool kHasBits_, int kMapLines_, int kMapIntervals_, bool kMapTable_, bool kHasRemoteKeys_, bool kIsEarly_,
          bool kHasMaxScores_, class Score_>
struct ForwardConfig {
    using Element = Element_;
    static constexpr int kCols = kCols_;         // of Q and K
    static constexpr int kColsOfV = kColsOfV_;   // and of the output
    static constexpr int kBlockCols = kBlockCols_;
    static constexpr int kKStages = kKStages_;
    static constexpr int kVStages = kVStages_;
    static constexpr int kQBuffers = kQBuffers_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kProducerRegisters = kProducerRegisters_;
    static constexpr int kConsumerRegisters = kConsumerRegisters_;
    static constexpr bool kHasSoftcap = kHasSoftcap_;
    static constexpr bool kHasStairs = kHasStairs_;   // whose rows look up what they see: 1 to 3 % for all others
    static constexpr bool kHasBits = kHasBits_;       // a run may be of a bit block
    // Runs are of a block map, with one line for a tile or one for each warpgroup; 0 if they are not.
    static constexpr int kMapLines = kMapLines_;
    static constexpr int kMapIntervals = kMapIntervals_;   // that a query of a block map sees at most; 0: all
    static constexpr bool kMapTable = kMapTable_;          // blocks of a map's queries and keys are anywhere
    static constexpr bool kMapAsks = kMapIntervals > 0 || kMapTable;
    static constexpr bool kHasRemoteKeys =
        kHasRemoteKeys_;                                    // in tensors of their own, whose maps the producer chooses
    static constexpr bool kIsEarly = kIsEarly_;             // begins before they are there
    static constexpr bool kHasMaxScores = kHasMaxScores_;   // of each row, beside its log-sum-exp
    using Score = Score_;                                   // made from a score program, or NoScore
    static constexpr bool kHasScore = Score::kIsThere;

    static constexpr int kWarpgroup = 128;
    static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
    static constexpr int kRows = 64;       // of a warpgroup
    static constexpr int kSlabCols = 64;   // 128 bytes, the width of a swizzled row
    // Columns that are computed: behind those of a tensor TMA reads zeros, and writes nothing.
    static constexpr int kSteps = (kCols + 15) / 16;   // of 16, of Q K
    static constexpr int kOutCols = kColsOfV <= 64    ? 64
                                    : kColsOfV <= 80  ? 80
                                    : kColsOfV <= 96  ? 96
                                    : kColsOfV <= 112 ? 112
                                    : kColsOfV <= 128 ? 128
                                    : kColsOfV <= 192 ? 192
                                                      : 256;
    static constexpr int kVSlabs = (kOutCols + kSlabCols - 1) / kSlabCols;
    static constexpr int kOwnSlabs = (kCols + kSlabCols - 1) / kSlabCols;
    static constexpr int kSlabs = kOwnSlabs > kVSlabs ? kOwnSlabs : kVSlabs;   // of Q and K: O leaves from its Q's
    static constexpr int kQSlab = kConsumers * kRows * kSlabCols;              // elements
    static constexpr int kKSlab = kBlockCols * kSlabCols;                      // elements

    using WholeParams = typename Choose<(kHasBits || kMapAsks), BitsForwardParams, ForwardParams>::type;
    using ScoredParams = typename Choose<kHasScore, ScoredForwardParams<Score::kNumWords + 1>, WholeParams>::type;
    using Params = typename Choose<kIsEarly, EarlyForwardParams, ScoredParams>::type;

    static_assert(kHasRemoteKeys || !kIsEarly, "they are what is waited for");
    static_assert(!(kHasBits && kIsEarly), "remote keys have no bits");
    static_assert(kMapLines <= 1 || kMapLines == kConsumers, "each warpgroup has a line, or all have one");
    static_assert(kMapLines == 0 || !(kHasBits || kHasStairs || kHasRemoteKeys), "a map says all that is seen");
    static_assert(kMapLines > 0 || !kMapAsks, "it is looked up where blocks ask");
    static_assert(!(kHasScore && (kHasSoftcap || kIsEarly)), "a score program has the caps, and no remote keys");
    static_assert(kHasStairs || !kHasBits, "where there is room for bits, there is for stairs beside them");
    static_assert(kConsumers <= kMaxConsumers, "named barriers have numbers, see kWarpgroupDone");
    static_assert(kQBuffers == 1 || kQBuffers == 2, "one Q in work, one on its way");
    static_assert(sizeof(Element) == 2, "bf16 or fp16");
    static_assert(kCols <= 256 && kColsOfV <= 256, "wgmma holds up to 256 output columns");
    static_assert(kCols % 8 == 0 && kColsOfV % 8 == 0, "rows come and leave in 16 bytes at a time");
    static_assert(kBlockCols % 16 == 0, "P V takes 16 columns a step");
    static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup <= 65536, "one register file");
};

struct TileOfHead {
    int row_begin, row_end, head;
    int num_blocks;

    static constexpr int kNoMoreWork = -1;   // as num_blocks
};

// What the producer is to load K and V for.
struct alignas(16) RunsOfHead {
    int begin, end, kv_head;
    int unused;   // prefetch: reading the first run pulls it into L1

    static constexpr int kNoMoreWork = -1;   // as begin
};

template <class Config>
struct alignas(1024) SharedStorage {
    using Element = typename Config::Element;

    Element q[Config::kQBuffers][Config::kSlabs][Config::kQSlab];   // O leaves from its Q's
    Element k[Config::kKStages][Config::kSlabs][Config::kKSlab];
    Element v[Config::kVStages][Config::kVSlabs][Config::kKSlab];
    KeyBlock blocks[Config::kKStages];     // travel with k
    TileOfHead tiles[Config::kQBuffers];   // travel with q
    RunsOfHead runs;
    uint64_t runs_full, runs_empty;
    uint64_t q_full, q_empty;
    uint64_t k_full[Config::kKStages], k_empty[Config::kKStages];
    uint64_t v_full[Config::kVStages], v_empty[Config::kVStages];
    int split_shifts[Config::kQBuffers];   // travel with q
    int split_items[Config::kQBuffers];    // likewise, see Items<Config, true>
};

// Named barriers, the first of one for each consumer warpgroup; 0 is __syncthreads.
constexpr uint32_t kWarpgroupDone = 1;

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& smem) {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    mbarrier_init(smem.runs_full, 1);
    mbarrier_init(smem.runs_empty, 1);
    mbarrier_init(smem.q_full, 1);
    mbarrier_init(smem.q_empty, kConsumerWarps);
    init_ring(smem.k_full, smem.k_empty, kConsumerWarps);
    init_ring(smem.v_full, smem.v_empty, kConsumerWarps);
    fence_mbarrier_init();
}

}   // namespace ffa::forward
