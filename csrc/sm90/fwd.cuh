// The forward pass: out = softmax(q k^T) v over the runs of a plan, and the log-sum-exp of each row.
//
// A persistent thread block works on one (q tile, head) after another. One producer warpgroup streams Q, K and V into
// shared memory with TMA and says, block by block, what is to be seen; the consumer warpgroups own 64 rows each and
// keep scores, probabilities and output in registers. Softmax of block j overlaps with P V of block j - 1 in the same
// warpgroup, and with the matmuls of the other warpgroups, which take turns in issuing them. The stream of blocks does
// not stop at the borders of runs, and a warpgroup masks only the blocks that hide something from it.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"

namespace ffa {

struct ForwardParams {
    TensorMap q;       // [nheads_q, total_q, head_dim], boxes of tile rows x 64 columns
    TensorMap k;       // [nheads_kv, total_k, head_dim], boxes of block_cols rows x 64 columns
    TensorMap v;       // [nheads_kv, total_k, head_dim], likewise
    TensorMap out;     // [nheads_q, total_q, head_dim], boxes of 16 rows x 64 columns
    void* out_rows;    // [total_q, nheads_q, head_dim], contiguous
    float* lse;        // [nheads_q, total_q]
    const Run* runs;   // [num_runs]
    Schedule schedule;
    int total_q;
    int qhead_per_kvhead;
    float scale_log2;   // softmax_scale * log2(e), or softcap * log2(e) where scores are capped
    float cap_scale;    // softmax_scale / softcap where scores are capped
};

static_assert(sizeof(ForwardParams) == 640, "packed by magi_compile/kernels/cuda/forward.py");

template <class Element_, int kHeadDim_, int kBlockCols_, int kKStages_, int kVStages_, bool kOutSharesQ_,
          int kConsumers_, int kProducerRegisters_, int kConsumerRegisters_, bool kHasSoftcap_>
struct ForwardConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockCols = kBlockCols_;
    static constexpr int kKStages = kKStages_;
    static constexpr int kVStages = kVStages_;
    static constexpr bool kOutSharesQ = kOutSharesQ_;   // O leaves from Q's buffer, where there is no room for another
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

    static_assert(sizeof(Element) == 2, "bf16 or fp16");
    static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256, "wgmma holds up to 256 output columns");
    static_assert(kBlockCols % 16 == 0, "P V takes 16 columns a step");
    static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup <= 65536, "one register file");
};

// What the producer says about a block of K.
struct alignas(16) Block {
    Run run;   // only at an edge of the run, where a row may not see every column
    int first;
    uint32_t flags;

    static constexpr uint32_t kIsEdge = 1;
    static constexpr uint32_t kIsLastOfTile = 2;
};

struct TileOfHead {
    int row_begin, row_end, head;
    bool is_empty;   // sees nothing at all

    static constexpr int kNoMoreWork = -1;   // as row_begin
};

template <class Config>
struct alignas(1024) SharedStorage {
    using Element = typename Config::Element;
    static constexpr int kQBuffers = Config::kOutSharesQ ? 1 : 2;

    Element q[kQBuffers][Config::kSlabs][Config::kQSlab];   // the last one is O's
    Element k[Config::kKStages][Config::kSlabs][Config::kKSlab];
    Element v[Config::kVStages][Config::kSlabs][Config::kKSlab];
    Block blocks[Config::kKStages];   // travel with k
    TileOfHead tile;                  // travels with q
    uint64_t q_full, q_empty;
    uint64_t k_full[Config::kKStages], k_empty[Config::kKStages];
    uint64_t v_full[Config::kVStages], v_empty[Config::kVStages];
};

enum NamedBarrier : uint32_t { kTurn = 1, kWarpgroupDone = 4 };   // one for each consumer warpgroup; 0 is __syncthreads

// One thread that keeps the rings full.
template <class Config>
class Producer {
public:
    __device__ __forceinline__ Producer(const ForwardParams& params, SharedStorage<Config>& smem)
        : params_(params), smem_(smem) {}

