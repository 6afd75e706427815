// The forward pass: out = softmax(q k^T) v over the runs of a plan, and the log-sum-exp of each row.
//
// A persistent thread block works on one (q tile, head) after another. In one warpgroup, a thread hands out the tiles
// with their Q, and a thread streams K and V into shared memory with TMA and says, block by block, what is to be seen.
// The consumer warpgroups own 64 rows each and keep scores, probabilities and output in registers. Softmax of block j
// overlaps with P V of block j - 1 in the same warpgroup, and with the matmuls of the other warpgroups. The stream of
// blocks does not stop at the borders of runs, and a warpgroup masks only the blocks that hide something from it.
//
// What a tile sees of only some of its keys is a part, and leaves in fp32. Two launches may share the keys of a tile: the
// second one merges the part of the first with the rest. Or a launch walks all parts of a tile, and the kernel behind it
// (fwd_merge.cu) merges them.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace ffa {

struct ForwardParams {
    TensorMap q;       // [nheads_q, total_q, head_dim], boxes of tile rows x 64 columns
    TensorMap k[2];    // [nheads_kv, total_k, head_dim], boxes of block_cols rows x 64 columns: near and far keys
    TensorMap v[2];    // [nheads_kv, total_k, head_dim], likewise
    TensorMap out;     // [nheads_q, total_q, head_dim], boxes of 16 rows x 64 columns
    void* out_rows;    // [total_q, nheads_q, head_dim], contiguous
    float* lse;        // [nheads_q, total_q]
    float* wide_out;   // fp32 [rows, nheads_q, head_dim], contiguous: instead of `out_rows`, for parts; or null
    float* wide_lse;   // [nheads_q, wide_rows]
    const float* prior_out;   // attention over other keys, to be merged with parts: as `wide_out`; or null
    const float* prior_lse;   // as `wide_lse`
    long long wide_rows;      // a head has in `wide_lse` or `prior_lse`
    const Run* runs;   // [num_runs]
    const int* part_shifts;   // [num_tiles]: rows from a part's own row to its row in `wide_out` or `prior_out`, kNotAPart
                              // for the other tiles; null where all are parts that lie at their own rows
    Schedule schedule;
    int total_q;
    int qhead_per_kvhead;
    int far_begin;      // columns from here on are far keys
    float scale_log2;   // softmax_scale * log2(e), or softcap * log2(e) where scores are capped
    float cap_scale;    // softmax_scale / softcap where scores are capped
};

static_assert(sizeof(ForwardParams) == 896, "packed by magi_compile/kernels/cuda/forward.py");

template <class Element_, int kHeadDim_, int kBlockCols_, int kKStages_, int kVStages_, int kQBuffers_,
          int kConsumers_, int kProducerRegisters_, int kConsumerRegisters_, bool kHasSoftcap_>
struct ForwardConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockCols = kBlockCols_;
    static constexpr int kKStages = kKStages_;
    static constexpr int kVStages = kVStages_;
    static constexpr int kQBuffers = kQBuffers_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kProducerRegisters = kProducerRegisters_;
    static constexpr int kConsumerRegisters = kConsumerRegisters_;
    static constexpr bool kHasSoftcap = kHasSoftcap_;

    static constexpr int kWarpgroup = 128;
    static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
    static constexpr int kRows = 64;   // of a warpgroup
    static constexpr int kWarpRows = 16;
    static constexpr int kSlabCols = 64;   // 128 bytes, the width of a swizzled row
    static constexpr int kSlabs = (kHeadDim + kSlabCols - 1) / kSlabCols;
    static constexpr int kQSlab = kConsumers * kRows * kSlabCols;   // elements
    static constexpr int kKSlab = kBlockCols * kSlabCols;           // elements

    static_assert(kQBuffers == 1 || kQBuffers == 2, "one Q in work, one on its way");
    static_assert(sizeof(Element) == 2, "bf16 or fp16");
    static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256, "wgmma holds up to 256 output columns");
    static_assert(kBlockCols % 16 == 0, "P V takes 16 columns a step");
    static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup <= 65536, "one register file");
};

