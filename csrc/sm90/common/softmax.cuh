// Online softmax over a wgmma accumulator: a thread holds two rows, shared with the three other lanes of its quad.
#pragma once

#include "common/ptx.cuh"

namespace ffa {

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Of this thread's columns of a row; two chains for each row, because a warp has its scheduler almost for itself.
template <int kCount>
__device__ __forceinline__ float thread_max(const float (&scores)[kCount], int half) {
    float even = scores[2 * half];
    float odd = scores[2 * half + 1];
#pragma unroll
    for (int i = 1; i < kCount / 4; ++i) {
        even = fmaxf(even, scores[4 * i + 2 * half]);
        odd = fmaxf(odd, scores[4 * i + 2 * half + 1]);
    }
    return fmaxf(even, odd);
}

// Probabilities are taken relative to a reference that is some earlier maximum of the row, and only the sum of a block
// tells whether that still serves: no maximum is computed for a block whose probabilities stay moderate, which are all
// but the first few of a row. The result is the same after normalisation, and probabilities up to 2^8 are as exact as
// those up to 1.
class OnlineSoftmax {
public:
    __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2)
        : scale_log2_(scale_log2), reference_{-kInfinity, -kInfinity}, row_sum_{0.f, 0.f}, has_unseen_rows_(true) {}

    // Whether some row of the warp has no reference yet: `move_reference` comes before `exponentiate` then.
    __device__ __forceinline__ bool has_unseen_rows() const { return has_unseen_rows_; }

    // Makes the largest score so far the reference; what the rows have summed up is to be multiplied with `rescale`.
    template <int kCount>
    __device__ __forceinline__ void move_reference(const float (&scores)[kCount], float (&rescale)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float old = reference_[half];
            reference_[half] = fmaxf(old, quad_max(thread_max(scores, half)));
            rescale[half] = ex2(old * scale_log2_ - offset(half));
            row_sum_[half] *= rescale[half];
        }
        has_unseen_rows_ = __any_sync(0xffffffff, reference_[0] == -kInfinity || reference_[1] == -kInfinity);
    }

    // The probabilities of some scores, rounded and packed in pairs, and added to `sum`. An accumulator of 16 columns
    // is, packed, the A operand of the next matmul.
    template <class Element, int kBegin, int kEnd, int kCount>
    __device__ __forceinline__ void exponentiate(const float (&scores)[kCount], uint32_t (&probs)[kCount / 2],
                                                 float (&sum)[2]) const {
#pragma unroll
        for (int i = kBegin / 2; i < kEnd / 2; ++i) {
            const int half = i % 2;
            const float low = ex2(scores[2 * i] * scale_log2_ - offset(half));
            const float high = ex2(scores[2 * i + 1] * scale_log2_ - offset(half));
            sum[half] += low;
            sum[half] += high;
            probs[i] = pack<Element>(low, high);
        }
    }

    // False, the same to the whole warp, where probabilities are too large: the reference is to be moved then.
    __device__ __forceinline__ static bool fits(const float (&sum)[2]) {
        constexpr float kLargestSum = 256.f;
        return !__any_sync(0xffffffff, fmaxf(sum[0], sum[1]) > kLargestSum);
    }

    __device__ __forceinline__ void add(const float (&sum)[2]) {
        row_sum_[0] += sum[0];
        row_sum_[1] += sum[1];
    }

    // The factor that normalises the output rows, and the natural log-sum-exp of each row.
    __device__ __forceinline__ void finish(float (&normalize)[2], float (&lse)[2]) {
        constexpr float kLn2 = 0.693147180559945309f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(row_sum_[half]);
            const bool empty = sum == 0.f;
            normalize[half] = empty ? 0.f : 1.f / sum;
            lse[half] = empty ? -kInfinity : (reference_[half] * scale_log2_ + log2f(sum)) * kLn2;
        }
    }

private:
    // A row that has seen nothing yet has no reference: with any finite one its probabilities are exp2(-inf) = 0.
    __device__ __forceinline__ float offset(int half) const {
        return reference_[half] == -kInfinity ? 0.f : reference_[half] * scale_log2_;
    }

    float scale_log2_;   // scores * scale_log2 are logits in base 2
    float reference_[2];
    float row_sum_[2];   // of this thread's columns only
    bool has_unseen_rows_;
};

}   // namespace ffa
