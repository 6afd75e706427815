// The backward pass: dk and dv of one tile of keys at a time, and its share of dq.
//
// A persistent thread block works on one (k tile, kv head) after another, or on a part of the query heads of the group
// where few tiles hold much of the work. For all these heads and all runs of the tile, one producer thread streams blocks of Q and dO into shared memory; two consumer warpgroups own 64
// keys each. Scores are transposed, keys by queries, so that P^T and dS^T are already operands of dV += P^T dO and
// dK += dS^T Q, whose sums never leave the registers until the tile is done. dS also goes through shared memory for
// dQ = dS K, which the warpgroups compute in turn, one block of queries each, and add to a sum in global memory: 128
// columns of dQ in one matmul read dS once, where half of them in each warpgroup would read it twice.
//
// A block of a warpgroup, what is in flight above what is done meanwhile (" is the next block); with dQ, and without:
//
//     dV      | dQ, dK  | dK, S" | dP"                 dV         | S", dK | dK, dP"
//     wait    |         | add dQ | exponentials"       announce   |        | exponentials"
//
// then dS" = P" (dP" - delta), which is stored. The other warpgroup's matmuls fill the gaps. A warp's memory operations
// queue up behind the matmuls that it has issued: what can be read or stored is, in front of them.
#pragma once

#include "bwd_split.cuh"
#include "bwd_walk.cuh"
#include "dq_accumulator.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "scheduler.cuh"

namespace ffa {

struct BackwardParams {
    TensorMap q;       // [nheads_q, total_q, head_dim], boxes of block_cols rows x 64 columns
    TensorMap dout;    // [nheads_q, total_q, head_dim], likewise
    TensorMap k;       // [nheads_kv, total_k, head_dim], boxes of 128 rows x 64 columns
    TensorMap v;       // [nheads_kv, total_k, head_dim], likewise
    TensorMap stats;   // [nheads_q, 2, total_q], fp32: lse in base 2, delta; boxes of 2 x block_cols
    TensorMap dk;      // [nheads_kv, total_k, head_dim], boxes of 16 rows x 64 columns
    TensorMap dv;      // [nheads_kv, total_k, head_dim], likewise
    void* dk_rows;     // [total_k, nheads_kv, head_dim], contiguous
    void* dv_rows;     // [total_k, nheads_kv, head_dim], contiguous
    DqSum dq;
    const Run* runs;   // [num_runs], rows are keys
    DqOrder order;     // where additions to dq have one
    Schedule schedule;
    int qhead_per_kvhead;
    float scale_log2;      // softmax_scale * log2(e), or softcap * log2(e) where scores are capped
    float cap_scale;       // softmax_scale / softcap where scores are capped
    float softmax_scale;
    Split split;
};

static_assert(sizeof(BackwardParams) == 1024, "packed by magi_compile/kernels/cuda/backward.py");

template <class Element_, int kHeadDim_, int kBlockCols_, int kStages_, int kProducerRegisters_,
          int kConsumerRegisters_, bool kHasSoftcap_, bool kIsDeterministic_>
struct BackwardConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockCols = kBlockCols_;
    static constexpr int kStages = kStages_;
    static constexpr int kProducerRegisters = kProducerRegisters_;
    static constexpr int kConsumerRegisters = kConsumerRegisters_;
    static constexpr bool kHasSoftcap = kHasSoftcap_;
    static constexpr bool kIsDeterministic = kIsDeterministic_;   // dq is summed up in one order

    static constexpr int kWarpgroup = 128;
    static constexpr int kConsumers = 2;
    static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
    static constexpr int kRows = 64;   // keys of a warpgroup
    static constexpr int kTileRows = kConsumers * kRows;
    static constexpr int kWarpRows = 16;
    static constexpr int kSlabCols = 64;   // 128 bytes, the width of a swizzled row
    static constexpr int kSlabs = (kHeadDim + kSlabCols - 1) / kSlabCols;
    static constexpr int kKSlab = kTileRows * kSlabCols;    // elements
    static constexpr int kQSlab = kBlockCols * kSlabCols;   // elements
    // dS of block j is written while the other warpgroup may still multiply that of block j - 1.
    static constexpr int kScoreStages = 2;

