// The two threads of the forward kernel that load: one hands out the tiles, with their Q; the other one streams K and
// V, and says what is to be seen.
#pragma once

#include "common/pipeline.cuh"
#include "forward/config.cuh"
#include "forward/scheduler_overlap.cuh"

namespace ffa {

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
                tell_producer(tile, item.head);
            }
            const PartOfTile part = items.part(item);
            tell_consumers({tile.row_begin, tile.row_end, item.head, count_blocks(tile)}, part);
            if (!is_empty) {
                mbarrier_wait(smem_.runs_empty, runs_phase_);
                runs_phase_ ^= 1;
            }
        }
        smem_.runs.begin = RunsOfHead::kNoMoreWork;
        mbarrier_arrive(smem_.runs_full);
        tell_consumers({0, 0, 0, TileOfHead::kNoMoreWork}, {kNotAPart, 0});
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

    __device__ __forceinline__ void tell_consumers(const TileOfHead& tile, const PartOfTile& part) {
        const int buffer = q_phase_ % Config::kQBuffers;
        mbarrier_wait(smem_.q_empty, q_phase_ ^ 1);
        smem_.tiles[buffer] = tile;
        smem_.part_shifts[buffer] = part.shift;
        if constexpr (Config::kIsEarly) {
            smem_.part_items[buffer] = part.item;
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
class Producer {
public:
    __device__ __forceinline__ Producer(const typename Config::Params& params, SharedStorage<Config>& smem)
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
        load(smem_.k[k_.slot], params_.k[0], params_.k[1], full, col, head);
        k_.advance();
    }

    __device__ __forceinline__ void load_v(int col, int head) {
        uint64_t& full = smem_.v_full[v_.slot];
        mbarrier_wait(smem_.v_empty[v_.slot], v_.phase ^ 1);
        mbarrier_arrive_expect_tx(full, sizeof(smem_.v[0]));
        load(smem_.v[v_.slot], params_.v[0], params_.v[1], full, col, head);
        v_.advance();
    }

    // Remote keys lie in memory of their own; no run reaches from local ones into them. Each tensor map has a branch of
    // its own, where its address is known: chosen by an index, it makes all of the thread block 1 to 4 % slower.
    template <class Slabs>
    __device__ __forceinline__ void load(Slabs& slabs, const TensorMap& local, const TensorMap& remote, uint64_t& full,
                                         int col, int head) const {
        if (Config::kHasRemoteKeys && col >= params_.remote_begin) {
            load_slabs<Config>(slabs, remote, full, col - params_.remote_begin, head);
        } else {
            load_slabs<Config>(slabs, local, full, col, head);
        }
    }

    static constexpr int kBlocksAhead = 2;   // of the end of a tile, when the next one is asked for
    static constexpr int kNoColumn = -1;

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    Position<Config::kKStages> k_;
    Position<Config::kVStages> v_;
};

}   // namespace ffa
