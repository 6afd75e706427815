// Which item of the agenda a thread block takes next. No block waits while another has work left.
//
// Where there are far keys, they have an agenda of their own. A block that draws looks whether they are there: then theirs come
// first, so that their gradients can leave while near keys are worked on. If they are not there and no near ones are left, the
// block ends, and keeps its SM from nobody: the same kernel is launched once more behind their arrival, for what is left.
#pragma once

#include "bwd_agenda.cuh"
#include "ptx.cuh"

namespace ffa {

template <class Config, bool kHasFarKeys = Config::kHasFarKeys>
class Items;

// The first item of a block is its index, the others are drawn from a counter.
template <class Config>
class Items<Config, false> {
public:
    __device__ __forceinline__ explicit Items(const typename Config::Params& params)
        : agenda_(params.keys[kNear].agenda), item_(blockIdx.x) {}

    __device__ __forceinline__ bool has_work() const { return item_ < num_items(); }

    __device__ __forceinline__ int of_keys() const { return kNear; }

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
    __device__ __forceinline__ explicit Items(const typename Config::Params& params) : params_(params) { advance(); }

    __device__ __forceinline__ bool has_work() const { return item_ < num_items(); }

    __device__ __forceinline__ int of_keys() const { return keys_; }

    __device__ __forceinline__ const AgendaEntry& entry() const {
        return agenda().entries[item_ / agenda().heads_per_section];
    }

    __device__ __forceinline__ int head_in_section() const { return item_ % agenda().heads_per_section; }

    __device__ __forceinline__ void advance() {
        keys_ = have_arrived() ? kFar : kNear;
        draw();
        if (keys_ == kFar && !has_work()) {
            keys_ = kNear;
            draw();
        }
    }

    // Waves of near items are torn apart when far keys arrive.
    __device__ __forceinline__ int wave_in_step() const {
        return keys_ == kFar && item_ < agenda().counters->num_in_step ? item_ / int(gridDim.x) : kNoWave;
    }

private:
    __device__ __forceinline__ const Agenda& agenda() const { return params_.keys[keys_].agenda; }

    __device__ __forceinline__ int num_items() const { return *agenda().num_entries * agenda().heads_per_section; }

    __device__ __forceinline__ void draw() { item_ = atomicAdd(&agenda().counters->ticket, 1); }

    __device__ __forceinline__ bool have_arrived() const {
        const bool they_have = params_.have_arrived == nullptr || load_acquire_system(params_.have_arrived) != 0;
        fence_proxy_async_global();   // TMA reads them
        return they_have;
    }

    const typename Config::Params& params_;
    int item_, keys_;
};

}  // namespace ffa
