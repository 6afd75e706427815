// The thread of the forward kernel that hands out the tiles, with their Q.
#pragma once

#include "forward/config.cuh"
#include "forward/scheduler_overlap.cuh"

namespace ffa {

// It loads the Q of each tile, and tells consumers and producer about it. It finds the next one while the producer is at the last
// blocks of this one, because ticket, tile and runs are three trips to the L2 cache, one after the other, and Q is one to DRAM.
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

}  // namespace ffa
