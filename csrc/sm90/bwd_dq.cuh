// How a warp of the backward kernel adds its rows of dQ to the sum in global memory: by bulk reductions, in any order or, for
// sums that repeat bit for bit, in that of the plan's tiles.
#pragma once

#include "bwd_shared.cuh"

namespace ffa {

// Where the 16 rows of this warp go.
struct DqRows {
    float* sum;
    int head;
    int first;
    bool are_in_run;
};

template <class Config>
class DqAdder {
public:
    static constexpr int kValues = Config::kHeadDim / 2;   // registers of a thread
    using Dq = float[kValues];

    __device__ __forceinline__ DqAdder(const BackwardParams& params, SharedStorage<Config>& smem, int warp, int lane)
        : params_(params), smem_(smem), warp_(warp), lane_(lane) {}

    __device__ __forceinline__ DqRows rows_of_warp(const Block& block) const {
        const int first = block.first + warp_ * Config::kWarpRows;
        return {dq_rows<Config::kHeadDim>(params_.dq, block.head, first), block.head, first, first < block.end};
    }

    // Through a buffer that each warp shares with one of the other warpgroup, in turn.
    __device__ __forceinline__ void add(const Dq& dq, const DqRows& rows) {
        float* const staging = smem_.dq[warp_];
#pragma unroll
        for (int i = 0; i < kValues / 4; ++i) {
            *reinterpret_cast<float4*>(staging + 128 * i + 4 * lane_) = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                                                                         dq[4 * i + 3]};
        }
        fence_proxy_async_shared();
        if constexpr (Config::kIsDeterministic) {
            await_turn(rows);
        }
        __syncwarp();
        if (lane_ == 0 && rows.are_in_run) {
            cp_reduce_async_bulk_add(rows.sum, staging, sizeof(smem_.dq[0]));
            cp_async_bulk_commit_group();
        }
    }

    // The other warpgroup writes there next.
    __device__ __forceinline__ void leave_buffer() {
        if constexpr (Config::kIsDeterministic) {
            publish();
        } else if (lane_ == 0) {
            cp_async_bulk_wait_group_read<0>();
        }
        __syncwarp();
    }

    // Tells the tiles behind this one that the last addition has arrived.
    __device__ __forceinline__ void publish() {
        if (lane_ == 0) {
            cp_async_bulk_wait_group<0>();
        }
        fence_proxy_async();
        __syncwarp();
        if (visits_ != nullptr) {
            add_release(visits_, 1);
            visits_ = nullptr;
        }
    }

private:
    // Until all tiles in front of this one have added what they have for these rows. One lane waits.
    __device__ __forceinline__ void await_turn(const DqRows& rows) {
        const DqOrder& order = params_.order;
        const long long num_groups = params_.dq.row_groups;
        const int group = rows.first / kDqGroupRows;
        visits_ = nullptr;
        if (lane_ == 0 && rows.are_in_run) {
            visits_ = order.visits + rows.head * num_groups + group;
            const int turn = order.turns[smem_.work.tile_index * num_groups + group];
            while (load_acquire(visits_) < turn) {
            }
        }
        fence_proxy_async();
    }

    const BackwardParams& params_;
    SharedStorage<Config>& smem_;
    const int warp_;
    const int lane_;
    int* visits_ = nullptr;   // of the rows that this lane has waited for, where additions have an order
};

}  // namespace ffa