    __device__ __forceinline__ void run() {
        for (Scheduler scheduler(params_.schedule); scheduler.has_work(); scheduler.advance()) {
            const WorkItem item = scheduler.item();
            const Tile tile = params_.schedule.tiles[item.tile];
            if (tile.row_begin < tile.row_end) {
                load_tile(tile, item.head);
            } else {
                scheduler.leave_section();
            }
        }
        mbarrier_wait(smem_.q_empty, q_phase_ ^ 1);
        smem_.tile.row_begin = TileOfHead::kNoMoreWork;
        mbarrier_arrive(smem_.q_full);
    }

private:
    // V of a block is asked for after K of the next one, in the order in which their buffers come free.
    __device__ __forceinline__ void load_tile(const Tile& tile, int head) {
        const int kv_head = head / params_.qhead_per_kvhead;
        bool is_first = true;
        int previous_col = 0;
        for (int r = tile.run_begin; r < tile.run_end; ++r) {
            const Run& run = params_.runs[r];
            const int num_blocks = run.num_blocks;
            const int middle_begin = run.num_lead;
            const int middle_end = num_blocks - run.num_trail;
            int col = run.first;
            for (int j = 0; j < num_blocks; ++j) {
                const bool is_edge = j < middle_begin || j >= middle_end;
                const bool is_last = r + 1 == tile.run_end && j + 1 == num_blocks;
                load_k(col, kv_head, is_edge ? &run : nullptr, is_last);
                if (is_first) {
                    load_q(tile, head);
                    is_first = false;
                } else {
                    load_v(previous_col, kv_head);
                }
                previous_col = col;
                col += Config::kBlockCols;
            }
        }
        if (is_first) {
            announce_empty(tile, head);
        } else {
            load_v(previous_col, kv_head);
        }
    }

    __device__ __forceinline__ void announce_empty(const Tile& tile, int head) {
        mbarrier_wait(smem_.q_empty, q_phase_ ^ 1);
        smem_.tile = {tile.row_begin, tile.row_end, head, true};
        mbarrier_arrive(smem_.q_full);
        q_phase_ ^= 1;
    }

    __device__ __forceinline__ void load_q(const Tile& tile, int head) {
        mbarrier_wait(smem_.q_empty, q_phase_ ^ 1);
        smem_.tile = {tile.row_begin, tile.row_end, head, false};
        mbarrier_arrive_expect_tx(smem_.q_full, sizeof(smem_.q[0]));
        load(smem_.q[0], params_.q, smem_.q_full, tile.row_begin, head);
        q_phase_ ^= 1;
    }

    // `edge` is the run whose edge the block lies on, if it does; it travels with the block.
    __device__ __forceinline__ void load_k(int col, int head, const Run* edge, bool is_last) {
        uint64_t& full = smem_.k_full[k_.slot];
        Block& block = smem_.blocks[k_.slot];
        mbarrier_wait(smem_.k_empty[k_.slot], k_.phase ^ 1);
        block.first = col;
        block.flags = (edge ? Block::kIsEdge : 0) | (is_last ? Block::kIsLastOfTile : 0);
        mbarrier_arrive_expect_tx(full, sizeof(smem_.k[0]) + (edge ? sizeof(Run) : 0));
        if (edge) {
            cp_async_bulk_load(&block.run, edge, sizeof(Run), full);
        }
        load(smem_.k[k_.slot], params_.k, full, col, head);
        k_.advance();
    }

    __device__ __forceinline__ void load_v(int col, int head) {
        uint64_t& full = smem_.v_full[v_.slot];
        mbarrier_wait(smem_.v_empty[v_.slot], v_.phase ^ 1);
        mbarrier_arrive_expect_tx(full, sizeof(smem_.v[0]));
        load(smem_.v[v_.slot], params_.v, full, col, head);
        v_.advance();
    }

