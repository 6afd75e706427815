// How a warp of the backward kernel gets rid of dk or dv of its 16 keys, or of both: to the output, by way of what the
// other parts have where the tile is in parts.
#pragma once

#include "backward/config.cuh"

namespace ffa::backward {

template <class Config>
class KeyGradients {
public:
    using Element = typename Config::Element;
    static constexpr int kGrad = Config::kHeadDim / 2;   // registers of a thread
    using Grad = float[kGrad];

    __device__ __forceinline__ KeyGradients(const typename Config::Params& params, int lane)
        : params_(params), lane_(lane) {}

    // The first of the warp, of those of its thread block.
    __device__ __forceinline__ int row_in_block() const {
        return (Config::kIsWide ? warp() % (Config::kRows / kWarpRows) : warp()) * kWarpRows;
    }

    __device__ __forceinline__ int row_in_tile() const { return first_row_of_block<Config>() + row_in_block(); }

    // Each warp for itself leaves what this part of a tile has. The last one to arrive then has the sums of all, in
    // fp32 and in the order of the parts, so that they repeat bit for bit. Where parts are handed on, a part waits for
    // the one before, adds what that has left, and leaves the sums; the one of the first query heads is the last.
    // Returns the key up to which there is something to store: those that are not the last have nothing.
    template <class... Grads>
    __device__ __forceinline__ int join_parts(const TileOfHead& work, Grads&... grads) const {
        float4* const partials = partials_of<sizeof...(Grads)>(work);
        const int part_stride =
            params_.agenda.heads_per_section * Config::kTileWarps * sizeof...(Grads) * kPartialsOfGrad;
        const bool is_handed_on = Config::kHandsOn && __any_sync(0xffffffff, work.turn != AgendaEntry::kNoTurn);
        int num_added;
        bool is_last;
        if (is_handed_on) {
            await_turn(work);
            num_added = work.part + 1 < work.num_parts;
            is_last = work.part == 0;
        } else {
            store_partials(partials + work.part * part_stride, grads...);
            (clear(grads), ...);
            is_last = arrive(work) + 1 == work.num_parts;
            num_added = is_last ? work.num_parts : 0;
        }
#pragma unroll 1
        for (int part = 0; part < num_added; ++part) {
            add_partials(partials + part * part_stride, grads...);
        }
        if (is_handed_on) {
            if (__any_sync(0xffffffff, !is_last)) {
                store_partials(partials, grads...);
            }
            end_turn(work);
        }
        return is_last ? work.tile.row_end : work.tile.row_begin;
    }

    // By way of shared memory, where there is room for so many slabs, to `rows`, which have the first `kCols` columns.
    template <int kSlabsAtOnce, int kCols>
    __device__ __forceinline__ void store(const Grad& grad, Element* tile_rows, const TensorMap& map, void* rows,
                                          const TileOfHead& work, int store_end) const {
        Element* const staging = tile_rows + row_in_block() * Config::kSlabCols;
        store_slabs<0, kSlabsAtOnce, kCols>(grad, staging, map, rows, work, store_end);
    }

private:
    __device__ __forceinline__ static int warp_of_tile() {
        return rank_in_cluster<Config>() * (Config::kTileWarps / Config::kCtas) + warp();
    }

    // Of the consumers, which are the first ones. No register keeps it.
    __device__ __forceinline__ static int warp() { return opaque(threadIdx.x) / 32; }

    static constexpr int kPartialsOfGrad = kGrad / 4 * 32;   // float4, of a warp

    // Of the first part.
    template <int kGrads>
    __device__ __forceinline__ float4* partials_of(const TileOfHead& work) const {
        return reinterpret_cast<float4*>(params_.agenda.partials) +
               static_cast<long long>(work.slot * Config::kTileWarps + warp_of_tile()) * (kGrads * kPartialsOfGrad) +
               lane_;
    }

    // How many parts have come to their end.
    __device__ __forceinline__ int* arrivals_of(const TileOfHead& work) const {
        return params_.agenda.arrivals + work.slot * Config::kTileWarps + warp_of_tile();
    }

    // How many have before this one.
    __device__ __forceinline__ int arrive(const TileOfHead& work) const {
        __threadfence();
        __syncwarp();
        int num_arrived = 0;
        if (lane_ == 0) {
            num_arrived = atomicAdd(arrivals_of(work), 1);
        }
        num_arrived = __shfl_sync(0xffffffff, num_arrived, 0);
        __threadfence();
        return num_arrived;
    }

