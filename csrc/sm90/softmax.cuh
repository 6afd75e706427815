// Online softmax over a wgmma accumulator: a thread holds two rows, shared with the three other lanes of its quad.
#pragma once

#include "ptx.cuh"

namespace ffa {

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

struct OnlineSoftmax {
    float scale_log2;   // scores * scale_log2 are logits in base 2
    float row_max[2];   // of the scores, unscaled
    float row_sum[2];   // of this thread's columns only, until `finish`

    __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2)
        : scale_log2(scale_log2), row_max{-kInfinity, -kInfinity}, row_sum{0.f, 0.f} {}

    // Turns scores into probabilities relative to the new row maximum; `rescale` is what the rows summed up so far
    // are to be multiplied with.
    template <int kCount>
    __device__ __forceinline__ void update(float (&scores)[kCount], float (&rescale)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float maximum = row_max[half];
#pragma unroll
            for (int i = 0; i < kCount / 4; ++i) {
                maximum = fmaxf(maximum, fmaxf(scores[4 * i + 2 * half], scores[4 * i + 2 * half + 1]));
            }
            maximum = quad_max(maximum);
            // A row that has seen nothing yet has no maximum: any finite one makes its probabilities exp2(-inf) = 0.
            const float offset = maximum == -kInfinity ? 0.f : maximum * scale_log2;
            rescale[half] = ex2(row_max[half] * scale_log2 - offset);
            row_max[half] = maximum;
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = scores[4 * i + 2 * half + j];
                    score = ex2(score * scale_log2 - offset);
                    sum += score;
                }
            }
            row_sum[half] = row_sum[half] * rescale[half] + sum;
        }
    }

    // The factor that normalises the output rows, and the natural log-sum-exp of each row.
    __device__ __forceinline__ void finish(float (&normalize)[2], float (&lse)[2]) {
        constexpr float kLn2 = 0.693147180559945309f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(row_sum[half]);
            const bool empty = sum == 0.f;
            normalize[half] = empty ? 0.f : 1.f / sum;
            lse[half] = empty ? -kInfinity : (row_max[half] * scale_log2 + log2f(sum)) * kLn2;
        }
    }
};

}  // namespace ffa
