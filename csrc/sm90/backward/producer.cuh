// The thread of the backward kernel that asks for keys, values and blocks of queries, and tells the consumers about
// them.
#pragma once

#include "backward/config.cuh"
#include "backward/schedule/queue.cuh"
#include "backward/schedule/walk.cuh"
#include "visibility/block_map.cuh"
#include "visibility/block_table.cuh"
#include "common/pipeline.cuh"

namespace ffa::backward {

// The items of a thread block of the backward kernel: its own, or those that the first block of its cluster draws for
// both.
template <class Config>
class ItemsOfBlock {
public:
    __device__ __forceinline__ ItemsOfBlock(const typename Config::Params& params, SharedStorage<Config>& smem)
        : smem_(smem), items_(params) {
        share();
    }

    __device__ __forceinline__ const Items<Config>& operator*() const { return items_; }

    __device__ __forceinline__ void advance() {
        if (rank_in_cluster<Config>() == 0) {
            items_.advance();
        }
        share();
    }

private:
    // The phase of keys is that of items too, and takes no register.
    __device__ __forceinline__ void share() {
        if constexpr (Config::kCtas > 1) {
            if (rank_in_cluster<Config>() == 0) {
                mbarrier_wait(smem_.cluster.item_empty, smem_.kv_phase ^ 1);
                st_async_to_peer(smem_.item, items_.drawn(), smem_.cluster.item_full, peer_rank<Config>());
            } else {
                mbarrier_arrive_expect_tx(smem_.cluster.item_full, sizeof(smem_.item));
                mbarrier_wait(smem_.cluster.item_full, smem_.kv_phase);
                items_.set(smem_.item);
                mbarrier_arrive_at_rank_if(true, smem_.cluster.item_empty, peer_rank<Config>());
            }
        }
    }

    SharedStorage<Config>& smem_;
    Items<Config> items_;
};

// One thread that keeps the rings full.
template <class Config>
class Producer {
public:
    __device__ __forceinline__ Producer(const typename Config::Params& params, SharedStorage<Config>& smem)
        : params_(params), smem_(smem) {}

    __device__ __forceinline__ void run() {
        ItemsOfBlock<Config> items(params_, smem_);
        for (; (*items).has_work(); items.advance()) {
            load_tile(*items);
        }
        store_shared(smem_.is_over, 1);
        mbarrier_wait(smem_.kv_empty, smem_.kv_phase ^ 1);
        smem_.work[smem_.kv_phase].num_visits = TileOfHead::kNoMoreWork;
        mbarrier_arrive(smem_.kv_full);
    }

private:
    static constexpr bool kIsMapped = Config::kMapLines > 0;
    using Map = MapWalk<Config::kBlockCols, kIsMapped ? Config::kMapLines : 1, Config::kMapAsks>;

    // What describes the tile and the run is read again for each block, because this thread has few registers.
    __device__ __forceinline__ void load_tile(const Items<Config>& items) {
        const AgendaEntry& entry = items.entry();
        const Tile& tile = params_.tiles[entry.tile];
        const int num_blocks = kIsMapped ? 0 : blocks_of_tile<Config::kBlockCols>(tile, params_.runs);
        const bool is_head_by_head = !kIsMapped && is_walked_head_by_head<Config::kBlockCols>(tile, params_.runs);
        const int head_in_section = items.head_in_section(), wave_in_step = items.wave_in_step();
        TileOfHead& work = smem_.work[smem_.kv_phase];
        mbarrier_wait(smem_.kv_empty, smem_.kv_phase ^ 1);
        work.tile = tile;
        work.tile_index = entry.tile;
        work.wave_in_step =
            rank_in_cluster<Config>() == 0 ? wave_in_step : kNoWave;   // the others keep step with the first
        work.part = entry.part;
        work.num_parts = entry.num_parts;
        work.turn = entry.turn;
        work.is_ascending = entry.is_ascending;
        work.kv_head = entry.first_head + head_in_section;
        work.slot = entry.slot * params_.agenda.heads_per_section + head_in_section;
        const int parts_of_heads = work.num_parts / num_ranges(work);
        work.num_qheads = params_.qhead_per_kvhead / parts_of_heads;
        work.qhead = work.kv_head * params_.qhead_per_kvhead + work.part / num_ranges(work) * work.num_qheads;
        work.num_visits = kIsMapped ? num_mapped_blocks(work) : num_blocks * work.num_qheads;
        work.visits_to_count = is_head_by_head ? num_blocks : work.num_visits;
        if (work.num_visits == 0) {
            mbarrier_arrive(smem_.kv_full);
        } else {
            load_keys(work);
        }
        smem_.kv_phase ^= 1;
        if constexpr (kIsMapped) {
            load_mapped();
        } else {
            for (int i = this->work().tile.run_end - this->work().tile.run_begin; i-- > 0;) {
                const Tile& tile = this->work().tile;
                load_run(params_.runs[this->work().is_ascending ? tile.run_end - 1 - i : tile.run_begin + i]);
            }
        }
    }