    __device__ __forceinline__ void await_turn(const TileOfHead& work) const {
        if (lane_ == 0) {
            while (load_acquire(arrivals_of(work)) != work.turn) {
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void end_turn(const TileOfHead& work) const {
        __threadfence();
        __syncwarp();
        if (lane_ == 0) {
            add_release(arrivals_of(work), 1);
        }
    }

    template <class... Grads>
    __device__ __forceinline__ static void store_partials(float4* partials, const Grads&... grads) {
        int first = 0;   // of a gradient
        ((store_partial(grads, partials + first), first += kPartialsOfGrad), ...);
    }

    template <class... Grads>
    __device__ __forceinline__ static void add_partials(const float4* partials, Grads&... grads) {
        int first = 0;
        ((add_partial(grads, partials + first), first += kPartialsOfGrad), ...);
    }

    __device__ __forceinline__ static void store_partial(const Grad& grad, float4* partials) {
#pragma unroll
        for (int i = 0; i < kGrad / 4; ++i) {
            partials[32 * i] = {grad[4 * i], grad[4 * i + 1], grad[4 * i + 2], grad[4 * i + 3]};
        }
    }

    __device__ __forceinline__ static void clear(Grad& grad) {
#pragma unroll
        for (float& x : grad) {
            x = 0.f;
        }
    }

    __device__ __forceinline__ static void add_partial(Grad& grad, const float4* partials) {
#pragma unroll
        for (int i = 0; i < kGrad / 4; ++i) {
            const float4 partial = partials[32 * i];
            grad[4 * i] += partial.x;
            grad[4 * i + 1] += partial.y;
            grad[4 * i + 2] += partial.z;
            grad[4 * i + 3] += partial.w;
        }
    }

    // From slab `kFirst` on, so many at a time.
    template <int kFirst, int kSlabsAtOnce, int kCols>
    __device__ __forceinline__ void store_slabs(const Grad& grad, Element* staging, const TensorMap& map, void* rows,
                                                const TileOfHead& work, int store_end) const {
        constexpr int kEnd = kFirst + kSlabsAtOnce < Config::kSlabs ? kFirst + kSlabsAtOnce : Config::kSlabs;
        constexpr int kFirstCol = kFirst * Config::kSlabCols;
        constexpr int kEndCol = kEnd < Config::kSlabs ? kEnd * Config::kSlabCols : Config::kHeadDim;
        stage_rows<Element, kKSlabBytes, kFirstCol / 2, kEndCol / 2>(grad, staging, lane_);
        const int warp_row = work.tile.row_begin + row_in_tile();
        if (warp_row + kWarpRows <= store_end) {
            fence_proxy_async_shared();
            __syncwarp();
            if (lane_ == 0) {
#pragma unroll
                for (int slab = kFirst; slab < kEnd && slab * Config::kSlabCols < kCols; ++slab) {
                    tma_store_3d(map, staging + (slab - kFirst) * Config::kKSlab, slab * Config::kSlabCols, warp_row,
                                 work.kv_head);
                }
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read<0>();
            }
        } else {
            __syncwarp();
            store_rows<kFirstCol, kEndCol, kCols>(staging, warp_row, rows, work.kv_head, store_end);
        }
        __syncwarp();   // others may be written there
        if constexpr (kEnd < Config::kSlabs) {
            store_slabs<kEnd, kSlabsAtOnce, kCols>(grad, staging, map, rows, work, store_end);
        }
    }

    template <int kFirstCol, int kEndCol, int kCols>
    __device__ __forceinline__ void store_rows(const Element* staging, int warp_row, void* rows, int kv_head,
                                               int store_end) const {
        constexpr int kChunksOfRow = kCols / 8;
        constexpr int kChunks = (kEndCol - kFirstCol) / 8;
        const int4* const chunks = reinterpret_cast<const int4*>(staging);
        for (int i = lane_; i < kWarpRows * kChunks; i += 32) {
            const int row = i / kChunks;
            const int chunk = i % kChunks;
            if (warp_row + row < store_end && (kEndCol <= kCols || kFirstCol / 8 + chunk < kChunksOfRow)) {
                const long long index = static_cast<long long>(warp_row + row) * params_.agenda.num_heads + kv_head;
                static_cast<int4*>(rows)[index * kChunksOfRow + kFirstCol / 8 + chunk] =
                    chunks[chunk / 8 * (kKSlabBytes / 16) + row * 8 + (chunk % 8 ^ row % 8)];
            }
        }
    }

    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);

    const typename Config::Params& params_;
    const int lane_;
};

}   // namespace ffa::backward