    static_assert(sizeof(Element) == 2, "bf16 or fp16");
    static_assert(kHeadDim % 32 == 0 && kHeadDim <= 128, "dk and dv are sums in registers");
    static_assert(kBlockCols == kSlabCols, "a block of dS is one slab wide, and one wgmma of dQ high");
    static_assert(kBlockAlignment % kDqGroupRows == 0, "dQ is added by whole groups of rows");
    static_assert(kStages >= 2, "Q of this and of the next block are in use at a time");
};

// What the producer says about a block of queries.
struct alignas(16) Block {
    Run run;   // only where some key of the tile may not see every query
    int first;
    int end;   // queries from here on are no part of the run
    int head;
    uint32_t is_masked;
};

struct TileOfHead {
    Tile tile;
    int kv_head;
    int tile_index;
    bool is_ascending;   // the walk starts with the first queries
    int num_visits;      // blocks of queries, over all query heads
    int num_qheads;      // of the group, from `qhead` on
    int qhead;
    int part;            // of so many as the tile is divided into
    int num_parts;
    int store_end;       // keys from here on are not stored: all of them, but by the last part

    __device__ __forceinline__ bool is_short(int rows) const { return tile.row_end - tile.row_begin < rows; }

    static constexpr int kNoMoreWork = -1;   // as num_visits
};

template <class Config>
struct Stats {
    float lse_log2[Config::kBlockCols];
    float delta[Config::kBlockCols];
};

template <class Config>
struct alignas(1024) SharedStorage {
    using Element = typename Config::Element;

    Element k[Config::kSlabs][Config::kKSlab];   // dK leaves from here
    Element v[Config::kSlabs][Config::kKSlab];   // dV leaves from here
    Element q[Config::kStages][Config::kSlabs][Config::kQSlab];
    Element dout[Config::kStages][Config::kSlabs][Config::kQSlab];
    Element dscores[Config::kScoreStages][Config::kKSlab];   // dS^T, keys x queries
    float dq[4][Config::kWarpRows * Config::kHeadDim];   // on the way out, a part for each warp of the two in turn
    Stats<Config> stats[Config::kStages];   // travel with q
    Block blocks[Config::kStages];          // travel with q
    TileOfHead work;                         // travels with k and v
    uint32_t kv_phase;   // the producer's
    uint32_t never_written;
    uint64_t kv_full, kv_empty;
    uint64_t q_full[Config::kStages], q_empty[Config::kStages];
    uint64_t dout_full[Config::kStages], dout_empty[Config::kStages];   // the same slot as q
};

// 0 is __syncthreads; scores are ready in one of two stages.
enum NamedBarrier : uint32_t { kConsumersMeet = 1, kScoresReady = 2 };

// One thread that keeps the rings full.
template <class Config>
class Producer {
public:
    __device__ __forceinline__ Producer(const BackwardParams& params, SharedStorage<Config>& smem)
        : params_(params), smem_(smem) {}

    __device__ __forceinline__ void run() {
        Scheduler<SplitExtra> scheduler(params_.schedule, {params_.split});
        for (; scheduler.has_work(); scheduler.advance()) {
            const WorkItem item = scheduler.item();
            const Tile& tile = params_.schedule.tiles[split_entry(params_.split, item.tile).tile];
            if (tile.row_begin < tile.row_end) {
                load_tile(item);
            } else {
                scheduler.leave_section();
            }
        }
        mbarrier_wait(smem_.kv_empty, smem_.kv_phase ^ 1);
        smem_.work.num_visits = TileOfHead::kNoMoreWork;
        mbarrier_arrive(smem_.kv_full);
    }

private:
    // Every other wave of tiles.
    __device__ __forceinline__ bool is_ascending(const WorkItem& item) const {
        const Schedule& schedule = params_.schedule;
        const uint32_t in_section =
            item.tile * schedule.heads_per_section + item.head % uint32_t(schedule.heads_per_section);
        return !Config::kIsDeterministic && (in_section / gridDim.x & 1);
    }

