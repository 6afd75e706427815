// What a thread block of the forward kernel works on, item by item, where all keys are there when it begins: see
// scheduler_overlap.cuh for the others.
#pragma once

#include "common/scheduler.cuh"
#include "forward/params.cuh"

namespace ffa::forward {

struct SplitOfTile {
    int shift;   // as ForwardParams::split_shifts
    int item;    // of a launch that begins early: the item of kSplits that it is, or ~item if it is the rest of that
                 // tile
};

template <class Config, bool kIsEarly = Config::kIsEarly>
class Items;

template <class Config>
class Items<Config, false> : public Scheduler {
public:
    __device__ __forceinline__ explicit Items(const ForwardParams& params)
        : Scheduler(params.schedule), params_(params) {}

    __device__ __forceinline__ Tile tile(const WorkItem& item) const {
        const int first = Config::kMapLines > 0 ? item.head * params_.schedule.tiles_of_head : 0;
        return params_.schedule.tiles[first + item.tile];
    }

    __device__ __forceinline__ SplitOfTile split(const WorkItem& item) const {
        return {params_.split_shifts ? params_.split_shifts[item.tile] : 0, 0};
    }

private:
    const ForwardParams& params_;
};

}   // namespace ffa::forward
