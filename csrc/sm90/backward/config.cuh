// What the threads of a block of the backward kernel share: its shape, and what lies in shared memory.
#pragma once

#include "backward/params.cuh"
#include "backward/schedule/cluster.cuh"
#include "backward/schedule/walk.cuh"
#include "common/choose.cuh"
#include "common/ptx.cuh"
#include "common/statistics.cuh"
#include "common/store.cuh"
#include "common/tile_plan.cuh"
#include "scores/none.cuh"

namespace ffa::backward {

// Where 16 rows of a warp go.
struct DqTarget {
    float* sum;
    int head;
    int first;
    bool are_in_run;
};

template <class Element_, int kHeadDim_, int kCols_, int kColsOfV_, int kCtas_, int kBlockCols_, int kStages_,
          int kDoutStages_, int kScoreStages_, int kProducerRegisters_, int kDqRegisters_, int kConsumerRegisters_,
          bool kHasSoftcap_, bool kHasBits_, int kMapLines_, int kMapIntervals_, bool kMapTable_,
          bool kIsDeterministic_, bool kRoundsDq_, class Score_>
struct BackwardConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;   // tensors may be narrower: TMA reads zeros behind their columns
    static constexpr int kCols = kCols_;         // of Q and K and their gradients
    static constexpr int kColsOfV = kColsOfV_;   // of V, dO and dV
    static constexpr int kBlockCols = kBlockCols_;
    static constexpr int kStages = kStages_;
    static constexpr int kDoutStages = kDoutStages_;
    static constexpr int kScoreStages = kScoreStages_;
    static constexpr int kProducerRegisters = kProducerRegisters_;
    static constexpr int kDqRegisters = kDqRegisters_;
    static constexpr int kConsumerRegisters = kConsumerRegisters_;
    static constexpr bool kHasSoftcap = kHasSoftcap_;
    static constexpr bool kHasBits = kHasBits_;   // a run may be of a bit block
    // Runs are of a block map, with one line for a tile or one for each 64 of its keys; 0 if they are not.
    static constexpr int kMapLines = kMapLines_;
    static constexpr int kMapIntervals = kMapIntervals_;
    static constexpr bool kMapTable = kMapTable_;   // blocks of a map's queries and keys are anywhere
    static constexpr bool kMapAsks = kMapIntervals > 0 || kMapTable;
    static constexpr bool kIsDeterministic = kIsDeterministic_;   // dq is summed up in one order
    static constexpr bool kRoundsDq = kRoundsDq_;                 // else the kernel behind does
    using Score = Score_;                                         // made from a score program, or NoScore
    static constexpr bool kHasScore = Score::kIsThere;
    // Whether scores start from -lse / scale: where nothing is made of them but what is added to them.
    static constexpr bool kBeginsWithLse = !kHasSoftcap && (!kHasScore || Score::kIsShift);
    using WholeParams = typename Choose<(kHasBits || kMapAsks), BitsBackwardParams, BackwardParams>::type;
    using Params = typename Choose<kHasScore, ScoredBackwardParams<Score::kNumWords + 1>, WholeParams>::type;