    template <class Slabs>
    __device__ __forceinline__ void load(Slabs& slabs, const TensorMap& map, uint64_t& full, int row, int head) {
#pragma unroll
        for (int slab = 0; slab < Config::kSlabs; ++slab) {
            tma_load_3d(slabs[slab], map, full, slab * Config::kSlabCols, row, head);
        }
    }

    const ForwardParams& params_;
    SharedStorage<Config>& smem_;
    uint32_t q_phase_ = 0;
    Position<Config::kKStages> k_;
    Position<Config::kVStages> v_;
};

// A warpgroup that owns 64 rows of each tile.
template <class Config>
class Consumer {
public:
    __device__ __forceinline__ Consumer(const ForwardParams& params, SharedStorage<Config>& smem, int warpgroup)
        : params_(params), smem_(smem), warpgroup_(warpgroup), warp_(threadIdx.x / 32 % 4), lane_(threadIdx.x % 32) {}

    __device__ __forceinline__ void run() {
        if (warpgroup_ == Config::kConsumers - 1) {
            pass_turn();   // the first turn is warpgroup 0's
        }
        while (true) {
            mbarrier_wait(smem_.q_full, q_phase_);
            q_phase_ ^= 1;
            const TileOfHead tile = smem_.tile;
            if (tile.row_begin == TileOfHead::kNoMoreWork) {
                break;
            }
            attend(tile);
        }
    }

private:
    using Element = typename Config::Element;
    static constexpr int kScores = Config::kBlockCols / 2;   // registers of a thread: 64 rows over 128 threads
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

