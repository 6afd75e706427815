// The thread that loads a tile's Q and dO, and streams K and V of its runs.
#pragma once

#include "common/pipeline.cuh"
#include "common/tile_plan.cuh"
#include "scores/gradients/config.cuh"

namespace ffa {

template <class Config>
class TableGradientsProducer {
public:
    __device__ __forceinline__ TableGradientsProducer(const typename Config::Params& params,
                                                      TableGradientsStorage<Config>& smem)
        : params_(params), smem_(smem) {}

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
        load_slabs<Config>(smem_.k[k_.slot], params_.k, full, col, head);
        k_.advance();
    }

    __device__ __forceinline__ void load_v(int col, int head) {
        uint64_t& full = smem_.v_full[v_.slot];
        mbarrier_wait(smem_.v_empty[v_.slot], v_.phase ^ 1);
        mbarrier_arrive_expect_tx(full, sizeof(smem_.v[0]));
        load_slabs<Config>(smem_.v[v_.slot], params_.v, full, col, head);
        v_.advance();
    }

    const typename Config::Params& params_;
    TableGradientsStorage<Config>& smem_;
    Position<Config::kKStages> k_;
    Position<Config::kVStages> v_;
};

}   // namespace ffa
