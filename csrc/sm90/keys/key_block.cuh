// A block of keys on its way through the rings of a kernel that walks by queries: what rows see of it.
#pragma once

#include "visibility/bits.cuh"
#include "visibility/block_table.cuh"
#include "visibility/intervals.cuh"
#include "visibility/mask.cuh"
#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

// What the producer says about a block of K.
struct alignas(16) KeyBlock {
    Run run;   // only at an edge of a run, where a row may not see every column; a map's that asks is not needed
    int first;
    uint32_t is_edge;
    uint32_t lines;   // of a block map: the bits of the warpgroups that see it, where each has a line of its own
    int word;         // of a block table: from the line of a row to the bits of this block
};

// What a warpgroup sees of a block, of whose tile it has `kRows` rows; the same to all lanes of a warp.
template <class Config, bool kHasStairs, class TileRows>
__device__ __forceinline__ Visibility visibility_of_block(const KeyBlock& block, const typename Config::Params& params,
                                                          const TileRows& tile, int warpgroup) {
    if constexpr (Config::kMapLines > 1) {
        if (!__any_sync(0xffffffff, block.lines >> warpgroup & 1)) {
            return kNothing;
        }
    }
    if (!__any_sync(0xffffffff, block.is_edge)) {
        return kAll;
    }
    if constexpr (Config::kMapAsks) {
        return kPartial;
    }
    const int row_begin = tile.row_begin + warpgroup * Config::kRows;
    const int row_end = min(row_begin + Config::kRows, tile.row_end);
    Visibility sees =
        visibility<kHasStairs>(block.run, params.edges, row_begin, row_end, block.first, Config::kBlockCols);
    if constexpr (Config::kHasBits) {
        if (sees != kNothing && has_bits(block.run)) {
            sees =
                visibility_of_bits<Config::kBlockCols>(sees, block.run, params.bits, row_begin, row_end, block.first);
        }
    }
    return Visibility(uniform(sees));
}

// Sets the scores that a block hides to -inf, but those that a table does; `row` is the first one of this thread.
template <class Config, bool kHasStairs, int kCount>
__device__ __forceinline__ void mask_block(float (&scores)[kCount], const KeyBlock& block,
                                           const typename Config::Params& params, int row, int lane) {
    const int col = block.first + 2 * (lane % 4);
    if constexpr (Config::kMapIntervals > 0) {
        apply_intervals<Config::kMapIntervals>(scores, params.intervals, row, params.total_q - 1, col);
    }
    if constexpr (Config::kMapAsks) {
        return;
    }
    apply_mask<kHasStairs>(scores, block.run, params.edges, row, col);
    if constexpr (Config::kHasBits) {
        if (has_bits(block.run)) {
            apply_bits(scores, block.run, params.bits, row, col);
        }
    }
}

}   // namespace ffa