    // What describes the tile and the run is read again for each block, because this thread has few registers.
    __device__ __forceinline__ void load_tile(const WorkItem& item) {
        TileOfHead& work = smem_.work;
        const int num_blocks = count_blocks(item);
        mbarrier_wait(smem_.kv_empty, smem_.kv_phase ^ 1);
        const SplitEntry entry = split_entry(params_.split, item.tile);
        work.tile = params_.schedule.tiles[entry.tile];
        work.tile_index = entry.tile;
        work.part = entry.part;
        work.num_parts = entry.num_parts;
        work.store_end = entry.part + 1 == entry.num_parts ? work.tile.row_end : work.tile.row_begin;
        work.is_ascending = is_ascending(item);
        work.kv_head = item.head;
        work.num_qheads = params_.qhead_per_kvhead / work.num_parts;
        work.qhead = work.kv_head * params_.qhead_per_kvhead + work.part * work.num_qheads;
        work.num_visits = num_blocks * work.num_qheads;
        if (work.num_visits == 0) {
            mbarrier_arrive(smem_.kv_full);
        } else {
            mbarrier_arrive_expect_tx(smem_.kv_full, sizeof(smem_.k) + sizeof(smem_.v));
            load(smem_.k, params_.k, smem_.kv_full, work.tile.row_begin, work.kv_head);
            load(smem_.v, params_.v, smem_.kv_full, work.tile.row_begin, work.kv_head);
        }
        smem_.kv_phase ^= 1;
        for (int i = work.tile.run_end - work.tile.run_begin; i-- > 0;) {
            const Run& run = params_.runs[work.is_ascending ? work.tile.run_end - 1 - i : work.tile.run_begin + i];
            load_run(run);
        }
    }

    __device__ __forceinline__ int count_blocks(const WorkItem& item) const {
        const Tile& tile = params_.schedule.tiles[split_entry(params_.split, item.tile).tile];
        return blocks_of_tile<Config::kBlockCols>(tile, params_.runs);
    }

    __device__ __forceinline__ void load_run(const Run& run) {
        const RunWalk<Config::kBlockCols> walk{run, smem_.work.num_qheads, smem_.work.is_ascending};
        for (int left = walk.num_visits(); left-- > 0;) {
            const Visit visit = walk.visit(left);
            // Keys past the end of a short tile belong to others: the mask hides them.
            const bool is_masked = smem_.work.is_short(Config::kTileRows) || walk.is_masked(visit.col);
            load_block(run, visit, is_masked);
        }
    }

    __device__ __forceinline__ void load_block(const Run& run, const Visit& visit, bool is_masked) {
        uint64_t& q_full = smem_.q_full[block_.slot];
        Block& block = smem_.blocks[block_.slot];
        mbarrier_wait(smem_.q_empty[block_.slot], block_.phase ^ 1);
        block.first = visit.col;
        block.end = run.col_end;
        block.head = smem_.work.qhead + visit.group;
        block.is_masked = is_masked;
        const uint32_t run_bytes = is_masked ? sizeof(Run) : 0;
        mbarrier_arrive_expect_tx(q_full, sizeof(smem_.q[0]) + sizeof(smem_.stats[0]) + run_bytes);
        load(smem_.q[block_.slot], params_.q, q_full, visit.col, block.head);
        tma_load_3d(&smem_.stats[block_.slot], params_.stats, q_full, visit.col, 0, block.head);
        if (is_masked) {
            cp_async_bulk_load(&block.run, &run, sizeof(Run), q_full);
        }

        uint64_t& dout_full = smem_.dout_full[block_.slot];
        mbarrier_wait(smem_.dout_empty[block_.slot], block_.phase ^ 1);
        mbarrier_arrive_expect_tx(dout_full, sizeof(smem_.dout[0]));
        load(smem_.dout[block_.slot], params_.dout, dout_full, visit.col, block.head);
        block_.advance();
    }

    template <class Slabs>
    __device__ __forceinline__ void load(Slabs& slabs, const TensorMap& map, uint64_t& full, int row, int head) {
#pragma unroll
        for (int slab = 0; slab < Config::kSlabs; ++slab) {
            tma_load_3d(slabs[slab], map, full, slab * Config::kSlabCols, row, head);
        }
    }