// What the producer says about a block of K.
struct alignas(16) Block {
    Run run;   // only at an edge of the run, where a row may not see every column
    int first;
    uint32_t is_edge;
};

struct TileOfHead {
    int row_begin, row_end, head;
    int num_blocks;

    static constexpr int kNoMoreWork = -1;   // as num_blocks
};

// What the producer is to load K and V for.
struct alignas(16) RunsOfHead {
    int begin, end, kv_head;
    int unused;   // made from the first run, which reading it has brought to the L1 cache

    static constexpr int kNoMoreWork = -1;   // as begin
};

template <class Config>
struct alignas(1024) SharedStorage {
    using Element = typename Config::Element;

    Element q[Config::kQBuffers][Config::kSlabs][Config::kQSlab];   // of tiles in turns; O leaves from its Q's
    Element k[Config::kKStages][Config::kSlabs][Config::kKSlab];
    Element v[Config::kVStages][Config::kSlabs][Config::kKSlab];
    Block blocks[Config::kKStages];   // travel with k
    TileOfHead tiles[Config::kQBuffers];   // travel with q
    RunsOfHead runs;
    uint64_t runs_full, runs_empty;
    uint64_t q_full, q_empty;
    uint64_t k_full[Config::kKStages], k_empty[Config::kKStages];
    uint64_t v_full[Config::kVStages], v_empty[Config::kVStages];
    int part_shifts[Config::kQBuffers];   // travel with q
};

constexpr uint32_t kWarpgroupDone = 1;   // a named barrier for each consumer warpgroup; 0 is __syncthreads

template <class Config, class Slabs>
__device__ __forceinline__ void load_slabs(Slabs& slabs, const TensorMap& map, uint64_t& full, int row, int head) {
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
        tma_load_3d(slabs[slab], map, full, slab * Config::kSlabCols, row, head);
    }
}

// One thread that hands out the tiles: it loads the Q of each, and tells consumers and producer about it. It finds the
// next one while the producer is at the last blocks of this one, because ticket, tile and runs are three trips to the
// L2 cache, one after the other, and Q is one to DRAM.
template <class Config>
class Dispatcher {
public:
    __device__ __forceinline__ Dispatcher(const ForwardParams& params, SharedStorage<Config>& smem)
        : params_(params), smem_(smem) {}

    __device__ __forceinline__ void run() {
        for (Scheduler scheduler(params_.schedule); scheduler.has_work(); scheduler.advance()) {
            const WorkItem item = scheduler.item();
            const Tile tile = params_.schedule.tiles[item.tile];
            if (tile.row_begin == tile.row_end) {
                scheduler.leave_section();
                continue;
            }
            const bool is_empty = tile.run_begin == tile.run_end;
            if (!is_empty) {
                tell_producer(tile, item.head);
            }
            const int part_shift = params_.part_shifts ? params_.part_shifts[item.tile] : 0;
            tell_consumers({tile.row_begin, tile.row_end, item.head, count_blocks(tile)}, part_shift);
            if (!is_empty) {
                mbarrier_wait(smem_.runs_empty, runs_phase_);
                runs_phase_ ^= 1;
            }
        }
        smem_.runs.begin = RunsOfHead::kNoMoreWork;
        mbarrier_arrive(smem_.runs_full);
        tell_consumers({0, 0, 0, TileOfHead::kNoMoreWork}, kNotAPart);
    }

private:
    __device__ __forceinline__ int count_blocks(const Tile& tile) const {
        int sum = 0;
#pragma unroll 8
        for (int i = tile.run_begin; i < tile.run_end; ++i) {
            sum += params_.runs[i].num_blocks;
        }
        return sum;
    }

    __device__ __forceinline__ void tell_producer(const Tile& tile, int head) {
        const Run& first = params_.runs[tile.run_begin];
        smem_.runs = {tile.run_begin, tile.run_end, head / params_.qhead_per_kvhead, first.num_blocks + first.num_lead};
        mbarrier_arrive(smem_.runs_full);
    }

