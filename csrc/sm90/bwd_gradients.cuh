// How a warp of the backward kernel gets rid of dk or dv of its 16 keys: to the next part of the tile, if it is divided, or to
// the output.
#pragma once

#include "bwd_shared.cuh"

namespace ffa {

template <class Config>
class KeyGradients {
public:
    using Element = typename Config::Element;
    static constexpr int kGrad = Config::kHeadDim / 2;   // registers of a thread
    using Grad = float[kGrad];

    __device__ __forceinline__ KeyGradients(const BackwardParams& params, int warpgroup, int warp, int lane)
        : params_(params), warpgroup_(warpgroup), warp_(warp), lane_(lane) {}

    // The first of the warp.
    __device__ __forceinline__ int row_in_tile() const {
        return warpgroup_ * Config::kRows + warp_ * Config::kWarpRows;
    }

    // Adds what the parts in front of this one have, each warp for itself, and hands the sums over to the next one.
    __device__ __forceinline__ void join_parts(Grad& dk, Grad& dv, const TileOfHead& work) const {
        const int tile = work.tile_index * params_.schedule.num_heads + work.kv_head;
        const int index = tile * kSplitArrivals + warpgroup_ * 4 + warp_;
        int* const arrivals = params_.split.arrivals + index;
        while (!__all_sync(0xffffffff, load_acquire(arrivals) >= work.part)) {
        }
        float4* const partials = reinterpret_cast<float4*>(params_.split.partials) + index * kPartialsOfWarp + lane_;
        const bool has_partials = work.part > 0;
        join(dv, partials, has_partials);
        join(dk, partials + kPartialsOfWarp / 2, has_partials);
        __threadfence();
        __syncwarp();
        if (lane_ == 0) {
            add_release(arrivals, 1);
        }
    }

    // Registers to shared memory in the 128-byte swizzle of the tensor map, where 16-byte chunk c of row r lies at
    // c ^ (r % 8), and from there to `rows`.
    __device__ __forceinline__ void store(const Grad& grad, Element* tile_rows, const TensorMap& map, void* rows,
                                          const TileOfHead& work) const {
        Element* const staging = tile_rows + row_in_tile() * Config::kSlabCols;
        const int row = lane_ % 16;
        const uint32_t address = shared_address(staging) + row * 128;
#pragma unroll
        for (int i = 0; i < kGrad / 8; ++i) {
            const int slab = i / 4;
            const int chunk = 2 * (i % 4) + lane_ / 16;
            stmatrix_x4(address + slab * kKSlabBytes + ((chunk ^ (row % 8)) << 4),
                        pack<Element>(grad[8 * i], grad[8 * i + 1]), pack<Element>(grad[8 * i + 2], grad[8 * i + 3]),
                        pack<Element>(grad[8 * i + 4], grad[8 * i + 5]),
                        pack<Element>(grad[8 * i + 6], grad[8 * i + 7]));
        }
        const int warp_row = work.tile.row_begin + row_in_tile();
        if (warp_row + Config::kWarpRows <= work.store_end) {
            fence_proxy_async_shared();
            __syncwarp();
            if (lane_ == 0) {
#pragma unroll
                for (int slab = 0; slab < Config::kSlabs; ++slab) {
                    tma_store_3d(map, staging + slab * Config::kKSlab, slab * Config::kSlabCols, warp_row,
                                 work.kv_head);
                }
                cp_async_bulk_commit_group();
            }
        } else {
            __syncwarp();
            store_rows(staging, warp_row, rows, work);
        }
    }

private:
    __device__ __forceinline__ static void join(Grad& grad, float4* partials, bool has_partials) {
#pragma unroll
        for (int i = 0; i < kGrad / 4; ++i) {
            const float4 partial = load_if(has_partials, partials + 32 * i);
            grad[4 * i] += partial.x;
            grad[4 * i + 1] += partial.y;
            grad[4 * i + 2] += partial.z;
            grad[4 * i + 3] += partial.w;
            partials[32 * i] = {grad[4 * i], grad[4 * i + 1], grad[4 * i + 2], grad[4 * i + 3]};
        }
    }

    __device__ __forceinline__ void store_rows(const Element* staging, int warp_row, void* rows,
                                               const TileOfHead& work) const {
        constexpr int kChunks = Config::kHeadDim / 8;
        const int4* const chunks = reinterpret_cast<const int4*>(staging);
        for (int i = lane_; i < Config::kWarpRows * kChunks; i += 32) {
            const int row = i / kChunks;
            const int chunk = i % kChunks;
            if (warp_row + row < work.store_end) {
                const long long index =
                    static_cast<long long>(warp_row + row) * params_.schedule.num_heads + work.kv_head;
                static_cast<int4*>(rows)[index * kChunks + chunk] =
                    chunks[chunk / 8 * (kKSlabBytes / 16) + row * 8 + (chunk % 8 ^ row % 8)];
            }
        }
    }

    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);
    static constexpr int kPartialsOfWarp = 2 * kGrad / 4 * 32;   // float4

    const BackwardParams& params_;
    const int warpgroup_;
    const int warp_;
    const int lane_;
};

}  // namespace ffa