    const BackwardParams& params_;
    SharedStorage<Config>& smem_;
    Position<Config::kStages> block_;
};

// A warpgroup that owns 64 keys of each tile. Its control flow is uniform, and told so that the compiler sees it (all
// lanes vote, single lanes do by predicates what others would branch around): only then do loop counts, barriers and
// operands' descriptors live in uniform registers. Where additions to dq have an order, the wait for a turn diverges.
template <class Config>
class Consumer {
public:
    __device__ __forceinline__ Consumer(const BackwardParams& params, SharedStorage<Config>& smem, int warpgroup)
        : params_(params), smem_(smem), warpgroup_(warpgroup), warp_(threadIdx.x / 32 % 4), lane_(threadIdx.x % 32) {}

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
    using Dq = float[kGrad];

    // lse, in base 2, of the queries of this thread.
    struct Lse {
        float2 of_cols[kScores / 4];
        bool is_masked;   // the block
    };

    // Where the 16 rows of this warp go.
    struct DqRows {
        float* sum;
        int head;
        int first;
        bool are_in_run;
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
            publish_dq();
        }
        const TileOfHead& work = smem_.work;
        if (__any_sync(0xffffffff, work.num_parts > 1)) {
            join_parts(dk, dv, work);
        }
#pragma unroll
        for (int i = 0; i < kGrad; ++i) {
            dk[i] *= params_.softmax_scale;
        }
        barrier_sync(kConsumersMeet, Config::kConsumers * Config::kWarpgroup);   // nobody reads K and V any more
        store(dv, smem_.v[0], params_.dv, params_.dv_rows, work);
        store(dk, smem_.k[0], params_.dk, params_.dk_rows, work);
        if (lane_ == 0) {
            cp_async_bulk_wait_group_read<0>();
        }
        release(smem_.kv_empty);
    }

    __device__ __forceinline__ void walk(Grad& dk, Grad& dv) {
        Operand probs, rounded_dscores;
        start(probs, rounded_dscores);

        // No matmul is in flight where the loop or a branch closes: the compiler moves registers there.
        while (true) {
            const int slot = block_.slot;
            const DqRows rows = rows_of_warp(smem_.blocks[slot]);
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
                add_dq(dq, rows);
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
                leave_dq_buffer();
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
        multiply_rows(scores, smem_.k[0], smem_.q[slot][0]);
    }

    // dP^T = V dO^T
    __device__ __forceinline__ void issue_dprobs(Scores& dprobs) {
        multiply_rows(dprobs, smem_.v[0], smem_.dout[block_.slot][0]);
    }

    __device__ __forceinline__ void multiply_rows(Scores& product, const Element* keys, const Element* queries) {
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
            Wgmma<Element, Config::kBlockCols>::template ss<Major::K, Major::K>(
                product, a + ((slab * kKSlabBytes + within) >> 4), b + ((slab * kQSlabBytes + within) >> 4), step != 0);
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
            apply_mask(scores, block.run, smem_.work.tile.row_begin + row_in_tile() + lane_ / 4,
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

    // ---- results

    // Adds what the parts in front of this one have, each warp for itself, and hands the sums over to the next one.
    __device__ __forceinline__ void join_parts(Grad& dk, Grad& dv, const TileOfHead& work) const {
        const int tile = work.tile_index * params_.schedule.num_heads + work.kv_head;
        const int index = tile * kSplitArrivals + warpgroup_ * 4 + warp_;
        int* const arrivals = params_.split.arrivals + index;
        while (!__all_sync(0xffffffff, load_acquire(arrivals) >= work.part)) {
        }
        float4* const partials = reinterpret_cast<float4*>(params_.split.partials) + index * kPartialsOfWarp + lane_;
        const bool has_partials = work.part > 0;
        join(dv, partials, has_partials);
        join(dk, partials + kPartialsOfWarp / 2, has_partials);
        __threadfence();
        __syncwarp();
        if (lane_ == 0) {
            add_release(arrivals, 1);
        }
    }

    __device__ __forceinline__ static void join(Grad& grad, float4* partials, bool has_partials) {
#pragma unroll
        for (int i = 0; i < kGrad / 4; ++i) {
            const float4 partial = load_if(has_partials, partials + 32 * i);
            grad[4 * i] += partial.x;
            grad[4 * i + 1] += partial.y;
            grad[4 * i + 2] += partial.z;
            grad[4 * i + 3] += partial.w;
            partials[32 * i] = {grad[4 * i], grad[4 * i + 1], grad[4 * i + 2], grad[4 * i + 3]};
        }
    }

    __device__ __forceinline__ void store_dscores(const Operand& dscores) {
        const int row = lane_ % 16;
        const uint32_t address = shared_address(smem_.dscores[dscores_slot_]) + (row_in_tile() + row) * 128;
#pragma unroll
        for (int i = 0; i < kScores / 8; ++i) {
            const int chunk = 2 * i + lane_ / 16;
            stmatrix_x4(address + ((chunk ^ (row % 8)) << 4), dscores[4 * i], dscores[4 * i + 1], dscores[4 * i + 2],
                        dscores[4 * i + 3]);
        }
    }

    __device__ __forceinline__ DqRows rows_of_warp(const Block& block) const {
        const int first = block.first + warp_ * Config::kWarpRows;
        return {dq_rows<Config::kHeadDim>(params_.dq, block.head, first), block.head, first, first < block.end};
    }

    // Through a buffer that each warp shares with one of the other warpgroup, in turn.
    __device__ __forceinline__ void add_dq(const Dq& dq, const DqRows& rows) {
        float* const staging = smem_.dq[warp_];
#pragma unroll
        for (int i = 0; i < kGrad / 4; ++i) {
            *reinterpret_cast<float4*>(staging + 128 * i + 4 * lane_) = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                                                                         dq[4 * i + 3]};
        }
        fence_proxy_async_shared();
        if constexpr (Config::kIsDeterministic) {
            await_turn(rows);
        }
        __syncwarp();
        if (lane_ == 0 && rows.are_in_run) {
            cp_reduce_async_bulk_add(rows.sum, staging, sizeof(smem_.dq[0]));
            cp_async_bulk_commit_group();
        }
    }

    // The other warpgroup writes there next.
    __device__ __forceinline__ void leave_dq_buffer() {
        if constexpr (Config::kIsDeterministic) {
            publish_dq();
        } else if (lane_ == 0) {
            cp_async_bulk_wait_group_read<0>();
        }
        __syncwarp();
    }

    // Until all tiles in front of this one have added what they have for these rows. One lane waits.
    __device__ __forceinline__ void await_turn(const DqRows& rows) {
        const DqOrder& order = params_.order;
        const long long num_groups = params_.dq.row_groups;
        const int group = rows.first / kDqGroupRows;
        visits_ = nullptr;
        if (lane_ == 0 && rows.are_in_run) {
            visits_ = order.visits + rows.head * num_groups + group;
            const int turn = order.turns[smem_.work.tile_index * num_groups + group];
            while (load_acquire(visits_) < turn) {
            }
        }
        fence_proxy_async();
    }

    // Tells the tiles behind this one that the last addition has arrived.
    __device__ __forceinline__ void publish_dq() {
        if (lane_ == 0) {
            cp_async_bulk_wait_group<0>();
        }
        fence_proxy_async();
        __syncwarp();
        if (visits_ != nullptr) {
            add_release(visits_, 1);
            visits_ = nullptr;
        }
    }

    // Registers to shared memory in the 128-byte swizzle of the tensor map, where 16-byte chunk c of row r lies at
    // c ^ (r % 8), and from there to `rows`.
    __device__ __forceinline__ void store(const Grad& grad, Element* tile_rows, const TensorMap& map, void* rows,
                                          const TileOfHead& work) const {
        Element* const staging = tile_rows + row_in_tile() * Config::kSlabCols;
        const int row = lane_ % 16;
        const uint32_t address = shared_address(staging) + row * 128;
#pragma unroll
        for (int i = 0; i < kGrad / 8; ++i) {
            const int slab = i / 4;
            const int chunk = 2 * (i % 4) + lane_ / 16;
            stmatrix_x4(address + slab * kKSlabBytes + ((chunk ^ (row % 8)) << 4),
                        pack<Element>(grad[8 * i], grad[8 * i + 1]), pack<Element>(grad[8 * i + 2], grad[8 * i + 3]),
                        pack<Element>(grad[8 * i + 4], grad[8 * i + 5]),
                        pack<Element>(grad[8 * i + 6], grad[8 * i + 7]));
        }
        const int warp_row = work.tile.row_begin + row_in_tile();
        if (warp_row + Config::kWarpRows <= work.store_end) {
            fence_proxy_async_shared();
            __syncwarp();
            if (lane_ == 0) {
#pragma unroll
                for (int slab = 0; slab < Config::kSlabs; ++slab) {
                    tma_store_3d(map, staging + slab * Config::kKSlab, slab * Config::kSlabCols, warp_row,
                                 work.kv_head);
                }
                cp_async_bulk_commit_group();
            }
        } else {
            __syncwarp();
            store_rows(staging, warp_row, rows, work);
        }
    }

    __device__ __forceinline__ void store_rows(const Element* staging, int warp_row, void* rows,
                                               const TileOfHead& work) const {
        constexpr int kChunks = Config::kHeadDim / 8;
        const int4* const chunks = reinterpret_cast<const int4*>(staging);
        for (int i = lane_; i < Config::kWarpRows * kChunks; i += 32) {
            const int row = i / kChunks;
            const int chunk = i % kChunks;
            if (warp_row + row < work.store_end) {
                const long long index =
                    static_cast<long long>(warp_row + row) * params_.schedule.num_heads + work.kv_head;
                static_cast<int4*>(rows)[index * kChunks + chunk] =
                    chunks[chunk / 8 * (kKSlabBytes / 16) + row * 8 + (chunk % 8 ^ row % 8)];
            }
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

    __device__ __forceinline__ int row_in_tile() const {
        return warpgroup_ * Config::kRows + warp_ * Config::kWarpRows;
    }

    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);
    static constexpr int kQSlabBytes = Config::kQSlab * sizeof(Element);
    static constexpr int kSixteenRowsBytes = 16 * 128;
    static constexpr int kPartialsOfWarp = 2 * kGrad / 4 * 32;   // float4

    const BackwardParams& params_;
    SharedStorage<Config>& smem_;
    const int warpgroup_;
    const int warp_;
    const int lane_;
    Position<1> kv_;
    Position<Config::kStages> block_;
    int left_ = 0;   // blocks of the tile
    int dscores_slot_ = 0;
    int* visits_ = nullptr;   // of the rows that this lane has waited for, where additions to dq have an order
};

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& smem) {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    mbarrier_init(smem.kv_full, 1);
    mbarrier_init(smem.kv_empty, kConsumerWarps);
    for (int i = 0; i < Config::kStages; ++i) {
        mbarrier_init(smem.q_full[i], 1);
        mbarrier_init(smem.q_empty[i], kConsumerWarps);
        mbarrier_init(smem.dout_full[i], 1);
        mbarrier_init(smem.dout_empty[i], kConsumerWarps);
    }
    smem.kv_phase = 0;
    fence_mbarrier_init();
}

template <class Config>
__device__ __forceinline__ void backward(const BackwardParams& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(SharedStorage<Config>) <= kMaxSharedBytes, "the buffers do not fit in shared memory");
    auto& smem = *reinterpret_cast<SharedStorage<Config>*>(memory);
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / Config::kWarpgroup, 0);
    if (threadIdx.x == 0) {
        init_barriers(smem);
    }
    __syncthreads();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (warpgroup == Config::kConsumers) {
        setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == Config::kConsumers * Config::kWarpgroup) {
            Producer<Config>(params, smem).run();
        }
    } else {
        setmaxnreg_inc<Config::kConsumerRegisters>();
        Consumer<Config>(params, smem, warpgroup).run();
    }
}

}  // namespace ffa