    // A tile may be that of a cluster of two thread blocks, of 64 keys each, which load Q and dO for each other: where
    // heads are so wide, or a score program needs so much, that a warpgroup has registers for one of the gradients.
    // Then two share the keys, see mainloop_wide.cuh.
    static constexpr int kCtas = kCtas_;
    static constexpr bool kIsWide = kCtas > 1;
    // Where there is room for what it needs of the other's, each computes one half of the columns of dQ for all keys:
    // so half as much is added up in global memory, which would limit them.
    static constexpr bool kSharesDq = kHeadDim == 192;
    // S and dP then read half as much of shared memory, where there are registers for it.
    static constexpr bool kHasKeysInRegisters = kIsWide && kHeadDim <= 192 && !kHasSoftcap && !kHasScore;
    // And dK takes dS from there, so that it is computed beside the next dS. (Where dq has an order, that loses.)
    static constexpr bool kHasDscoresOfDkInShared = kHasKeysInRegisters && !kIsDeterministic;
    static constexpr int kWarpgroup = 128;
    static constexpr int kConsumers = 2;
    static constexpr int kThreads = kWarpgroup * (kConsumers + 2);
    static constexpr int kRows = 64;                                        // keys of a warpgroup
    static constexpr int kBlockRows = (kIsWide ? 1 : kConsumers) * kRows;   // of a thread block
    static constexpr int kTileRows = kCtas * kBlockRows;
    static constexpr int kTileWarps = kCtas * kConsumers * 4;   // that have gradients of a tile's keys
    static constexpr int kPeerSlabs = 2;                        // of the other one's keys, that this one needs
    static constexpr int kSlabCols = 64;                        // 128 bytes, the width of a swizzled row
    static constexpr int kSlabs = (kHeadDim + kSlabCols - 1) / kSlabCols;
    static constexpr int kKSlab = kBlockRows * kSlabCols;   // elements
    static constexpr int kQSlab = kBlockCols * kSlabCols;   // elements
    static constexpr int kScoreSlabs = kBlockCols / kSlabCols;
    // dQ of a block is computed in panels: a wgmma high, and as wide as there are registers.
    static constexpr int kDqRows = 64;
    static constexpr int kDqCols = kHeadDim > 96 ? 64 : kHeadDim;
    static constexpr int kDqRowPanels = kBlockCols / kDqRows;
    static constexpr int kDqColPanels = kHeadDim / kDqCols;
    static constexpr int kDqWarps = 4;
    static constexpr int kDqPanels = kDqRowPanels * kDqColPanels;
    // Whether lanes that do something alone are elected. Measured: it gains up to 8 % here, and costs up to 2 %
    // elsewhere.
    static constexpr bool kElects = kIsDeterministic;

    // Whether parts of a tile may come one after the other.
    static constexpr bool kHandsOn = !kIsDeterministic;

    static_assert(!(kHasScore && kHasSoftcap), "a score program has the caps");
    static_assert(kMapLines == 0 || !(kHasBits || kRoundsDq), "nobody counts the visits of a map");
    static_assert(kMapLines > 0 || !kMapAsks, "it is looked up where blocks ask");
    static_assert(kMapLines <= 2, "a tile has two times 64 keys");
    static_assert(sizeof(Element) == 2, "bf16 or fp16");
    static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256, "dk and dv are sums in registers");
    static_assert(kCols % 8 == 0 && kCols <= kHeadDim, "rows leave in 16 bytes at a time");
    static_assert(kColsOfV % 8 == 0 && kColsOfV <= kHeadDim, "likewise");
    static_assert(kBlockCols % kSlabCols == 0, "a block of dS is whole slabs wide");
    static_assert(kSlabCols == kDqRows, "a slab of dS is one panel of dQ");
    static_assert(kBlockAlignment % kDqGroupRows == 0, "dQ is added by whole groups of rows");
    static_assert(kIsWide || kScoreStages * kScoreSlabs >= kSlabs, "dV and dK leave from the buffers of dS");
    static_assert(kStages >= 2, "Q of this and of the next block are in use at a time");
    static_assert(kIsWide || kDoutStages == kStages, "Q and dO go together");
    static_assert(kCtas <= 2 && (kIsWide || kHeadDim <= 128), "only two share a tile, those of wide heads do");
    static_assert(!kIsWide || kScoreStages == kDoutStages, "they share a position");
};

constexpr int kNoMask = -1;

// What the producer says about a block of queries.
struct alignas(16) Block {
    Run run;   // only where there is a mask; where pairs look up what they see, what follows is in its place
    int first;
    int end;              // queries from here on are outside of the run
    int head_and_lines;   // in more memory, some kernels would not fit
    int mask_row;         // the tile's first key where some key may not see every query, else kNoMask

