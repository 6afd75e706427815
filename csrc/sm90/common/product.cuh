// Products rows columns^T of operands that lie in slabs of 64 columns, as scores and gradients of probabilities are.
#pragma once

#include "common/wgmma.cuh"

namespace ffa {

// From an operand's descriptor to that of its columns from 16 * step on.
template <int kSlabBytes>
__device__ __forceinline__ constexpr uint32_t step_offset(int step) {
    constexpr int kStepsOfSlab = 4, kStepBytes = 32;
    return (step / kStepsOfSlab * kSlabBytes + step % kStepsOfSlab * kStepBytes) >> 4;
}

// 64 rows in shared memory, by their descriptor.
template <int kSlabBytes>
struct SharedRows {
    uint32_t descriptor;

    template <class Multiply, int kCount>
    __device__ __forceinline__ void multiply(float (&product)[kCount], int step, uint32_t cols, bool adds) const {
        Multiply::template ss<Major::K, Major::K>(product, descriptor + step_offset<kSlabBytes>(step), cols, adds);
    }
};

// Zeros that are never read: the compiler keeps registers for what is not set.
template <int kCount>
__device__ __forceinline__ void set_unread(float (&product)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        product[i] = 0.f;
    }
}

// Issues the matmuls of a product over 16 * kSteps columns. `adds` to what is there, else replaces it.
template <class Element, int kSteps, int kColSlabBytes, class Rows, int kCount>
__device__ __forceinline__ void issue_steps(float (&product)[kCount], const Rows& rows, uint32_t cols, bool adds) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        using Multiply = Wgmma<Element, 2 * kCount>;
        rows.template multiply<Multiply>(product, step, cols + step_offset<kColSlabBytes>(step), adds || step != 0);
    }
}

// A product as a group of its own.
template <class Element, int kSteps, int kColSlabBytes, class Rows, int kCount>
__device__ __forceinline__ void issue_product(float (&product)[kCount], const Rows& rows, uint32_t cols) {
    pin(product);
    wgmma_fence();
    issue_steps<Element, kSteps, kColSlabBytes>(product, rows, cols, false);
    wgmma_commit_group();
}

}   // namespace ffa