    __device__ __forceinline__ void load_keys(const TileOfHead& work) {
        const int row = work.tile.row_begin + first_row_of_block<Config>();
        uint32_t bytes = sizeof(smem_.k) + sizeof(smem_.v);
        if constexpr (Config::kSharesDq) {
            bytes += sizeof(smem_.peer.k);
        }
        mbarrier_arrive_expect_tx(smem_.kv_full, bytes);
        load(smem_.k, params_.k, smem_.kv_full, row, work.kv_head);
        load(smem_.v, params_.v, smem_.kv_full, row, work.kv_head);
        if constexpr (Config::kSharesDq) {
            const int peer_row = work.tile.row_begin + peer_rank<Config>() * Config::kRows;
#pragma unroll 1
            for (int slab = 0; slab < Config::kPeerSlabs; ++slab) {
                tma_load_3d(smem_.peer.k[slab], params_.k, smem_.kv_full,
                            (first_peer_slab<Config>() + slab) * Config::kSlabCols, peer_row, work.kv_head);
            }
        }
    }

    __device__ __forceinline__ void load_run(const Run& run) {
        const RunWalk<Config::kBlockCols> walk{run, work().num_qheads, work().is_ascending};
        for (int left = walk.num_visits(); left-- > 0;) {
            const Visit visit = walk.visit(left);
            // Keys past the end of a short tile belong to others: the mask hides them.
            const bool is_masked = work().is_short(Config::kTileRows) || walk.is_masked(visit.col);
            load_block(run, walk.col_end(), visit, is_masked);
        }
    }

    // Of a block map, parts of a tile may be for some of the queries of a head: in how many ranges these are divided.
    __device__ __forceinline__ int num_ranges(const TileOfHead& work) const {
        return kIsMapped ? max(work.num_parts / params_.qhead_per_kvhead, 1) : 1;
    }

    // The first word of this part's range, or behind it, of a line.
    __device__ __forceinline__ int range_border(const TileOfHead& work, const Run& run, int next) const {
        const int ranges = num_ranges(work);
        return Map::num_words(run) * (work.part % ranges + next) / ranges;
    }

    // Query heads may have tiles of their own.
    __device__ __forceinline__ const Tile& tile_of_head(const TileOfHead& work, int group) const {
        return params_.tiles[(work.qhead + group) * params_.tiles_of_head + work.tile_index];
    }

    // Blocks of the run of a tile in this part.
    __device__ __forceinline__ int num_mapped_blocks(const TileOfHead& work, const Tile& tile) const {
        if (tile.run_begin == tile.run_end) {
            return 0;
        }
        const Run& run = params_.runs[tile.run_begin];
        if (num_ranges(work) == 1) {
            return run.num_blocks;
        }
        return Map::count(run, params_.map_words, range_border(work, run, 0), range_border(work, run, 1));
    }

    __device__ __forceinline__ int num_mapped_blocks(const TileOfHead& work) const {
        int sum = 0;
#pragma unroll 1
        for (int group = 0; group < work.num_qheads; ++group) {
            sum += num_mapped_blocks(work, tile_of_head(work, group));
        }
        return sum;
    }

