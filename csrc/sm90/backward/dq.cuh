// The warpgroup of the backward kernel that computes dQ = dS K of each block, from the gradients of scores that the
// others leave in shared memory, and adds it to the sum in global memory: in any order or, for sums that repeat bit for
// bit, in that of the plan's tiles. It counts what has been added, so that others know when a sum is complete.
#pragma once

#include "backward/config.cuh"
#include "backward/dq_wide.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace ffa::backward {

template <class Config>
class DqWarpgroup {
public:
    __device__ __forceinline__ DqWarpgroup(const typename Config::Params& params, SharedStorage<Config>& smem)
        : params_(params),
          smem_(smem),
          warp_(uniform(threadIdx.x / 32 % Config::kDqWarps)),
          lane_(threadIdx.x % 32),
          staging_(staging(smem)) {}

    __device__ __forceinline__ void run() {
        while (true) {
            mbarrier_wait_together(smem_.kv_full, kv_.phase);
            int left = uniform(work().num_visits);
            if (left == TileOfHead::kNoMoreWork) {
                break;
            }
            const int num_visits = left;
            // As `left`: when the next head is through, where others follow. Otherwise the end of the tile counts
            // all.
            int through = Config::kRoundsDq ? num_visits - uniform(work().visits_to_count) : 0;
            int end_head = uniform(work().qhead + work().num_qheads);   // of those that are not counted
            while (left > 0) {
                // When a head is through, one more block: meanwhile what was added to it arrives.
                const int end = max(through - 1, 0);
                for (; left > end; --left) {
                    // Asked by all warps: a branch of one of them alone would cost the kernel its uniform registers.
                    if (left % kVisitsOfStep == 0) {
                        keep_step((num_visits - left) / kVisitsOfStep);
                    }
                    differentiate();
                }
                if (Config::kRoundsDq && through > 0) {
                    await_additions<1>();
                    count_visits(work(), end_head - 1, end_head);
                    --end_head;
                    through -= uniform(work().visits_to_count);
                }
            }
            if constexpr (Config::kIsDeterministic) {
                publish();
            }
            if (num_visits > 0) {   // otherwise nobody would hold this warpgroup back from arriving twice
                barrier_arrive(kScoresAreRead, (Config::kConsumers + 1) * Config::kWarpgroup);
            }
            const TileOfHead done = work();   // what of it is needed below is read here
            release(smem_.kv_empty, lane_);
            kv_.advance();
            if constexpr (Config::kRoundsDq) {
                await_additions<0>();
                count_visits(done, uniform(done.qhead), end_head);
            }
        }
        cp_async_bulk_wait_group_read<0>();
    }

private:
    using Element = typename Config::Element;
    static constexpr int kValues = Config::kDqCols / 2;   // registers of a thread
    using Dq = float[kValues];

    static constexpr unsigned kAllLines = 3;

    // A thread block may be so many steps ahead of the mean of its wave, then it waits a few us at most.
    static constexpr int kVisitsOfStep = 16, kStepsAhead = 4;
    static constexpr int kMostWaits = 16, kNsOfWait = 250;

    __device__ __forceinline__ const TileOfHead& work() const { return smem_.work[kv_.phase]; }

    // Keeps the L2 cache's queries those of the whole wave. Nothing depends on the wait.
    __device__ __forceinline__ void keep_step(int step) {
        const int wave = uniform(work().wave_in_step);
        if (wave != kNoWave && warp_ == 0) {
            int* const steps = params_.agenda.counters->steps(wave);
            add_relaxed_if(lane_ == 0, steps, 1);
            const int least = (step - kStepsAhead) * int(gridDim.x / Config::kCtas);
#pragma unroll 1
            for (int i = 0; i < kMostWaits && __any_sync(0xffffffff, load_acquire(steps) < least); ++i) {
                nanosleep(kNsOfWait);
            }
        }
    }

    // dQ of a block.
    __device__ __forceinline__ void differentiate() {
        mbarrier_wait_together(smem_.q_full[block_.slot], block_.phase);
        const int first = uniform(smem_.blocks[block_.slot].first) + warp_ * kWarpRows;
        const int end = uniform(smem_.blocks[block_.slot].end);
        const int head = uniform(smem_.blocks[block_.slot].template head<Config>());
        const unsigned lines = Config::kMapLines > 1 ? uniform(smem_.blocks[block_.slot].lines()) : kAllLines;
        release(smem_.q_empty[block_.slot], lane_);
        block_.advance();
        mbarrier_wait_together(smem_.dscores_full[dscores_.slot], dscores_.phase);
        if constexpr (Config::kIsWide) {
            const DqTarget rows = target(head, first, end);
            WideDq<Config>(smem_, warp_, lane_).differentiate(rows, dscores_, [&] {
                if constexpr (Config::kIsDeterministic) {
                    publish_together();   // of the last block: its additions have had the time since
                    await_turn(rows, visits_[0]);
                }
            });
        } else {
            differentiate_by_panels(head, first, end, lines);
        }
        dscores_.advance();
    }

