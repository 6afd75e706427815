// Converts finished dQ rows to 16 bits while the main loop runs. The warps beside the producer do nothing else, the
// others help when they are done. A thread block whose tiles come to an end does not wait for others for long:
// where not all of them run at a time, some start only when it ends. What it leaves is for the kernel behind, and so is
// the rest, when half of the warps have gone: the few of thread blocks that are still at work would take long for it.
#pragma once

#include "backward/config.cuh"
#include "backward/dq_convert.cuh"

namespace ffa::backward {

template <class Config>
class DqRows {
public:
    __device__ __forceinline__ DqRows(const typename Config::Params& params, SharedStorage<Config>& smem)
        : params_(params), smem_(smem) {}

    // A warp draws one item after another, and waits for each until it is complete.
    __device__ __forceinline__ void run() {
        const DqItems& items = params_.dq;
        int item = drawn(draw());
        while (item < opaque(items.count())) {
            const int next = draw();   // on its way meanwhile
            const auto [head, group] = items.item(item, params_.dq_progress->order(items));
            if (!await_visits(head, group)) {
                leave(item);
                leave(drawn(next));
                leave_early();
                break;
            }
            DqRounding<typename Config::Element, Config::kHeadDim, Config::kCols, kColGroupsAtOnce>(items).round(head,
                                                                                                                 group);
            item = drawn(next);
        }
    }

private:
    static constexpr int kColGroupsAtOnce = 4;   // 16 registers
    static constexpr int kNsOfWait = 150;
    static constexpr int kMostWaits = 200000 / kNsOfWait;          // when there are no more tiles
    static constexpr int kManyWarps = Config::kThreads / 32 / 2;   // of each thread block

    __device__ __forceinline__ static bool is_first_lane() { return opaque(threadIdx.x) % 32 == 0; }

    __device__ __forceinline__ int draw() const {
        return is_first_lane() ? atomicAdd(&params_.dq_progress->next, 1) : 0;
    }

    __device__ __forceinline__ static int drawn(int item) { return __shfl_sync(0xffffffff, item, 0); }

    __device__ __forceinline__ void leave(int item) const {
        if (is_first_lane() && item < params_.dq.count()) {
            params_.dq_progress->left()[atomicAdd(&params_.dq_progress->num_left, 1)] = item;
        }
    }

    // The last one of half of them takes the rest along.
    __device__ __forceinline__ void leave_early() const {
        DqProgress& progress = *params_.dq_progress;
        if (is_first_lane() && atomicAdd(&progress.num_gone, 1) + 1 == kManyWarps * int(gridDim.x)) {
            progress.end = atomicAdd(&progress.next, params_.dq.count());
        }
    }

    // Whether all have added what they have.
    __device__ __forceinline__ bool await_visits(int head, int group) const {
        int is_complete = 0;
        if (is_first_lane()) {
            const int wanted = Config::kCtas * params_.visits.wanted[group];
            const int* const done =
                params_.visits.done + static_cast<long long>(head) * params_.dq.sums.row_groups + group;
            for (int waits = 0; (is_complete = load_acquire(done) >= wanted) == 0 && waits < kMostWaits;) {
                nanosleep(kNsOfWait);
                waits += load_shared(smem_.is_over);
            }
        }
        return __shfl_sync(0xffffffff, is_complete, 0) != 0;
    }

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
};

}   // namespace ffa::backward
