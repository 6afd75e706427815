// The largest score of each row, where the host asks for it.
#pragma once

#include "common/softmax.cuh"
#include "forward/config.cuh"

namespace ffa::forward {

template <class Config, bool kIsThere = Config::kHasMaxScores>
class MaxScores {
public:
    template <int kCount>
    __device__ __forceinline__ void update(const float (&)[kCount]) {}
    __device__ __forceinline__ void store(const typename Config::Params&, const TileOfHead&, int, int) const {}
};

// Of a thread, which has some columns of two rows. The softmax has no such maximum: its reference is an earlier one.
template <class Config>
class MaxScores<Config, true> {
public:
    // The scores of a block as the softmax takes them, with the mask.
    template <int kCount>
    __device__ __forceinline__ void update(const float (&scores)[kCount]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest_[half] = fmaxf(largest_[half], thread_max(scores, half));
        }
    }

    // `row` is the first one of this thread. What others have found of a row, in a split of its tile or in an earlier
    // launch over other keys, stays where it is larger; in front of the first launch it is -inf.
    __device__ __forceinline__ void store(const typename Config::Params& params, const TileOfHead& tile, int row,
                                          int lane) const {
        constexpr float kLn2 = 0.693147180559945309f;
        float* const rows = params.max_scores + tile.head * static_cast<long long>(params.total_q);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float largest = quad_max(largest_[half]) * params.scale_log2 * kLn2;
            const int r = row + 8 * half;
            if (lane % 4 == 0 && r < tile.row_end) {
                atomic_max(rows + r, largest);
            }
        }
    }

private:
    // Of floats of which none is NaN. Those without a sign are in the order of their bits as ints, and in front of all
    // others; those with one are in the opposite order of their bits as unsigned ints.
    __device__ __forceinline__ static void atomic_max(float* pointer, float value) {
        const uint32_t bits = __float_as_uint(value);
        if (static_cast<int>(bits) >= 0) {
            atomicMax(reinterpret_cast<int*>(pointer), static_cast<int>(bits));
        } else {
            atomicMin(reinterpret_cast<uint32_t*>(pointer), bits);
        }
    }

    float largest_[2] = {-kInfinity, -kInfinity};   // in front of the scale, which is positive
};

}   // namespace ffa::forward
