// Rows of dq from sums that are complete: scaled, rounded, in the order of their columns.
#pragma once

#include "backward/params.cuh"
#include "backward/schedule/walk.cuh"
#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa::backward {

// By a warp, so many groups of columns at a time; of `kHeadDim` columns of the sums, dq has the first `kCols`.
template <class Element, int kHeadDim, int kCols, int kColGroupsAtOnce>
class DqRounding {
public:
    __device__ __forceinline__ explicit DqRounding(const DqItems& items) : items_(items) {}

    // The four lanes of a quad have 8 columns of two rows together. Of two such groups of columns, each gets one row.
    __device__ __forceinline__ void round(int head, int group) const {
        const int first_row = group * kDqGroupRows;
        const int row = first_row + lane() / 4 + lane() % 2 * (kDqGroupRows / 2);
        const float4* from = reinterpret_cast<const float4*>(dq_rows<kHeadDim>(items_.sums, head, first_row)) + lane();
        Element* to = static_cast<Element*>(items_.dq) +
                      (static_cast<long long>(row) * items_.num_heads + head) * kCols + lane() % 4 / 2 * kDqGroupCols;
        const bool is_there = row < items_.total_q;
#pragma unroll 1
        for (int i = 0; i < kHeadDim / kDqGroupCols / kColGroupsAtOnce; ++i) {
            float4 sums[kColGroupsAtOnce];
#pragma unroll
            for (int j = 0; j < kColGroupsAtOnce; ++j) {
                sums[j] = __ldcg(from + 32 * j);
            }
#pragma unroll
            for (int j = 0; j < kColGroupsAtOnce; j += 2) {
                const uint4 cols =
                    transposed({scaled(sums[j].x, sums[j].y), scaled(sums[j].z, sums[j].w),
                                scaled(sums[j + 1].x, sums[j + 1].y), scaled(sums[j + 1].z, sums[j + 1].w)});
                const int first_col = (i * kColGroupsAtOnce + j + lane() % 4 / 2) * kDqGroupCols;
                if (is_there && (kCols == kHeadDim || first_col < kCols)) {
                    *reinterpret_cast<uint4*>(to + j * kDqGroupCols) = cols;
                }
            }
            from += 32 * kColGroupsAtOnce;
            to += kColGroupsAtOnce * kDqGroupCols;
        }
    }

private:
    static_assert(kHeadDim / kDqGroupCols % kColGroupsAtOnce == 0 && kColGroupsAtOnce % 2 == 0,
                  "whole steps, whole pairs");

    // No register keeps it: in the main kernel there are few.
    __device__ __forceinline__ static int lane() { return opaque(threadIdx.x) % 32; }

    __device__ __forceinline__ uint32_t scaled(float first, float second) const {
        return pack<Element>(first * items_.softmax_scale, second * items_.softmax_scale);
    }

    // The words of this lane's number that the lanes of the quad have.
    __device__ __forceinline__ uint4 transposed(const uint4& words) const {
        const bool is_upper = lane() % 4 / 2 != 0, is_odd = lane() % 2 != 0;
        const uint2 received{shuffled(is_upper ? words.x : words.z, 2), shuffled(is_upper ? words.y : words.w, 2)};
        // Those that this pair of lanes wants, of lanes 0 and 1, and of lanes 2 and 3.
        const uint2 first = is_upper ? received : uint2{words.x, words.y};
        const uint2 second = is_upper ? uint2{words.z, words.w} : received;
        const uint32_t from_first = shuffled(is_odd ? first.x : first.y, 1);
        const uint32_t from_second = shuffled(is_odd ? second.x : second.y, 1);
        return is_odd ? uint4{from_first, first.y, from_second, second.y}
                      : uint4{first.x, from_first, second.x, from_second};
    }

    __device__ __forceinline__ static uint32_t shuffled(uint32_t word, int distance) {
        return __shfl_xor_sync(0xffffffff, word, distance);
    }

    const DqItems& items_;
};

// When rows of dq will be complete: how many times the main kernel adds to each 16 of them, once for each run of a tile
// that holds some, and whether it does so head by head.

// `wanted` of DqVisits, with an int behind it for the way there, comes about in three steps; each by one thread block.
inline __device__ void clear_dq_visits(int* wanted, int row_groups) {
    compact_for_each(row_groups + 1, [&](int group) { wanted[group] = 0; });
}

// Where visits begin and end, of each list of tiles.
template <int kBlockCols>
__device__ void note_dq_visits(const Tile* tiles, const Run* runs, int num_tiles, int* wanted) {
    compact_for_each(num_tiles, [&](int i) {
        const Tile& tile = tiles[i];
#pragma unroll 1
        for (int run = tile.run_begin; run < tile.run_end && tile.row_begin < tile.row_end; ++run) {
            const RunWalk<kBlockCols> walk{runs[run], 1, false};
            if (walk.first_group() < walk.end_group()) {
                atomicAdd(&wanted[walk.first_group()], 1);
                atomicAdd(&wanted[walk.end_group()], -1);
            }
        }
    });
}

inline __device__ void count_dq_visits(int* wanted, int row_groups) {
    compact_prefix_sum(
        row_groups, [&](int group) { return __ldcg(&wanted[group]); },
        [&](int group, int before) { wanted[group] = before + __ldcg(&wanted[group]); });
}

// Adds 1 to `more_head_by_head` for each tile that is walked so, -1 for others; by one thread block.
template <int kBlockCols>
__device__ void count_walks(const Tile* tiles, const Run* runs, int num_tiles, int& more_head_by_head) {
    compact_for_each(num_tiles, [&](int i) {
        if (tiles[i].row_begin < tiles[i].row_end) {
            atomicAdd(&more_head_by_head, is_walked_head_by_head<kBlockCols>(tiles[i], runs) ? 1 : -1);
        }
    });
}

}   // namespace ffa::backward
