// Which item of the agenda a thread block takes next. No block waits while another has work left.
//
// Tiles with remote keys have an agenda of their own. A block that draws looks whether these keys are there: then
// remote tiles come first, so that their gradients can leave while local ones are worked on. If they are not there and
// no local tile is left, the block ends, and keeps its SM from nobody: the same kernel is launched once more behind
// their arrival, for what is left.
#pragma once

#include "backward/schedule/agenda.cuh"
#include "backward/schedule/cluster.cuh"
#include "common/ptx.cuh"

namespace ffa {

template <class Config, bool kHasRemoteTiles = Config::kHasRemoteTiles>
class Items;

// The first item of a block is its index, the others are drawn from a counter. Where an item waits for those in front
// of it, the first one is drawn too: a block that does not run yet has none.
template <class Config>
class Items<Config, false> {
public:
    __device__ __forceinline__ explicit Items(const typename Config::Params& params)
        : agenda_(params.lists[kLocal].agenda), item_(blockIdx.x / Config::kCtas) {
        if (has_work() && all_are_drawn() && rank_in_cluster<Config>() == 0) {
            advance();
        }
    }

    // What another block has drawn, as it tells.
    __device__ __forceinline__ void set(int drawn) { item_ = drawn; }
    __device__ __forceinline__ int drawn() const { return item_; }

    __device__ __forceinline__ bool has_work() const { return item_ < num_items(); }

    __device__ __forceinline__ bool is_all() const { return true; }

    __device__ __forceinline__ int list() const { return kLocal; }

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

// All items are drawn from counters, which both launches share.
template <class Config>
class Items<Config, true> {
public:
    __device__ __forceinline__ explicit Items(const typename Config::Params& params) : params_(params) {
        drawn_ = kRemote;
        if (blockIdx.x == 0 && num_items() == 0 && params_.are_complete != nullptr) {
            store_release_system(params_.are_complete, 1);   // no warp will store what there is none of
        }
        if (rank_in_cluster<Config>() == 0) {
            advance();
        }
    }

    // What another block has drawn, as it tells.
    __device__ __forceinline__ void set(int drawn) {
        drawn_ = drawn;
        if (is_all()) {
            have_arrived();   // for this block too
        }
    }
    __device__ __forceinline__ int drawn() const { return drawn_; }

    __device__ __forceinline__ bool has_work() const { return item() < num_items(); }

    // Whether nothing is left for another launch.
    __device__ __forceinline__ bool is_all() const { return (drawn_ & kAreThere) != 0; }

    __device__ __forceinline__ int list() const { return drawn_ & 1; }

    __device__ __forceinline__ const AgendaEntry& entry() const {
        return agenda().entries[item() / agenda().heads_per_section];
    }

    __device__ __forceinline__ int head_in_section() const { return item() % agenda().heads_per_section; }

    __device__ __forceinline__ void advance() {
        const int are_there = have_arrived() ? kAreThere : 0;
        draw(are_there ? kRemote : kLocal, are_there);
        if (list() == kRemote && !has_work()) {
            draw(kLocal, are_there);
        }
    }

    // Waves of local items are torn apart when remote keys arrive.
    __device__ __forceinline__ int wave_in_step() const {
        return list() == kRemote && item() < agenda().counters->num_in_step ? item() / num_drawing() : kNoWave;
    }

private:
    __device__ __forceinline__ static int num_drawing() { return Config::kCtas > 1 ? num_clusters() : gridDim.x; }

    __device__ __forceinline__ const Agenda& agenda() const { return params_.lists[list()].agenda; }

    __device__ __forceinline__ int num_items() const { return *agenda().num_entries * agenda().heads_per_section; }

    __device__ __forceinline__ void draw(int list, int are_there) {
        drawn_ = atomicAdd(&params_.lists[list].agenda.counters->ticket, 1) << 2 | are_there | list;
    }

    __device__ __forceinline__ int item() const { return drawn_ >> 2; }

    __device__ __forceinline__ bool have_arrived() const {
        const bool they_have = params_.have_arrived == nullptr || load_acquire_system(params_.have_arrived) != 0;
        fence_proxy_async_global();   // TMA reads them
        return they_have;
    }

    static constexpr int kAreThere = 2;   // remote keys, when this item was drawn

    const typename Config::Params& params_;
    int drawn_;   // the item and its list, in one register
};

}   // namespace ffa
