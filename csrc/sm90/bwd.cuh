// The backward pass: dk and dv of one tile of keys at a time, and its share of dq.
//
// A persistent thread block works on one (k tile, kv head) of the agenda after another, or on a part of the query heads of
// the group, where the whole of a tile would end after everything else. For all these heads and all runs of the tile, one
// producer thread streams blocks of Q and dO into shared memory; two consumer warpgroups own 64 keys each. Scores are
// transposed, keys by queries, so that P^T and dS^T are already operands of dV += P^T dO and dK += dS^T Q, whose sums never
// leave the registers until the tile is done. dS also goes through shared memory for dQ = dS K, which the warpgroups
// compute in turn, one block of queries each, and add to a sum in global memory: 128 columns of dQ in one matmul read dS
// once, where half of them in each warpgroup would read it twice.
#pragma once

#include "bwd_consumer.cuh"
#include "bwd_producer.cuh"

namespace ffa {

template <class Config>
__device__ __forceinline__ void backward(const BackwardParams& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(SharedStorage<Config>) <= kMaxSharedBytes, "the buffers do not fit in shared memory");
    auto& smem = *reinterpret_cast<SharedStorage<Config>*>(memory);
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / Config::kWarpgroup, 0);
    if (threadIdx.x == 0) {
        init_barriers(smem);
    }
    __syncthreads();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (warpgroup == Config::kConsumers) {
        setmaxnreg_dec<Config::kProducerRegisters>();
        if (threadIdx.x == Config::kConsumers * Config::kWarpgroup) {
            Producer<Config>(params, smem).run();
        }
    } else {
        setmaxnreg_inc<Config::kConsumerRegisters>();
        Consumer<Config>(params, smem, warpgroup).run();
    }
}

}  // namespace ffa