    // Of a block map where each 64 of the tile's keys have a line of their own, the bits of those that see the block.
    __device__ __forceinline__ static int with_lines(int head, unsigned lines) { return head | lines << kHeadBits; }
    __device__ __forceinline__ unsigned lines() const { return head_and_lines >> kHeadBits; }

    template <class Config>
    __device__ __forceinline__ int head() const {
        return Config::kMapLines > 1 ? head_and_lines & ((1 << kHeadBits) - 1) : head_and_lines;
    }

    // Of a block table: from the line of a key to the bits of this block, and the first key that sees nothing.
    __device__ __forceinline__ int& word() { return run.bits; }
    __device__ __forceinline__ int word() const { return run.bits; }
    __device__ __forceinline__ int& key_end() { return run.row_end; }
    __device__ __forceinline__ int key_end() const { return run.row_end; }

private:
    static constexpr int kHeadBits = 16;
};

// Where it ends decides where barriers lie, and so what code they get: with 64 bytes head_dim 64 is 1 % faster than
// with 60.
struct alignas(64) TileOfHead {
    Tile tile;
    int kv_head;
    int tile_index;
    bool is_ascending;     // the walk starts with the first queries
    int num_visits;        // blocks of queries, over all query heads
    int visits_to_count;   // after so many, those of a head or all, the warps of dQ count what they have added
    int wave_in_step;      // whose thread blocks stay together, or kNoWave
    int num_qheads;        // of the group, from `qhead` on
    int qhead;
    int part;   // of so many as the tile is divided into
    int num_parts;
    int slot;   // of its first part, of all heads' slots
    int turn;   // of a part that is handed on, else AgendaEntry::kNoTurn

    __device__ __forceinline__ bool is_short(int rows) const { return tile.row_end - tile.row_begin < rows; }

    static constexpr int kNoMoreWork = -1;   // as num_visits
};

// What some kernels do without takes no room there.
template <class Config>
struct alignas(1024) SharedStorage {
    using Element = typename Config::Element;

    // Where heads are wide, what the gradients of probabilities are multiplied with, left by the warps that have the
    // probabilities for those that have the gradients, of 16 keys each, as they hold it; later dV.
    struct Factors {
        static constexpr int kWarps = Config::kRows / kWarpRows;

        Element of_warps[kWarps][kWarpRows * Config::kBlockCols];   // as many as a slab of dV has
    };
    // What the other thread block of a cluster has.
    struct Peer {
        Element dscores[Config::kScoreStages][Config::kKSlab];
        Element k[Config::kPeerSlabs][Config::kKSlab];   // columns of this block's half of dQ
    };
    // dQ on the way out, of each warp; where heads are wide it leaves from registers.
    struct Dq {
        float of_warps[Config::kDqRowPanels][Config::kDqWarps][kWarpRows * Config::kHeadDim];
    };
    struct PeerBarriers {
        uint64_t received[Config::kScoreStages];   // what the other one has sent is there
        uint64_t taken[Config::kScoreStages];      // it has no more use for what this one has sent
    };
    struct ClusterBarriers {
        uint64_t item_full, item_empty;
    };

    [[no_unique_address]] Maybe<Config::kIsWide, Factors> factors;
    [[no_unique_address]] Maybe<Config::kSharesDq, Peer> peer;
    Element k[Config::kSlabs][Config::kKSlab];
    Element v[Config::kSlabs][Config::kKSlab];
    Element q[Config::kStages][Config::kSlabs][Config::kQSlab];
    Element dout[Config::kDoutStages][Config::kSlabs][Config::kQSlab];
    Element dscores[Config::kScoreStages][Config::kScoreSlabs][Config::kKSlab];   // dS^T, keys x queries; later dV, dK
    Stats stats[Config::kStages][Config::kBlockCols / kStatsQueries];             // travel with q
    Selector selectors[kStatistics];   // here because the last queries' terms 6 and 7 are, which must be finite
    [[no_unique_address]] Maybe<!Config::kIsWide, Dq> dq;
    Block blocks[Config::kStages];   // travel with q
    TileOfHead work[2];   // travels with k and v, in turns: needed until dK has left, when the next is on its way
    uint32_t kv_phase;    // the producer's
    int is_over;          // 1 when there will be no more tiles
    union {
        uint32_t never_written;
        int item;   // that the first thread block of a cluster has drawn for this one
    };
    uint64_t kv_full, kv_empty;
    uint64_t q_full[Config::kStages], q_empty[Config::kStages];
    uint64_t dout_full[Config::kDoutStages], dout_empty[Config::kDoutStages];
    uint64_t dscores_full[Config::kScoreStages], dscores_empty[Config::kScoreStages];
    [[no_unique_address]] Maybe<Config::kSharesDq, PeerBarriers> peer_barriers;
    [[no_unique_address]] Maybe<(Config::kCtas > 1), ClusterBarriers> cluster;
};