    __device__ __forceinline__ void differentiate_by_panels(int head, int first, int end, unsigned lines) {
#pragma unroll
        for (int panel = 0; panel < Config::kDqPanels; ++panel) {
            Dq dq;
            issue(dq, panel, lines);
            if (Config::kIsDeterministic && panel == 0) {
                publish_together();   // of the last block: its additions have had the time since
            }
            wgmma_wait_group<0>();
            pin(dq);
            if (panel == Config::kDqPanels - 1) {
                release(smem_.dscores_empty[dscores_.slot], lane_);
            }
            if (panel == 0) {
                await_staging();
            }
            store(dq, panel);
        }
        fence_proxy_async_shared();
        __syncwarp();
#pragma unroll
        for (int row_panel = 0; row_panel < Config::kDqRowPanels; ++row_panel) {
            const DqTarget rows = target(head, first + row_panel * Config::kDqRows, end);
            if constexpr (Config::kIsDeterministic) {
                await_turn(rows, visits_[row_panel]);
            }
            add(rows, staging_ + row_panel * uint32_t(sizeof(smem_.dq.of_warps[0])));
        }
    }

    __device__ __forceinline__ DqTarget target(int head, int row, int end) const {
        return {dq_rows<Config::kHeadDim>(params_.dq.sums, head, row), head, row, row < end};
    }

    // Of those keys that see the block.
    __device__ __forceinline__ void issue(Dq& dq, int panel, unsigned lines) {
        constexpr int kStepOffset = kSixteenRowsBytes >> 4, kSteps = Config::kBlockRows / 16;
        constexpr int kStepsOfLine = Config::kMapLines > 1 ? kSteps / 2 : kSteps;
        const int first = Config::kMapLines > 1 && lines == 2 ? kStepsOfLine * kStepOffset : 0;
        const uint32_t a = dq_operand<Config>(smem_.dscores[dscores_.slot][panel / Config::kDqColPanels], 0) + first;
        const uint32_t b = dq_operand<Config>(smem_.k[panel % Config::kDqColPanels], kKSlabBytes) + first;
        pin(dq);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsOfLine; ++step) {
            issue_step(dq, a + step * kStepOffset, b + step * kStepOffset, step != 0);
        }
        if (Config::kMapLines > 1 && lines == kAllLines) {
#pragma unroll
            for (int step = kStepsOfLine; step < kSteps; ++step) {
                issue_step(dq, a + step * kStepOffset, b + step * kStepOffset, true);
            }
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ static void issue_step(Dq& dq, uint32_t a, uint32_t b, bool adds) {
        Wgmma<Element, Config::kDqCols>::template ss<Major::MN, Major::MN>(dq, a, b, adds);
    }

    // Until what was in this warp's buffers has left; other lanes have nothing there. Measured: without a branch the
    // assembler moves what makes the next panel's descriptors in front of the wait, which pays where a head is two
    // panels wide (1.01) and costs elsewhere (0.97).
    __device__ __forceinline__ void await_staging() {
        if (Config::kDqColPanels > 1 || is_chosen<Config>(lane_)) {
            cp_async_bulk_wait_group_read<0>();
        }
        __syncwarp();
    }

    __device__ __forceinline__ void store(const Dq& dq, int panel) {
        float* const staging = smem_.dq.of_warps[panel / Config::kDqColPanels][warp_] +
                               panel % Config::kDqColPanels * kWarpRows * Config::kDqCols;
#pragma unroll
        for (int i = 0; i < kValues / 4; ++i) {
            *reinterpret_cast<float4*>(staging + 128 * i + 4 * lane_) = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                                                                         dq[4 * i + 3]};
        }
    }

    __device__ __forceinline__ void add(const DqTarget& rows, uint32_t staging) {
        if (is_chosen<Config>(lane_)) {
            if (rows.are_in_run) {
                cp_reduce_async_bulk_add(rows.sum, staging, sizeof(smem_.dq.of_warps[0][0]));
            }
            cp_async_bulk_commit_group();
        }
    }

