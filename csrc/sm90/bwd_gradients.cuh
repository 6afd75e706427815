// How a warp of the backward kernel gets rid of dk or dv of its 16 keys, or of both: to the output, by way of what the other
// parts have where the tile is in parts.
#pragma once

#include "bwd_shared.cuh"

namespace ffa {

template <class Config>
class KeyGradients {
public:
    using Element = typename Config::Element;
    static constexpr int kGrad = Config::kHeadDim / 2;   // registers of a thread
    using Grad = float[kGrad];

    __device__ __forceinline__ KeyGradients(const typename Config::Params& params, int lane) : params_(params), lane_(lane) {}

    // The first of the warp, of those of its thread block.
    __device__ __forceinline__ int row_in_block() const {
        return (Config::kIsWide ? warp() % (Config::kRows / kWarpRows) : warp()) * kWarpRows;
    }

    __device__ __forceinline__ int row_in_tile() const { return first_row_of_block<Config>() + row_in_block(); }

    // Leaves what this part of a tile has, each warp for itself. The last one to arrive then has the sums of all, in fp32
    // and in the order of the parts, so that they repeat bit for bit; the others have zeros. Returns the key up to which
    // there is something to store: those others have nothing.
    template <class... Grads>
    __device__ __forceinline__ int join_parts(const TileOfHead& work, Grads&... grads) const {
        constexpr int kPartialsOfGrad = kGrad / 4 * 32;   // float4
        constexpr int kPartialsOfWarp = sizeof...(Grads) * kPartialsOfGrad;
        const Agenda& agenda = params_.lists[kNear].agenda;   // parts of all lists lie together
        const int heads = agenda.heads_per_section;
        float4* const partials = reinterpret_cast<float4*>(agenda.partials) +
                                 static_cast<long long>(work.slot * Config::kTileWarps + warp_of_tile()) * kPartialsOfWarp + lane_;
        const int part_stride = heads * Config::kTileWarps * kPartialsOfWarp;
        int first = 0;   // of a gradient
        ((leave(grads, partials + work.part * part_stride + first), first += kPartialsOfGrad), ...);
        __threadfence();
        __syncwarp();
        int num_arrived = 0;
        if (lane_ == 0) {
            num_arrived = atomicAdd(agenda.arrivals + work.slot * Config::kTileWarps + warp_of_tile(), 1);
        }
        const bool is_last = __shfl_sync(0xffffffff, num_arrived, 0) + 1 == work.num_parts;
        __threadfence();
#pragma unroll 1
        for (int part = 0; part < (is_last ? work.num_parts : 0); ++part) {
            first = 0;
            ((add(grads, partials + part * part_stride + first), first += kPartialsOfGrad), ...);
        }
        return is_last ? work.tile.row_end : work.tile.row_begin;
    }

    // By way of shared memory, where there is room for so many slabs, to `rows`.
    template <int kSlabsAtOnce>
    __device__ __forceinline__ void store(const Grad& grad, Element* tile_rows, const TensorMap& map, void* rows,
                                          const TileOfHead& work, int store_end) const {
        Element* const staging = tile_rows + row_in_block() * Config::kSlabCols;
        store_slabs<0, kSlabsAtOnce>(grad, staging, map, rows, work, store_end);
    }

    // Counts what this warp has stored of far tiles. Who comes last says that all of it is there.
    __device__ __forceinline__ void tell(const TileOfHead& work, int store_end) const {
        if (lane_ == 0 && work.is_far && store_end > work.tile.row_begin) {
            cp_async_bulk_wait_group<0>();
            fence_proxy_async_global();
            __threadfence_system();
            if (atomicAdd(&params_.lists[kFar].agenda.counters->num_unfinished, -1) == 1 && params_.are_complete != nullptr) {
                __threadfence_system();
                store_release_system(params_.are_complete, 1);
            }
        }
        __syncwarp();
    }

private:
    __device__ __forceinline__ static int warp_of_tile() {
        return rank_in_cluster<Config>() * (Config::kTileWarps / Config::kCtas) + warp();
    }

    // Of the consumers, which are the first ones. No register keeps it.
    __device__ __forceinline__ static int warp() { return opaque(threadIdx.x) / 32; }

    __device__ __forceinline__ static void leave(Grad& grad, float4* partials) {
#pragma unroll
        for (int i = 0; i < kGrad / 4; ++i) {
            partials[32 * i] = {grad[4 * i], grad[4 * i + 1], grad[4 * i + 2], grad[4 * i + 3]};
            grad[4 * i] = grad[4 * i + 1] = grad[4 * i + 2] = grad[4 * i + 3] = 0.f;
        }
    }

    __device__ __forceinline__ static void add(Grad& grad, const float4* partials) {
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
    template <int kFirst, int kSlabsAtOnce>
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
                for (int slab = kFirst; slab < kEnd; ++slab) {
                    tma_store_3d(map, staging + (slab - kFirst) * Config::kKSlab, slab * Config::kSlabCols, warp_row,
                                 work.kv_head);
                }
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read<0>();
            }
        } else {
            __syncwarp();
            store_rows<kFirstCol, kEndCol>(staging, warp_row, rows, work.kv_head, store_end);
        }
        __syncwarp();   // others may be written there
        if constexpr (kEnd < Config::kSlabs) {
            store_slabs<kEnd, kSlabsAtOnce>(grad, staging, map, rows, work, store_end);
        }
    }

    template <int kFirstCol, int kEndCol>
    __device__ __forceinline__ void store_rows(const Element* staging, int warp_row, void* rows, int kv_head,
                                               int store_end) const {
        constexpr int kChunksOfRow = Config::kHeadDim / 8;
        constexpr int kChunks = (kEndCol - kFirstCol) / 8;
        const int4* const chunks = reinterpret_cast<const int4*>(staging);
        for (int i = lane_; i < kWarpRows * kChunks; i += 32) {
            const int row = i / kChunks;
            const int chunk = i % kChunks;
            if (warp_row + row < store_end) {
                const long long index =
                    static_cast<long long>(warp_row + row) * params_.lists[kNear].agenda.num_heads + kv_head;
                static_cast<int4*>(rows)[index * kChunksOfRow + kFirstCol / 8 + chunk] =
                    chunks[chunk / 8 * (kKSlabBytes / 16) + row * 8 + (chunk % 8 ^ row % 8)];
            }
        }
    }

    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);

    const typename Config::Params& params_;
    const int lane_;
};

}  // namespace ffa
