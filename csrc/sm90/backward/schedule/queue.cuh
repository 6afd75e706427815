// Which item of the agenda a thread block takes next. No block waits while another has work left.
#pragma once

#include "backward/schedule/agenda.cuh"
#include "backward/schedule/cluster.cuh"
#include "common/ptx.cuh"

namespace ffa::backward {

// The first item of a block is its index, the others are drawn from a counter. Where an item waits for those in front
// of it, the first one is drawn too: a block that does not run yet has none.
template <class Config>
class Items {
public:
    __device__ __forceinline__ explicit Items(const typename Config::Params& params)
        : agenda_(params.agenda), item_(blockIdx.x / Config::kCtas) {
        if (has_work() && all_are_drawn() && rank_in_cluster<Config>() == 0) {
            advance();
        }
    }

    // What another block has drawn, as it tells.
    __device__ __forceinline__ void set(int drawn) { item_ = drawn; }
    __device__ __forceinline__ int drawn() const { return item_; }

    __device__ __forceinline__ bool has_work() const { return item_ < num_items(); }

    __device__ __forceinline__ const AgendaEntry& entry() const {
        return agenda_.entries[item_ / agenda_.heads_per_section];
    }

    __device__ __forceinline__ int head_in_section() const { return item_ % agenda_.heads_per_section; }

    __device__ __forceinline__ void advance() {
        const int first_drawn = all_are_drawn() ? 0 : num_drawing();
        item_ = first_drawn < num_items() ? first_drawn + atomicAdd(&agenda_.counters->ticket, 1) : num_items();
    }

    // The item's, or kNoWave where nobody waits for others.
    __device__ __forceinline__ int wave_in_step() const {
        return item_ < agenda_.counters->num_in_step ? item_ / num_drawing() : kNoWave;
    }

private:
    __device__ __forceinline__ static int num_drawing() { return Config::kCtas > 1 ? num_clusters() : gridDim.x; }

    __device__ __forceinline__ int num_items() const { return *agenda_.num_entries * agenda_.heads_per_section; }

    // By an item that there is.
    __device__ __forceinline__ bool all_are_drawn() const {
        return Config::kIsDeterministic || (Config::kHandsOn && entry().turn != AgendaEntry::kNoTurn);
    }

    const Agenda& agenda_;
    int item_;
};

}   // namespace ffa::backward