    // Until it is this thread block's turn to add to these rows, as `visits` tell: that of its tile, and where thread
    // blocks of a cluster add to the same columns, they take turns block by block. What this one has added before has
    // arrived. One lane waits.
    __device__ __forceinline__ void await_turn(const DqTarget& rows, int*& visits) {
        const long long num_groups = params_.dq.sums.row_groups;
        const int group = rows.first / kDqGroupRows;
        int before = 0;
        if constexpr (Config::kMapLines > 0) {
            before = tiles_before(rows);
        } else if (lane_ == 0 && rows.are_in_run) {
            before = params_.visits.turns[work().tile_index * num_groups + group];
        }
        if (lane_ == 0 && rows.are_in_run) {
            visits = params_.visits.done + rows.head * num_groups + group;
            constexpr int kTurns = Config::kSharesDq ? 1 : Config::kCtas;
            const int turn = Config::kCtas * before + rank_in_cluster<Config>() % kTurns;
            int done;
            do {
                done = load_acquire(visits);
            } while (done < turn || (done - turn) % kTurns != 0);
        }
        fence_proxy_async_global();
        __syncwarp();
    }

    // How many tiles of a block map that see these rows come before this one, as the line of the rows says. All lanes
    // ask.
    __device__ __forceinline__ int tiles_before(const DqTarget& rows) const {
        const QueryLines& of = params_.query_lines;
        const int entry = rows.first / of.seqlen;
        const long long line =
            1ll * rows.head * of.lines_of_head + entry * of.lines_of_entry + (rows.first - entry * of.seqlen) / of.rows;
        const uint32_t* const words = of.words + line * of.num_words;
        const int end = (work().tile_index - entry * of.tiles_of_entry) * of.blocks_of_tile;
        int before = 0;
        for (int word = lane_; rows.are_in_run && 32 * word < end; word += 32) {
            uint32_t bits = words[word];
            if (of.blocks_of_tile == 2) {
                bits = (bits | bits >> 1) & 0x55555555;
            }
            const int left = end - 32 * word;
            before += __popc(left < 32 ? bits & ((1u << left) - 1) : bits);
        }
        return __reduce_add_sync(0xffffffff, before);
    }

    // Until this warp's additions have arrived, but for those of so many blocks. Those from registers are in front of
    // any release.
    template <int kPending>
    __device__ __forceinline__ void await_additions() const {
        if constexpr (!Config::kIsWide) {
            cp_async_bulk_wait_group<kPending * Config::kDqRowPanels>();
            fence_proxy_async_global();
        }
        __syncwarp();
    }

    // In front of the next block's: a row's warp may be another one there.
    __device__ __forceinline__ void publish_together() {
        publish();
        __syncwarp();
        barrier_sync(kAdditionsHaveArrived, Config::kWarpgroup);
    }

    // Tells others that the additions of a block have arrived.
    __device__ __forceinline__ void publish() {
        await_additions<0>();
#pragma unroll
        for (int*& visits : visits_) {
            if (visits != nullptr) {
                add_release(visits, 1);
            }
            visits = nullptr;
        }
    }

    // Counts what this warp has added for some heads of a tile: once for each run that holds some of 16 rows.
    __device__ __forceinline__ void count_visits(const TileOfHead& work, int first_head, int end_head) const {
        fence_acq_rel();
#pragma unroll 1
        for (int i = uniform(work.tile.run_begin), run_end = uniform(work.tile.run_end); i < run_end; ++i) {
            const RunWalk<Config::kBlockCols> walk{params_.runs[i], 1, false};
            const int first = uniform(walk.first_group()) + warp_;
            const int end = uniform(walk.end_group());
#pragma unroll 1
            for (int head = first_head; head < end_head; ++head) {
                int* const done = params_.visits.done + static_cast<long long>(head) * params_.dq.sums.row_groups;
#pragma unroll 1
                for (int group = first; group < end; group += Config::kDqWarps * 32) {
                    const int mine = group + Config::kDqWarps * lane_;
                    add_relaxed_if(mine < end, done + mine, 1);
                }
            }
        }
    }

    __device__ __forceinline__ uint32_t staging(const SharedStorage<Config>& smem) const {
        if constexpr (!Config::kIsWide) {
            return uniform(shared_address(smem.dq.of_warps[0][warp_]));
        } else {
            return 0;
        }
    }

    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);
    static constexpr int kSixteenRowsBytes = 16 * 128;

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    const int warp_;
    const int lane_;
    const uint32_t staging_;
    Position<1> kv_;
    Position<Config::kStages> block_;
    Position<Config::kScoreStages> dscores_;
    int* visits_[Config::kDqRowPanels] =
        {};   // of the rows that this lane has waited for, where additions have an order
};

}   // namespace ffa::backward