        holds_q_ = true;
        is_last_block_ = tile.is_empty;
        Visibility sees = next_block(tile);
        while (sees != kEnd) {
            if (sees == kNothing) {
                skip_block();
                sees = next_block(tile);
                continue;
            }

            // The first block of a stretch that this warpgroup sees: there is no P V to overlap with.
            const uint32_t q = q_operand();
            const uint32_t k = k_operand();
            wait_turn();
            issue_scores(scores, q, k);
            pass_turn();
            Visibility next = next_block(tile);
            wgmma_wait_group<0>();
            pin(scores);
            cap_and_mask(scores, sees, tile);
            release_k_and_q(next);
            bool is_v_there = test_v();
            float sum[2];
            soften(scores, probs, sum, out, softmax);
            softmax.add(sum);
            sees = next;

            while (sees == kPart || sees == kAll) {
                wait_for_v(is_v_there);
                const uint32_t q = q_operand();
                const uint32_t k = k_operand();
                const uint32_t v = v_operand();
                wait_turn();
                issue_scores(scores, q, k);
                issue_out(out, probs, v);
                pass_turn();
                next = next_block(tile);   // while the scores are on their way
                wgmma_wait_group<2>();
                pin(scores);
                cap_and_mask(scores, sees, tile);
                float sum[2] = {0.f, 0.f};
                wgmma_wait_group<1>();
                softmax.exponentiate<Element, 0, kScores / 2>(scores, probs, sum);
                // The assembler moves a wait up to the last memory operation in front of it: this one, which seems to
                // depend on the exponentials, keeps them in front of the wait and beside the rest of P V.
                release_k_and_q(next, zero_after(sum[0]) | zero_after(sum[1]));
                wgmma_wait_group<0>();
                pin(out);
                release_v();
                is_v_there = test_v();
                softmax.exponentiate<Element, kScores / 2, kScores>(scores, probs, sum);
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
        scale_rows(out, normalize);
        store(out, lse, tile);
        if (Config::kOutSharesQ) {
            if (lane_ == 0) {
                cp_async_bulk_wait_group_read<0>();
            }
            release(smem_.q_empty);
        } else if (holds_q_) {
            release(smem_.q_empty);
        }
    }

    // ---- the matmuls

    __device__ __forceinline__ uint32_t q_operand() const {
        return wgmma_descriptor(smem_.q[0][0] + warpgroup_ * Config::kRows * Config::kSlabCols, 0);
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
            if (step + 1 == Config::kBlockCols / 32) {
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

    // Each warp stores its own 16 rows: with TMA where all of them belong to the tile, else row by row, because the
    // rows behind the tile are another's.
    __device__ __forceinline__ void store(const Out& out, const float (&lse)[2], const TileOfHead& tile) {
        const int row_in_tile = warpgroup_ * Config::kRows + warp_ * Config::kWarpRows;
        Element* const staging = smem_.q[SharedStorage<Config>::kQBuffers - 1][0] + row_in_tile * Config::kSlabCols;
        if constexpr (Config::kOutSharesQ) {
            barrier_sync(kWarpgroupDone + warpgroup_, Config::kWarpgroup);   // all four warps have read Q
        } else {
            if (lane_ == 0) {
                cp_async_bulk_wait_group_read<0>();   // the previous tile has left the staging buffer
            }
            __syncwarp();
        }
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
        if (lane_ % 4 == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row(tile) + 8 * half;
                if (row < tile.row_end) {
                    params_.lse[static_cast<long long>(tile.head) * params_.total_q + row] = lse[half];
                }
            }
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

    // ---- turns and buffers

    __device__ __forceinline__ void wait_turn() { barrier_sync(kTurn + warpgroup_, 2 * Config::kWarpgroup); }

    __device__ __forceinline__ void pass_turn() {
        const int next = warpgroup_ + 1 == Config::kConsumers ? 0 : warpgroup_ + 1;
        barrier_arrive(kTurn + next, 2 * Config::kWarpgroup);
    }

    // Waits for the next block of the tile, if there is one, and tells what this warpgroup sees of it.
    __device__ __forceinline__ Visibility next_block(const TileOfHead& tile) {
        if (is_last_block_) {
            return kEnd;
        }
        mbarrier_wait(smem_.k_full[k_.slot], k_.phase);
        const Block& block = smem_.blocks[k_.slot];
        k_.advance();
        is_last_block_ = block.flags & Block::kIsLastOfTile;
        const int row_begin = tile.row_begin + warpgroup_ * Config::kRows;
        const int row_end = min(row_begin + Config::kRows, tile.row_end);
        if (row_begin >= row_end) {
            return kNothing;
        }
        const bool is_edge = block.flags & Block::kIsEdge;
        return is_edge ? visibility(block.run, row_begin, row_end, block.first, Config::kBlockCols) : kAll;
    }

    __device__ __forceinline__ bool test_v() { return mbarrier_test_wait(smem_.v_full[v_.slot], v_.phase); }

    __device__ __forceinline__ void wait_for_v(bool is_there) {
        if (!is_there) {
            mbarrier_wait(smem_.v_full[v_.slot], v_.phase);
        }
    }

    // After the scores of a block are there; behind those of the last one nobody needs Q.
    __device__ __forceinline__ void release_k_and_q(Visibility next, uint32_t zero = 0) {
        release_k(zero);
        if (!Config::kOutSharesQ && next == kEnd) {
            release(smem_.q_empty);
            holds_q_ = false;
        }
    }

    __device__ __forceinline__ void release_k(uint32_t zero = 0) {
        release(smem_.k_empty[scored_.slot + zero]);
        scored_.advance();
    }

    __device__ __forceinline__ void release_v() {
        release(smem_.v_empty[v_.slot]);
        v_.advance();
    }

    // Every warpgroup takes every turn and releases every buffer, in order, also those it does not use.
    __device__ __forceinline__ void skip_block() {
        wait_turn();
        pass_turn();
        release_k();
        wait_for_v(false);
        release_v();
    }

    __device__ __forceinline__ void release(uint64_t& empty) {
        __syncwarp();
        if (lane_ == 0) {
            mbarrier_arrive(empty);
        }
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
    bool is_last_block_;
    bool holds_q_;
};

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& smem) {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
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
    }
    __syncthreads();
    if (warpgroup == 0) {
        setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == 0) {
            Producer<Config>(params, smem).run();
        }
    } else {
        setmaxnreg_inc<Config::kConsumerRegisters>();
        Consumer<Config>(params, smem, warpgroup - 1).run();
    }
}

}  // namespace ffa
