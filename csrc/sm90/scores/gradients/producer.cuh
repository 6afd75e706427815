// The thread that loads a tile's Q and dO, and streams K and V of its runs.
#pragma once

#include "keys/key_loader.cuh"
#include "common/tile_plan.cuh"
#include "scores/gradients/config.cuh"

namespace ffa::scores {

template <class Config>
class Producer : KeyLoader<Config, SharedStorage<Config>> {
public:
    __device__ __forceinline__ Producer(const typename Config::Params& params, SharedStorage<Config>& smem)
        : Loader(params, smem) {}

    __device__ __forceinline__ void run(const Tile& tile, int head) {
        mbarrier_arrive_expect_tx(smem_.q_full, sizeof(smem_.q) + sizeof(smem_.dout));
        load_slabs<Config>(smem_.q, params_.q, smem_.q_full, tile.row_begin, head);
        load_slabs<Config>(smem_.dout, params_.dout, smem_.q_full, tile.row_begin, head);
        const int kv_head = head / params_.qhead_per_kvhead;
        for (int r = tile.run_begin; r < tile.run_end; ++r) {
            const Run& run = params_.runs[r];
            const int num_blocks = run.num_blocks;
            const int middle_begin = run.num_lead;
            const int middle_end = num_blocks - run.num_trail;
            int col = run.first;
            for (int j = 0; j < num_blocks; ++j) {
                const bool is_edge = j < middle_begin || j >= middle_end;
                load_k(col, kv_head, is_edge ? &run : nullptr);
                load_v(col, kv_head);
                col += Config::kBlockCols;
            }
        }
    }

private:
    using Loader = KeyLoader<Config, SharedStorage<Config>>;
    using Loader::load_k;
    using Loader::load_v;
    using Loader::params_;
    using Loader::smem_;
};

}   // namespace ffa::scores
