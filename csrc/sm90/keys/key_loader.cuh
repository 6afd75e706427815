// How blocks of K and V come into their rings: in the forward kernel, and in that of gradients of captured tensors.
#pragma once

#include "keys/key_block.cuh"
#include "common/pipeline.cuh"
#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

template <class Config, class Slab, int kSlabs>
__device__ __forceinline__ void load_slabs(Slab (&slabs)[kSlabs], const TensorMap& map, uint64_t& full, int row,
                                           int head) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        tma_load_3d(slabs[slab], map, full, slab * Config::kSlabCols, row, head);
    }
}

// The base of the thread that loads. `Storage` has the rings `k` and `v` with their barriers, and `blocks`.
template <class Config, class Storage>
class KeyLoader {
public:
    __device__ __forceinline__ KeyLoader(const typename Config::Params& params, Storage& smem)
        : params_(params), smem_(smem) {}

    // `edge` is the run whose edge the block lies on, if it does; it travels with the block, unless pairs look up what
    // they see. So do the bits of the warpgroups that see the block where a block map tells.
    __device__ __forceinline__ void load_k(int col, int head, const Run* edge, uint32_t lines = 0) {
        uint64_t& full = smem_.k_full[k_.slot];
        KeyBlock& block = smem_.blocks[k_.slot];
        mbarrier_wait(smem_.k_empty[k_.slot], k_.phase ^ 1);
        block.first = col;
        block.is_edge = edge != nullptr;
        if constexpr (Config::kMapLines > 1) {
            block.lines = lines;
        }
        if constexpr (Config::kMapTable) {
            if (edge) {
                block.word = word_of_block(*edge, col);
            }
        }
        if constexpr (Config::kMapAsks) {
            edge = nullptr;
        }
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

protected:
    const typename Config::Params& params_;
    Storage& smem_;

private:
    template <class Slabs>
    __device__ __forceinline__ void load(Slabs& slabs, const TensorMap& keys, uint64_t& full, int col, int head) const {
        load_slabs<Config>(slabs, keys, full, col, head);
    }

    // Remote keys lie in memory of their own; no run reaches from local ones into them. Each tensor map has a branch of
    // its own, where its address is known: chosen by an index, it makes all of the thread block 1 to 4 % slower.
    template <class Slabs>
    __device__ __forceinline__ void load(Slabs& slabs, const TensorMap (&local_and_remote)[2], uint64_t& full, int col,
                                         int head) const {
        if (Config::kHasRemoteKeys && col >= params_.remote_begin) {
            load_slabs<Config>(slabs, local_and_remote[1], full, col - params_.remote_begin, head);
        } else {
            load_slabs<Config>(slabs, local_and_remote[0], full, col, head);
        }
    }

    Position<Config::kKStages> k_;
    Position<Config::kVStages> v_;
};

}   // namespace ffa
