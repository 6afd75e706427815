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

// The maximum of the rows may lag behind by a factor of 2^8: the result is the same after normalisation, probabilities of
// up to 2^8 are as exact as those up to 1, and after the first blocks of a row hardly any score moves the maximum.
struct OnlineSoftmax {
    static constexpr float kSlackLog2 = 8.f;

    float scale_log2;   // scores * scale_log2 are logits in base 2
    float row_max[2];   // the largest score or less, by at most the slack; unscaled
    float row_sum[2];   // of this thread's columns only, until `finish`

    __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2)
        : scale_log2(scale_log2), row_max{-kInfinity, -kInfinity}, row_sum{0.f, 0.f} {}

    // Moves the maximum if new scores call for it, and tells so, the same to the whole warp: what the rows have summed
    // up so far is then to be multiplied with `rescale`.
    template <int kCount>
    __device__ __forceinline__ bool move_max(const float (&scores)[kCount], float (&rescale)[2]) {
        float maximum[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            maximum[half] = thread_max(scores, half);
        }
        const float growth = fmaxf(maximum[0] - row_max[0], maximum[1] - row_max[1]);
        const bool moves = __any_sync(0xffffffff, growth * scale_log2 > kSlackLog2);
        if (moves) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float old_max = row_max[half];
                row_max[half] = fmaxf(old_max, quad_max(maximum[half]));
                rescale[half] = ex2(old_max * scale_log2 - offset(half));
                row_sum[half] *= rescale[half];
            }
        }
        return moves;
    }

    // Turns scores into probabilities relative to `row_max`.
    template <int kCount>
    __device__ __forceinline__ void exponentiate(float (&scores)[kCount]) {
        const float offsets[2] = {offset(0), offset(1)};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int half = i / 2 % 2;
            scores[i] = ex2(scores[i] * scale_log2 - offsets[half]);
            row_sum[half] += scores[i];
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

private:
    // Of this thread's columns; two chains for each row, because a warp has its scheduler almost for itself.
    template <int kCount>
    __device__ __forceinline__ static float thread_max(const float (&scores)[kCount], int half) {
        float even = scores[2 * half];
        float odd = scores[2 * half + 1];
#pragma unroll
        for (int i = 1; i < kCount / 4; ++i) {
            even = fmaxf(even, scores[4 * i + 2 * half]);
            odd = fmaxf(odd, scores[4 * i + 2 * half + 1]);
        }
        return fmaxf(even, odd);
    }

    // A row that has seen nothing yet has no maximum: with any finite one its probabilities are exp2(-inf) = 0.
    __device__ __forceinline__ float offset(int half) const {
        return row_max[half] == -kInfinity ? 0.f : row_max[half] * scale_log2;
    }
};

}  // namespace ffa