    __device__ __forceinline__ void tell_consumers(const TileOfHead& tile, int part_shift) {
        const int buffer = q_phase_ % Config::kQBuffers;
        mbarrier_wait(smem_.q_empty, q_phase_ ^ 1);
        smem_.tiles[buffer] = tile;
        smem_.part_shifts[buffer] = part_shift;
        if (tile.num_blocks <= 0) {
            mbarrier_arrive(smem_.q_full);
        } else {
            mbarrier_arrive_expect_tx(smem_.q_full, sizeof(smem_.q[0]));
            load_slabs<Config>(smem_.q[buffer], params_.q, smem_.q_full, tile.row_begin, tile.head);
        }
        q_phase_ ^= 1;
    }

    const ForwardParams& params_;
    SharedStorage<Config>& smem_;
    uint32_t q_phase_ = 0;
    uint32_t runs_phase_ = 0;
};

// One thread that keeps the rings of K and V full.
template <class Config>
class Producer {
public:
    __device__ __forceinline__ Producer(const ForwardParams& params, SharedStorage<Config>& smem)
        : params_(params), smem_(smem) {}

    __device__ __forceinline__ void run() {
        for (uint32_t phase = 0;; phase ^= 1) {
            mbarrier_wait(smem_.runs_full, phase);
            const int begin = smem_.runs.begin;
            if (begin == RunsOfHead::kNoMoreWork) {
                break;
            }
            load_runs(begin, smem_.runs.end, smem_.runs.kv_head);
        }
    }

private:
    // V of a block is asked for after K of the next one, in the order in which their buffers come free.
    __device__ __forceinline__ void load_runs(int begin, int end, int kv_head) {
        int previous_col = kNoColumn;
        for (int r = begin; r < end; ++r) {
            const Run& run = params_.runs[r];
            const bool is_last_run = r + 1 == end;
            const int num_blocks = run.num_blocks;
            const int middle_begin = run.num_lead;
            const int middle_end = num_blocks - run.num_trail;
            int col = run.first;
            for (int j = 0; j < num_blocks; ++j) {
                const bool is_edge = j < middle_begin || j >= middle_end;
                if (is_last_run && j == max(num_blocks - kBlocksAhead, 0)) {
                    mbarrier_arrive(smem_.runs_empty);
                }
                load_k(col, kv_head, is_edge ? &run : nullptr);
                if (previous_col != kNoColumn) {
                    load_v(previous_col, kv_head);
                }
                previous_col = col;
                col += Config::kBlockCols;
            }
        }
        load_v(previous_col, kv_head);
    }

    // `edge` is the run whose edge the block lies on, if it does; it travels with the block.
    __device__ __forceinline__ void load_k(int col, int head, const Run* edge) {
        uint64_t& full = smem_.k_full[k_.slot];
        Block& block = smem_.blocks[k_.slot];
        mbarrier_wait(smem_.k_empty[k_.slot], k_.phase ^ 1);
        block.first = col;
        block.is_edge = edge != nullptr;
        mbarrier_arrive_expect_tx(full, sizeof(smem_.k[0]) + (edge ? sizeof(Run) : 0));
        if (edge) {
            cp_async_bulk_load(&block.run, edge, sizeof(Run), full);
        }
        load_slabs<Config>(smem_.k[k_.slot], params_.k[is_far(col)], full, row_of(col), head);
        k_.advance();
    }

    __device__ __forceinline__ void load_v(int col, int head) {
        uint64_t& full = smem_.v_full[v_.slot];
        mbarrier_wait(smem_.v_empty[v_.slot], v_.phase ^ 1);
        mbarrier_arrive_expect_tx(full, sizeof(smem_.v[0]));
        load_slabs<Config>(smem_.v[v_.slot], params_.v[is_far(col)], full, row_of(col), head);
        v_.advance();
    }

    // Far keys lie in memory of their own; no run reaches from near ones into them.
    __device__ __forceinline__ bool is_far(int col) const { return col >= params_.far_begin; }

    __device__ __forceinline__ int row_of(int col) const { return is_far(col) ? col - params_.far_begin : col; }

