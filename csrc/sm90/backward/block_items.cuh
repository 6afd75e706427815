// The items of a thread block of the backward kernel: its own, or those that the first block of its cluster draws for both.
#pragma once

#include "backward/config.cuh"
#include "backward/schedule/queue.cuh"

namespace ffa {

template <class Config>
class ItemsOfBlock {
public:
    __device__ __forceinline__ ItemsOfBlock(const typename Config::Params& params, SharedStorage<Config>& smem)
        : smem_(smem), items_(params) {
        share();
    }

    __device__ __forceinline__ const Items<Config>& operator*() const { return items_; }

    __device__ __forceinline__ void advance() {
        if (rank_in_cluster<Config>() == 0) {
            items_.advance();
        }
        share();
    }

private:
    // The phase of keys is that of items too, and takes no register.
    __device__ __forceinline__ void share() {
        if constexpr (Config::kCtas > 1) {
            if (rank_in_cluster<Config>() == 0) {
                mbarrier_wait(smem_.cluster.item_empty, smem_.kv_phase ^ 1);
                st_async_to_peer(smem_.item, items_.drawn(), smem_.cluster.item_full, peer_rank<Config>());
            } else {
                mbarrier_arrive_expect_tx(smem_.cluster.item_full, sizeof(smem_.item));
                mbarrier_wait(smem_.cluster.item_full, smem_.kv_phase);
                items_.set(smem_.item);
                mbarrier_arrive_at_rank_if(true, smem_.cluster.item_empty, peer_rank<Config>());
            }
        }
    }

    SharedStorage<Config>& smem_;
    Items<Config> items_;
};

}  // namespace ffa
