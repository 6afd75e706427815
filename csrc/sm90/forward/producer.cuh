// The two threads of the forward kernel that load: one hands out the tiles, with their Q; the other one streams K and
// V, and says what is to be seen.
#pragma once

#include "visibility/block_map.cuh"
#include "keys/key_loader.cuh"
#include "common/pipeline.cuh"
#include "forward/config.cuh"
#include "forward/scheduler_overlap.cuh"

namespace ffa::forward {

// The thread that hands out the tiles.
//
// It loads the Q of each tile, and tells consumers and producer about it. It finds the next one while the producer is
// at the last blocks of this one, because ticket, tile and runs are three trips to the L2 cache, one after the other,
// and Q is one to DRAM.
template <class Config>
class Dispatcher {
public:
    __device__ __forceinline__ Dispatcher(const typename Config::Params& params, SharedStorage<Config>& smem)
        : params_(params), smem_(smem) {}

    __device__ __forceinline__ void run() {
        for (Items<Config> items(params_); items.has_work(); items.advance()) {
            const WorkItem item = items.item();
            const Tile tile = items.tile(item);
            if (tile.row_begin == tile.row_end) {
                items.leave_section();
                continue;
            }
            const bool is_empty = tile.run_begin == tile.run_end;
            if (!is_empty) {
                signal_producer(tile, item.head);
            }
            const SplitOfTile split = items.split(item);
            signal_consumers({tile.row_begin, tile.row_end, item.head, count_blocks(params_.runs, tile)}, split);
            if (!is_empty) {
                mbarrier_wait(smem_.runs_empty, runs_phase_);
                runs_phase_ ^= 1;
            }
        }
        smem_.runs.begin = RunsOfHead::kNoMoreWork;
        mbarrier_arrive(smem_.runs_full);
        signal_consumers({0, 0, 0, TileOfHead::kNoMoreWork}, {kNotASplit, 0});
    }

private:
    __device__ __forceinline__ void signal_producer(const Tile& tile, int head) {
        const Run& first = params_.runs[tile.run_begin];
        smem_.runs = {tile.run_begin, tile.run_end, head / params_.qhead_per_kvhead, first.num_blocks + first.num_lead};
        mbarrier_arrive(smem_.runs_full);
    }

    __device__ __forceinline__ void signal_consumers(const TileOfHead& tile, const SplitOfTile& split) {
        const int buffer = q_phase_ % Config::kQBuffers;
        mbarrier_wait(smem_.q_empty, q_phase_ ^ 1);
        smem_.tiles[buffer] = tile;
        smem_.split_shifts[buffer] = split.shift;
        if constexpr (Config::kIsEarly) {
            smem_.split_items[buffer] = split.item;
        }
        if (tile.num_blocks <= 0) {
            mbarrier_arrive(smem_.q_full);
        } else {
            mbarrier_arrive_expect_tx(smem_.q_full, sizeof(smem_.q[0]));
            load_slabs<Config>(smem_.q[buffer], params_.q, smem_.q_full, tile.row_begin, tile.head);
        }
        q_phase_ ^= 1;
    }

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    uint32_t q_phase_ = 0;
    uint32_t runs_phase_ = 0;
};

// One thread that keeps the rings of K and V full.
template <class Config>
class Producer : KeyLoader<Config, SharedStorage<Config>> {
public:
    __device__ __forceinline__ Producer(const typename Config::Params& params, SharedStorage<Config>& smem)
        : Loader(params, smem) {}

    __device__ __forceinline__ void run() {
        for (uint32_t phase = 0;; phase ^= 1) {
            mbarrier_wait(smem_.runs_full, phase);
            const int begin = smem_.runs.begin;
            if (begin == RunsOfHead::kNoMoreWork) {
                break;
            }
            if constexpr (Config::kMapLines > 0) {
                load_mapped(params_.runs[begin], smem_.runs.kv_head);
            } else {
                load_runs(begin, smem_.runs.end, smem_.runs.kv_head);
            }
        }
    }

private:
    using Loader = KeyLoader<Config, SharedStorage<Config>>;
    using Loader::load_k;
    using Loader::load_v;
    using Loader::params_;
    using Loader::smem_;

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

    // The one run of a tile, of a block map. Its last block may be short.
    __device__ __forceinline__ void load_mapped(const Run& run, int kv_head) {
        MapWalk<Config::kBlockCols, Config::kMapLines, Config::kMapAsks> walk(run, params_.map_words);
        int previous_col = kNoColumn;
        for (int left = run.num_blocks; left > 0; --left) {
            if (left == kBlocksAhead || (left == run.num_blocks && left < kBlocksAhead)) {
                mbarrier_arrive(smem_.runs_empty);
            }
            const MappedBlock block = walk.next();
            const bool is_edge = Config::kMapAsks ? block.asks : block.col + Config::kBlockCols > run.col_end;
            load_k(block.col, kv_head, is_edge ? &run : nullptr, block.lines);
            if (previous_col != kNoColumn) {
                load_v(previous_col, kv_head);
            }
            previous_col = block.col;
        }
        load_v(previous_col, kv_head);
    }

    static constexpr int kBlocksAhead = 2;   // of the end of a tile, when the next one is asked for
    static constexpr int kNoColumn = -1;
};

}   // namespace ffa::forward