    // Head by head, the one run of each.
    __device__ __forceinline__ void load_mapped() {
        const bool is_one_head = work().num_qheads == 1;
#pragma unroll 1
        for (int group = 0; group < work().num_qheads; ++group) {
            const Tile& tile = tile_of_head(work(), group);
            int left = is_one_head ? work().num_visits : num_mapped_blocks(work(), tile);
            if (left == 0) {
                continue;
            }
            const Run& run = params_.runs[tile.run_begin];
            Map walk(run, params_.map_words, range_border(work(), run, 0));
#pragma unroll 1
            for (; left > 0; --left) {
                const MappedBlock block = walk.next();
                const bool is_masked =
                    block.asks || work().is_short(Config::kTileRows) || block.col + Config::kBlockCols > run.col_end;
                load_block(run, run.col_end, {block.col, group}, is_masked, block.lines);
            }
        }
    }

    __device__ __forceinline__ void load_block(const Run& run, int col_end, const Visit& visit, bool is_masked,
                                               uint32_t lines = 0) {
        uint64_t& q_full = smem_.q_full[block_.slot];
        Block& block = smem_.blocks[block_.slot];
        mbarrier_wait(smem_.q_empty[block_.slot], block_.phase ^ 1);
        block.first = visit.col;
        block.end = col_end;
        block.head_and_lines = work().qhead + visit.group;
        if constexpr (Config::kMapLines > 1) {
            block.head_and_lines = Block::with_lines(block.head_and_lines, lines);
        }
        block.mask_row = is_masked ? work().tile.row_begin : kNoMask;
        if constexpr (Config::kMapTable) {
            if (is_masked) {
                block.word() = word_of_block(run, visit.col);
                block.key_end() = work().tile.row_end;
            }
        }
        const uint32_t run_bytes = is_masked && !Config::kMapAsks ? sizeof(Run) : 0;
        mbarrier_arrive_expect_tx(q_full, sizeof(smem_.q[0]) + sizeof(smem_.stats[0]) + run_bytes);
        load_for_all<0>(smem_.q[block_.slot], params_.q, q_full, visit.col, block.template head<Config>());
        tma_load_3d(smem_.stats[block_.slot], params_.stats, q_full, visit.col / kStatsQueries * kStatsWords, 0,
                    block.template head<Config>());
        if (run_bytes > 0) {
            cp_async_bulk_load(&block.run, &run, sizeof(Run), q_full);
        }

        const auto dout = dout_position();
        uint64_t& dout_full = smem_.dout_full[dout.slot];
        mbarrier_wait(smem_.dout_empty[dout.slot], dout.phase ^ 1);
        mbarrier_arrive_expect_tx(dout_full, sizeof(smem_.dout[0]));
        load_for_all<1>(smem_.dout[dout.slot], params_.dout, dout_full, visit.col, block.template head<Config>());
        block_.advance();
        ++num_blocks_;
    }

    __device__ __forceinline__ auto dout_position() const {
        if constexpr (Config::kDoutStages == Config::kStages) {
            return block_;
        } else {
            constexpr int kStages = Config::kDoutStages;
            return Position<kStages>{num_blocks_ % kStages, uint32_t(num_blocks_) / kStages % 2};
        }
    }

    template <class Slabs>
    __device__ __forceinline__ void load(Slabs& slabs, const TensorMap& map, uint64_t& full, int row, int head) {
#pragma unroll
        for (int slab = 0; slab < Config::kSlabs; ++slab) {
            tma_load_3d(slabs[slab], map, full, slab * Config::kSlabCols, row, head);
        }
    }

    // What all thread blocks of a cluster need: each loads some slabs, the first one those from slab `kFirst` on.
    template <int kFirst, class Slabs>
    __device__ __forceinline__ void load_for_all(Slabs& slabs, const TensorMap& map, uint64_t& full, int row,
                                                 int head) {
        if constexpr (Config::kCtas == 1) {
            load(slabs, map, full, row, head);
        } else {
#pragma unroll
            for (int slab = 0; slab < Config::kSlabs; ++slab) {
                if ((slab ^ kFirst) % Config::kCtas == rank_in_cluster<Config>()) {
                    tma_load_3d_to_both(slabs[slab], map, full, slab * Config::kSlabCols, row, head);
                }
            }
        }
    }

    // The tile that is being loaded.
    __device__ __forceinline__ const TileOfHead& work() const { return smem_.work[smem_.kv_phase ^ 1]; }

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    Position<Config::kStages> block_;
    int num_blocks_ = 0;
};

}   // namespace ffa::backward
