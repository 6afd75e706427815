// How the output of a consumer warpgroup leaves: merged with what there is from before, in fp32 where it is a split,
// rounded through the buffer of its Q elsewhere.
#pragma once

#include "common/store.cuh"
#include "forward/mainloop.cuh"

namespace ffa::forward {

// How much this output and the prior one weigh in each row; `lse` becomes that of both.
template <class Config>
__device__ __forceinline__ void Consumer<Config>::merge_weights(float (&normalize)[2], float (&keep)[2],
                                                                float (&lse)[2], const TileOfHead& tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row(tile) + 8 * half;
        const float prior = row < tile.row_end ? params_.prior_lse[wide_lse_offset(tile) + row] : -kInfinity;
        const float peak = fmaxf(prior, lse[half]);
        const float reference = peak == -kInfinity ? 0.f : peak;
        const float own = __expf(lse[half] - reference);
        const float other = __expf(prior - reference);
        const float total = own + other;
        const float scale = total == 0.f ? 0.f : 1.f / total;
        normalize[half] *= own * scale;
        keep[half] = other * scale;
        lse[half] = reference + __logf(total);
    }
}

template <class Config>
__device__ __forceinline__ void Consumer<Config>::add_prior(Out& out, const float (&keep)[2],
                                                            const TileOfHead& tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row(tile) + 8 * half;
        if (row < tile.row_end) {
            const float2* const prior = reinterpret_cast<const float2*>(params_.prior_out + wide_offset(tile, row));
#pragma unroll
            for (int i = 0; i < Config::kColsOfV / 8; ++i) {
                const float2 pair = prior[4 * i];
                out[4 * i + 2 * half] += keep[half] * pair.x;
                out[4 * i + 2 * half + 1] += keep[half] * pair.y;
            }
        }
    }
}

// A quad writes 32 bytes of a row at a time.
template <class Config>
__device__ __forceinline__ void Consumer<Config>::store_wide(const Out& out, const TileOfHead& tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row(tile) + 8 * half;
        if (row < tile.row_end) {
            float2* const out_row = reinterpret_cast<float2*>(params_.wide_out + wide_offset(tile, row));
#pragma unroll
            for (int i = 0; i < Config::kColsOfV / 8; ++i) {
                out_row[4 * i] = make_float2(out[4 * i + 2 * half], out[4 * i + 2 * half + 1]);
            }
        }
    }
}

template <class Config>
__device__ __forceinline__ void Consumer<Config>::store_lse(const float (&lse)[2], bool is_wide,
                                                            const TileOfHead& tile) const {
    float* const all = is_wide ? params_.wide_lse : params_.lse;
    const long long at = is_wide ? wide_lse_offset(tile) : tile.head * static_cast<long long>(params_.total_q);
    if (lane_ % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row(tile) + 8 * half;
            if (row < tile.row_end) {
                all[at + row] = lse[half];
            }
        }
    }
}

// Whether the tile has a split from before, whose keys it has not walked.
template <class Config>
__device__ __forceinline__ bool Consumer<Config>::merges_prior(bool is_split) const {
    if constexpr (Config::kIsEarly) {
        return is_split && __any_sync(0xffffffff, smem_.split_items[q_phase_ % Config::kQBuffers] < 0);
    }
    return params_.prior_lse != nullptr && is_split;
}

template <class Config>
__device__ __forceinline__ bool Consumer<Config>::stores_wide(bool is_split) const {
    if constexpr (Config::kIsEarly) {
        return is_split && !merges_prior(is_split);
    }
    return params_.wide_out != nullptr && is_split;
}

// Whoever works on the split waits for nobody.
template <class Config>
__device__ __forceinline__ void Consumer<Config>::wait_for_split() const {
    if constexpr (Config::kIsEarly) {
        const int* const num_stored = params_.num_stored + ~smem_.split_items[q_phase_ % Config::kQBuffers];
        while (!__all_sync(0xffffffff, load_acquire(num_stored) == 4 * Config::kConsumers)) {
        }
    }
}

template <class Config>
__device__ __forceinline__ void Consumer<Config>::announce_split() const {
    if constexpr (Config::kIsEarly) {
        __syncwarp();
        if (lane_ == 0) {
            add_release(params_.num_stored + smem_.split_items[q_phase_ % Config::kQBuffers], 1);
        }
        __syncwarp();
    }
}

template <class Config>
__device__ __forceinline__ int Consumer<Config>::split_shift() const {
    return smem_.split_shifts[q_phase_ % Config::kQBuffers];
}

// From where a row is counted in `wide_lse` or `prior_lse`.
template <class Config>
__device__ __forceinline__ long long Consumer<Config>::wide_lse_offset(const TileOfHead& tile) const {
    return tile.head * params_.wide_rows + split_shift();
}

// Of this thread's first two columns in a row of `wide_out`.
template <class Config>
__device__ __forceinline__ long long Consumer<Config>::wide_offset(const TileOfHead& tile, int row) const {
    const long long wide_row = row + split_shift();
    return (wide_row * params_.schedule.num_heads + tile.head) * Config::kColsOfV + 2 * (lane_ % 4);
}

// Each warp stores its own 16 rows: with TMA where all of them belong to the tile, else row by row, because the
// rows behind the tile are another's.
template <class Config>
__device__ __forceinline__ void Consumer<Config>::store(const Out& out, const TileOfHead& tile) {
    const int row_in_tile = warpgroup_ * Config::kRows + warp_ * kWarpRows;
    Element* const staging = q_buffer() + row_in_tile * Config::kSlabCols;
    barrier_sync(kWarpgroupDone + warpgroup_, Config::kWarpgroup);   // all four warps have read Q
    stage_rows<Element, kQSlabBytes>(out, staging, lane_);
    fence_proxy_async_shared();
    __syncwarp();
    const int warp_row = tile.row_begin + row_in_tile;
    if (warp_row + kWarpRows <= tile.row_end) {
        if (lane_ == 0) {
#pragma unroll
            for (int slab = 0; slab < Config::kVSlabs; ++slab) {
                tma_store_3d(params_.out, staging + slab * Config::kQSlab, slab * Config::kSlabCols, warp_row,
                             tile.head);
            }
            cp_async_bulk_commit_group();
        }
    } else {
        store_rows(staging, warp_row, tile);
    }
}

template <class Config>
__device__ __forceinline__ void Consumer<Config>::store_rows(const Element* staging, int warp_row,
                                                             const TileOfHead& tile) const {
    constexpr int kChunks = Config::kColsOfV / 8;
    const int4* const chunks = reinterpret_cast<const int4*>(staging);
    Element* const out_rows = static_cast<Element*>(params_.out_rows) + tile.head * params_.out_head_stride;
    for (int i = lane_; i < kWarpRows * kChunks; i += 32) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        if (warp_row + row < tile.row_end) {
            reinterpret_cast<int4*>(out_rows + (warp_row + row) * params_.out_row_stride)[chunk] =
                chunks[chunk / 8 * (kQSlabBytes / 16) + row * 8 + (chunk % 8 ^ row % 8)];
        }
    }
}

}   // namespace ffa::forward