// 0 is __syncthreads. Nobody reads dS of a tile any more, nor what else others have left for it; what the warps of dQ
// have added, where additions have an order, is there.
enum NamedBarrier : uint32_t { kScoresAreRead = 1, kFactorsAreThere, kFactorsAreTaken, kAdditionsHaveArrived };

// Whether this is the lane that does what one lane of a warp does; all of them ask.
template <class Config>
__device__ __forceinline__ bool is_chosen(int lane) {
    return Config::kElects ? elect_one() : lane == 0;
}

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& smem) {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    constexpr int kReadersOfDscores = Config::kDqWarps + (Config::kHasDscoresOfDkInShared ? kConsumerWarps / 2 : 0);
    mbarrier_init(smem.kv_full, 1);
    mbarrier_init(smem.kv_empty, kConsumerWarps + Config::kDqWarps);
    for (int i = 0; i < Config::kStages; ++i) {
        mbarrier_init(smem.q_full[i], 1);
        mbarrier_init(smem.q_empty[i], Config::kCtas * kConsumerWarps + Config::kDqWarps);
        if (i < Config::kDoutStages) {
            mbarrier_init(smem.dout_full[i], 1);
            mbarrier_init(smem.dout_empty[i], Config::kCtas * kConsumerWarps);
        }
    }
    for (int i = 0; i < Config::kScoreStages; ++i) {
        mbarrier_init(smem.dscores_full[i], Config::kIsWide ? kConsumerWarps / 2 : kConsumerWarps);
        mbarrier_init(smem.dscores_empty[i], kReadersOfDscores);
    }
    if constexpr (Config::kSharesDq) {
        for (int i = 0; i < Config::kScoreStages; ++i) {
            mbarrier_init(smem.peer_barriers.received[i], 1);
            mbarrier_arrive_expect_tx(smem.peer_barriers.received[i], sizeof(smem.peer.dscores[0]));
            mbarrier_init(smem.peer_barriers.taken[i], Config::kDqWarps);
        }
    }
    if constexpr (Config::kCtas > 1) {
        mbarrier_init(smem.cluster.item_full, 1);
        mbarrier_init(smem.cluster.item_empty, 1);
    }
    smem.kv_phase = 0;
    smem.is_over = 0;
    fence_mbarrier_init();
}

// By all threads: terms that do not count are read as well, before they are there, and must be finite.
template <class Config>
__device__ __forceinline__ void init_stats(SharedStorage<Config>& smem) {
    uint16_t* const terms = smem.stats[0][0].terms[0];
    constexpr int kCount = sizeof(smem.stats) / sizeof(uint16_t);
    for (int i = threadIdx.x; i < kCount; i += Config::kThreads) {
        terms[i] = 0;
    }
    constexpr int kElements = sizeof(Selector) / sizeof(uint16_t);
    if (threadIdx.x < kElements) {
        fill(smem.selectors[0], threadIdx.x, Statistic::kOfScores);
        fill(smem.selectors[1], threadIdx.x, Statistic::kOfDprobs);
    }
    fence_proxy_async_shared();
}

}   // namespace ffa::backward
