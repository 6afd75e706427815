// Which item of the agenda a thread block takes next. No block waits while another has work left.
//
// Tiles with far keys have an agenda of their own. A block that draws looks whether these keys are there: then far tiles come
// first, so that their gradients can leave while near ones are worked on. If they are not there and no near tile is left, the
// block ends, and keeps its SM from nobody: the same kernel is launched once more behind their arrival, for what is left.
#pragma once

#include "bwd_agenda.cuh"
#include "ptx.cuh"

namespace ffa {

template <class Config, bool kHasFarTiles = Config::kHasFarTiles>
class Items;

// The first item of a block is its index, the others are drawn from a counter.
template <class Config>
class Items<Config, false> {
public:
    __device__ __forceinline__ explicit Items(const typename Config::Params& params)
        : agenda_(params.lists[kNear].agenda), item_(blockIdx.x) {}

    __device__ __forceinline__ bool has_work() const { return item_ < num_items(); }

    __device__ __forceinline__ bool is_all() const { return true; }

    __device__ __forceinline__ int list() const { return kNear; }

    __device__ __forceinline__ const AgendaEntry& entry() const {
        return agenda_.entries[item_ / agenda_.heads_per_section];
    }

    __device__ __forceinline__ int head_in_section() const { return item_ % agenda_.heads_per_section; }

    __device__ __forceinline__ void advance() {
        item_ = gridDim.x < num_items() ? gridDim.x + atomicAdd(&agenda_.counters->ticket, 1) : num_items();
    }

    // The item's, or kNoWave where nobody waits for others.
    __device__ __forceinline__ int wave_in_step() const {
        return item_ < agenda_.counters->num_in_step ? item_ / int(gridDim.x) : kNoWave;
    }

private:
    __device__ __forceinline__ int num_items() const { return *agenda_.num_entries * agenda_.heads_per_section; }

    const Agenda& agenda_;
    int item_;
};

// All items are drawn from counters, which both launches share.
template <class Config>
class Items<Config, true> {
public:
    __device__ __forceinline__ explicit Items(const typename Config::Params& params) : params_(params) {
        list_ = kFar;
        if (blockIdx.x == 0 && num_items() == 0 && params_.are_complete != nullptr) {
            store_release_system(params_.are_complete, 1);   // no warp will store what there is none of
        }
        advance();
    }

    __device__ __forceinline__ bool has_work() const { return item_ < num_items(); }

    // Whether nothing is left for another launch.
    __device__ __forceinline__ bool is_all() const { return are_there_; }

    __device__ __forceinline__ int list() const { return list_; }

    __device__ __forceinline__ const AgendaEntry& entry() const {
        return agenda().entries[item_ / agenda().heads_per_section];
    }

    __device__ __forceinline__ int head_in_section() const { return item_ % agenda().heads_per_section; }

    __device__ __forceinline__ void advance() {
        are_there_ = have_arrived();
        list_ = are_there_ ? kFar : kNear;
        draw();
        if (list_ == kFar && !has_work()) {
            list_ = kNear;
            draw();
        }
    }

    // Waves of near items are torn apart when far keys arrive.
    __device__ __forceinline__ int wave_in_step() const {
        return list_ == kFar && item_ < agenda().counters->num_in_step ? item_ / int(gridDim.x) : kNoWave;
    }

private:
    __device__ __forceinline__ const Agenda& agenda() const { return params_.lists[list_].agenda; }

    __device__ __forceinline__ int num_items() const { return *agenda().num_entries * agenda().heads_per_section; }

    __device__ __forceinline__ void draw() { item_ = atomicAdd(&agenda().counters->ticket, 1); }

    __device__ __forceinline__ bool have_arrived() const {
        const bool they_have = params_.have_arrived == nullptr || load_acquire_system(params_.have_arrived) != 0;
        fence_proxy_async_global();   // TMA reads them
        return they_have;
    }

    const typename Config::Params& params_;
    int item_, list_;
    bool are_there_;   // far keys, when this item was drawn
};

}  // namespace ffa