    static constexpr int kBlocksAhead = 2;   // of the end of a tile, when the next one is asked for
    static constexpr int kNoColumn = -1;

    const ForwardParams& params_;
    SharedStorage<Config>& smem_;
    Position<Config::kKStages> k_;
    Position<Config::kVStages> v_;
};

// A warpgroup that owns 64 rows of each tile. Its control flow is uniform, and told so that the compiler sees it: lanes
// vote, what a single lane does is predicated, and the loop over blocks ends by a count. Descriptors, slots and phases then
// live in uniform registers.
template <class Config>
class Consumer {
public:
    __device__ __forceinline__ Consumer(const ForwardParams& params, SharedStorage<Config>& smem, int warpgroup)
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
    static constexpr int kFirstScores = kScores / 16 * 8;   // the first half, in whole steps of P V
    static constexpr int kOut = Config::kHeadDim / 2;
    using Scores = float[kScores];
    using Probs = uint32_t[kScores / 2];
    using Out = float[kOut];

    __device__ __forceinline__ void attend(const TileOfHead& tile) {
        Scores scores;
        Probs probs;
        Out out;
        OnlineSoftmax softmax(params_.scale_log2);
#pragma unroll
        for (int i = 0; i < kOut; ++i) {
            out[i] = 0.f;
        }

        if (!__any_sync(0xffffffff, tile.row_begin + warpgroup_ * Config::kRows < tile.row_end)) {
            while (next_block(tile) != kEnd) {
                skip_block();
            }
        }
        Visibility sees = next_block(tile);
        if constexpr (Config::kQBuffers == 2) {
            release_q();   // of the previous tile
        }
        while (sees != kEnd) {
            if (sees == kNothing) {
                skip_block();
                sees = next_block(tile);
                continue;
            }

            // The first block of a stretch that this warpgroup sees: there is no P V to overlap with.
            const uint32_t q = uniform(q_operand());
            const uint32_t k = k_operand();
            issue_scores(scores, q, k);
            Visibility next = next_block(tile);
            wgmma_wait_group<0>();
            pin(scores);
            cap_and_mask(scores, sees, tile);
            release_k();
            bool is_v_there = test_v();
            float sum[2];
            soften(scores, probs, sum, out, softmax);
            softmax.add(sum);
            sees = next;

            while (sees == kPart || sees == kAll) {
                wait_for_v(is_v_there);
                const uint32_t k = k_operand();
                const uint32_t v = v_operand();
                issue_scores(scores, q, k);
                issue_out(out, probs, v);
                next = next_block(tile);   // while the scores are on their way
                wgmma_wait_group<2>();
                pin(scores);
                cap_and_mask(scores, sees, tile);
                float sum[2] = {0.f, 0.f};
                wgmma_wait_group<1>();
                softmax.exponentiate<Element, 0, kFirstScores>(scores, probs, sum);
                // The assembler moves a wait up to the last memory operation in front of it: this one, which seems to
                // depend on the exponentials, keeps them in front of the wait and beside the rest of P V.
                release_k(zero_after(sum[0]) | zero_after(sum[1]));
                wgmma_wait_group<0>();
                pin(out);
                release_v();
                is_v_there = test_v();
                softmax.exponentiate<Element, kFirstScores, kScores>(scores, probs, sum);
                if (softmax.has_unseen_rows() || !softmax.fits(sum)) {
                    soften(scores, probs, sum, out, softmax);
                }
                softmax.add(sum);
                sees = next;
            }

            wait_for_v(is_v_there);
            issue_out(out, probs, v_operand());
            wgmma_wait_group<0>();
            pin(out);
            release_v();
        }

        float normalize[2], lse[2];
        softmax.finish(normalize, lse);
        const bool is_part = __any_sync(0xffffffff, part_shift() != kNotAPart);
        if (params_.prior_lse != nullptr && is_part) {
            float keep[2];
            weigh(normalize, keep, lse, tile);
            scale_rows(out, normalize);
            add_prior(out, keep, tile);
        } else {
            scale_rows(out, normalize);
        }
        const bool is_wide = params_.wide_out != nullptr && is_part;
        if (is_wide) {
            store_wide(out, tile);
        } else {
            store(out, tile);
        }
        store_lse(lse, is_wide, tile);
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
        constexpr int kStepsPerSlab = Config::kSlabCols / 16;
        constexpr int kStepBytes = 32;
        pin(scores);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            const int slab = step / kStepsPerSlab;
            const int within = step % kStepsPerSlab * kStepBytes;
            Wgmma<Element, Config::kBlockCols>::template ss<Major::K, Major::K>(
                scores, q + ((slab * kQSlabBytes + within) >> 4), k + ((slab * kKSlabBytes + within) >> 4), step != 0);
        }
        wgmma_commit_group();
    }

    // In two groups, for the two halves of the columns of P: a half of `probs` is free when its group has ended.
    __device__ __forceinline__ void issue_out(Out& out, const Probs& probs, uint32_t v) {
        constexpr int kStepBytes = 16 * 128;
        pin(out);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kBlockCols / 16; ++step) {
            Wgmma<Element, Config::kHeadDim>::template rs<Major::MN>(out, probs + 4 * step,
                                                                     v + ((step * kStepBytes) >> 4), 1);
            if (step + 1 == kFirstScores / 8) {
                wgmma_commit_group();
            }
        }
        wgmma_commit_group();
    }

    // ---- scores to probabilities

    __device__ __forceinline__ void cap_and_mask(Scores& scores, Visibility sees, const TileOfHead& tile) {
        if constexpr (Config::kHasSoftcap) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                scores[i] = tanh_approx(scores[i] * params_.cap_scale);
            }
        }
        if (sees == kPart) {
            const Block& block = smem_.blocks[scored_.slot];
            apply_mask(scores, block.run, first_row(tile), block.first + 2 * (lane_ % 4));
        }
    }

    // The probabilities of a block that moves the reference of the softmax.
    __device__ __forceinline__ static void soften(const Scores& scores, Probs& probs, float (&sum)[2], Out& out,
                                                  OnlineSoftmax& softmax) {
        float rescale[2];
        softmax.move_reference(scores, rescale);
        scale_rows(out, rescale);
        sum[0] = sum[1] = 0.f;
        softmax.exponentiate<Element, 0, kScores>(scores, probs, sum);
    }

    __device__ __forceinline__ static void scale_rows(Out& out, const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) {
            out[i] *= factor[i / 2 % 2];
        }
    }

    // ---- the result

    // How much this output and the prior one weigh in each row; `lse` becomes that of both.
    __device__ __forceinline__ void weigh(float (&normalize)[2], float (&keep)[2], float (&lse)[2],
                                          const TileOfHead& tile) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row(tile) + 8 * half;
            const float prior = row < tile.row_end ? params_.prior_lse[wide_lse_offset(tile) + row] : -kInfinity;
            const float peak = fmaxf(prior, lse[half]);
            const float reference = peak == -kInfinity ? 0.f : peak;
            const float own = __expf(lse[half] - reference);
            const float other = __expf(prior - reference);
            const float total = own + other;
            const float scale = total == 0.f ? 0.f : 1.f / total;
            normalize[half] *= own * scale;
            keep[half] = other * scale;
            lse[half] = reference + __logf(total);
        }
    }

    __device__ __forceinline__ void add_prior(Out& out, const float (&keep)[2], const TileOfHead& tile) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row(tile) + 8 * half;
            if (row < tile.row_end) {
                const float2* const prior = reinterpret_cast<const float2*>(params_.prior_out + wide_offset(tile, row));
#pragma unroll
                for (int i = 0; i < kOut / 4; ++i) {
                    const float2 pair = prior[4 * i];
                    out[4 * i + 2 * half] += keep[half] * pair.x;
                    out[4 * i + 2 * half + 1] += keep[half] * pair.y;
                }
            }
        }
    }

    // A quad writes 32 bytes of a row at a time.
    __device__ __forceinline__ void store_wide(const Out& out, const TileOfHead& tile) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row(tile) + 8 * half;
            if (row < tile.row_end) {
                float2* const out_row = reinterpret_cast<float2*>(params_.wide_out + wide_offset(tile, row));
#pragma unroll
                for (int i = 0; i < kOut / 4; ++i) {
                    out_row[4 * i] = make_float2(out[4 * i + 2 * half], out[4 * i + 2 * half + 1]);
                }
            }
        }
    }

    __device__ __forceinline__ void store_lse(const float (&lse)[2], bool is_wide, const TileOfHead& tile) const {
        float* const all = is_wide ? params_.wide_lse : params_.lse;
        const long long at = is_wide ? wide_lse_offset(tile) : tile.head * static_cast<long long>(params_.total_q);
        if (lane_ % 4 == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row(tile) + 8 * half;
                if (row < tile.row_end) {
                    all[at + row] = lse[half];
                }
            }
        }
    }

    __device__ __forceinline__ int part_shift() const { return smem_.part_shifts[q_phase_ % Config::kQBuffers]; }

    // From where a row is counted in `wide_lse` or `prior_lse`.
    __device__ __forceinline__ long long wide_lse_offset(const TileOfHead& tile) const {
        return tile.head * params_.wide_rows + part_shift();
    }

    // Of this thread's first two columns in a row of `wide_out`.
    __device__ __forceinline__ long long wide_offset(const TileOfHead& tile, int row) const {
        const long long wide_row = row + part_shift();
        return (wide_row * params_.schedule.num_heads + tile.head) * Config::kHeadDim + 2 * (lane_ % 4);
    }

    // Each warp stores its own 16 rows: with TMA where all of them belong to the tile, else row by row, because the
    // rows behind the tile are another's.
    __device__ __forceinline__ void store(const Out& out, const TileOfHead& tile) {
        const int row_in_tile = warpgroup_ * Config::kRows + warp_ * Config::kWarpRows;
        Element* const staging = q_buffer() + row_in_tile * Config::kSlabCols;
        barrier_sync(kWarpgroupDone + warpgroup_, Config::kWarpgroup);   // all four warps have read Q
        stage(out, staging);
        fence_proxy_async_shared();
        __syncwarp();
        const int warp_row = tile.row_begin + row_in_tile;
        if (warp_row + Config::kWarpRows <= tile.row_end) {
            if (lane_ == 0) {
#pragma unroll
                for (int slab = 0; slab < Config::kSlabs; ++slab) {
                    tma_store_3d(params_.out, staging + slab * Config::kQSlab, slab * Config::kSlabCols, warp_row,
                                 tile.head);
                }
                cp_async_bulk_commit_group();
            }
        } else {
            store_rows(staging, warp_row, tile);
        }
    }

    // Registers to shared memory in the swizzle of the tensor map: 16-byte chunk c of row r lies at c ^ (r % 8).
    __device__ __forceinline__ void stage(const Out& out, Element* staging) const {
        const int row = lane_ % 16;
        const uint32_t row_address = shared_address(staging) + row * 128;
#pragma unroll
        for (int i = 0; i < kOut / 8; ++i) {
            const int slab = i / 4;
            const int chunk = 2 * (i % 4) + lane_ / 16;
            stmatrix_x4(row_address + slab * kQSlabBytes + ((chunk ^ (row % 8)) << 4),
                        pack<Element>(out[8 * i], out[8 * i + 1]), pack<Element>(out[8 * i + 2], out[8 * i + 3]),
                        pack<Element>(out[8 * i + 4], out[8 * i + 5]), pack<Element>(out[8 * i + 6], out[8 * i + 7]));
        }
    }

    __device__ __forceinline__ void store_rows(const Element* staging, int warp_row, const TileOfHead& tile) const {
        constexpr int kChunks = Config::kHeadDim / 8;
        const int4* const chunks = reinterpret_cast<const int4*>(staging);
        int4* const out_rows = static_cast<int4*>(params_.out_rows);
        for (int i = lane_; i < Config::kWarpRows * kChunks; i += 32) {
            const int row = i / kChunks;
            const int chunk = i % kChunks;
            if (warp_row + row < tile.row_end) {
                const long long out_row =
                    static_cast<long long>(warp_row + row) * params_.schedule.num_heads + tile.head;
                out_rows[out_row * kChunks + chunk] =
                    chunks[chunk / 8 * (kQSlabBytes / 16) + row * 8 + (chunk % 8 ^ row % 8)];
            }
        }
    }

    // ---- buffers

    // Waits for the next block of the tile, if there is one, and tells what this warpgroup sees of it.
    __device__ __forceinline__ Visibility next_block(const TileOfHead& tile) {
        if (left_ == 0) {
            return kEnd;
        }
        --left_;
        mbarrier_wait_together(smem_.k_full[k_.slot], k_.phase);
        const Block& block = smem_.blocks[k_.slot];
        k_.advance();
        if (!__any_sync(0xffffffff, block.is_edge)) {
            return kAll;
        }
        const int row_begin = tile.row_begin + warpgroup_ * Config::kRows;
        const int row_end = min(row_begin + Config::kRows, tile.row_end);
        return Visibility(uniform(visibility(block.run, row_begin, row_end, block.first, Config::kBlockCols)));
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
        release(smem_.q_empty);
    }

    __device__ __forceinline__ void release_k(uint32_t zero = 0) {
        release(smem_.k_empty[scored_.slot + zero]);
        scored_.advance();
    }

    __device__ __forceinline__ void release_v() {
        release(smem_.v_empty[v_.slot]);
        v_.advance();
    }

    // Every warpgroup releases every buffer, in order, also those it does not use.
    __device__ __forceinline__ void skip_block() {
        release_k();
        wait_for_v(false);
        release_v();
    }

    __device__ __forceinline__ void release(uint64_t& empty) {
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, empty);
    }

    __device__ __forceinline__ int first_row(const TileOfHead& tile) const {
        return tile.row_begin + warpgroup_ * Config::kRows + warp_ * Config::kWarpRows + lane_ / 4;
    }

    static constexpr int kQSlabBytes = Config::kQSlab * sizeof(Element);
    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);

    const ForwardParams& params_;
    SharedStorage<Config>& smem_;
    const int warpgroup_;
    const int warp_;
    const int lane_;
    uint32_t q_phase_ = 0;
    Position<Config::kKStages> k_;        // of the block to look at next
    Position<Config::kKStages> scored_;   // of the block in work
    Position<Config::kVStages> v_;
    int left_ = 0;   // blocks of the tile
};

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& smem) {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    mbarrier_init(smem.runs_full, 1);
    mbarrier_init(smem.runs_empty, 1);
    mbarrier_init(smem.q_full, 1);
    mbarrier_init(smem.q_empty, kConsumerWarps);
    for (int i = 0; i < Config::kKStages; ++i) {
        mbarrier_init(smem.k_full[i], 1);
        mbarrier_init(smem.k_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < Config::kVStages; ++i) {
        mbarrier_init(smem.v_full[i], 1);
        mbarrier_init(smem.v_empty[i], kConsumerWarps);
    }
    fence_mbarrier_init();
}

template <class Config>
__device__ __forceinline__ void forward(const ForwardParams& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(SharedStorage<Config>) <= kMaxSharedBytes, "the buffers do not fit in shared memory");
    auto& smem = *reinterpret_cast<SharedStorage<Config>*>(memory);
    const int warpgroup = threadIdx.x / Config::kWarpgroup;
    if (threadIdx.x == 0) {
        init_barriers(smem);
        griddepcontrol_launch_dependents();   // what merges parts waits for them itself
    }
    __syncthreads();
    if (warpgroup == 0) {
        setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) {
            Producer<Config>(params, smem).run();
        } else if (threadIdx.x == 32) {
            Dispatcher<Config>(params, smem).run();
        }
    } else {
        setmaxnreg_inc<Config::kConsumerRegisters>();
        Consumer<Config>(params, smem, warpgroup - 1).run();
    }
}

}  // namespace ffa
