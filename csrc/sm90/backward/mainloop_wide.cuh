// The consumers of the backward kernel where heads are wide, of 192 or 256: two warpgroups share the 64 keys of a tile. One
// computes the scores and sums up dV, the other one computes their gradients and sums up dK, and gets P through shared memory.
// So each has one sum in its registers, whose operand it has there as well, and the matmuls of the three warpgroups fill each
// other's gaps.
//
// Two thread blocks, a cluster, share a tile of 128 keys: they load Q and dO for each other. What 64 keys add to dq is as much as
// the way to the L2 cache takes. So where there is room, they also send each other dS, and each adds one half of the columns of
// dQ, of all keys.
#pragma once

#include "backward/epilogue.cuh"
#include "backward/wide_dk.cuh"
#include "backward/wide_dv.cuh"

namespace ffa {

// One of the two, tile by tile.
template <class Config, template <class> class Walk>
class WideConsumer {
public:
    __device__ __forceinline__ WideConsumer(const typename Config::Params& params, SharedStorage<Config>& smem)
        : params_(params),
          smem_(smem),
          lane_(threadIdx.x % 32),
          gradients_(params, lane_),
          walk_(params, smem, lane_, gradients_.row_in_block()) {}

    // `map` and `rows` are those of the gradient, `scale` what it is multiplied with.
    __device__ __forceinline__ void run(const TensorMap& map, void* rows, float scale) {
        while (true) {
            mbarrier_wait_together(smem_.kv_full, kv_.phase);
            const int num_visits = uniform(work().num_visits);
            if (num_visits == TileOfHead::kNoMoreWork) {
                break;
            }
            differentiate(num_visits, map, rows, scale);
            kv_.advance();
        }
    }

private:
    __device__ __forceinline__ void differentiate(int num_visits, const TensorMap& map, void* rows, float scale) {
        typename Matmuls<Config>::Grad grad;
#pragma unroll
        for (float& x : grad) {
            x = 0.f;
        }
        if (num_visits > 0) {
            walk_.walk(grad, num_visits);
            barrier_sync(kScoresAreRead, (Config::kConsumers + 1) * Config::kWarpgroup);
        } else {
            mbarrier_arrive_if(lane_ == 0, smem_.kv_empty);
        }
        const TileOfHead& work = this->work();
        int store_end = work.tile.row_end;
        if (__any_sync(0xffffffff, work.num_parts > 1)) {
            store_end = gradients_.join_parts(work, grad);
        }
#pragma unroll
        for (float& x : grad) {
            x *= scale;
        }
        gradients_.template store<Walk<Config>::kStagingSlabs>(grad, walk_.staging(), map, rows, work, store_end);
        if constexpr (Config::kHasFarTiles) {
            gradients_.tell(work, store_end);
        }
    }

    // No register keeps the address.
    __device__ __forceinline__ const TileOfHead& work() const { return smem_.work[opaque(kv_.phase)]; }

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    const int lane_;
    const KeyGradients<Config> gradients_;
    Walk<Config> walk_;
    Position<1> kv_;
};

template <class Config>
__device__ __forceinline__ void consume_wide(const typename Config::Params& params, SharedStorage<Config>& smem,
                                             int warpgroup) {
    if (warpgroup == 0) {
        WideConsumer<Config, DvWalk>(params, smem).run(params.dv, params.dv_rows, 1.f);
    } else {
        WideConsumer<Config, DkWalk>(params, smem).run(params.dk, params.dk_rows, params.dq.softmax_scale);
    }
}

}  // namespace ffa
