// What the threads of one block do together on arrays of any length. Each of these ends with a barrier.
#pragma once

namespace ffa {

// body(0), ..., body(count - 1), in no order.
template <class Body>
__device__ __forceinline__ void for_each(int count, Body body) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        body(i);
    }
    __syncthreads();
}

// store(i, value(0) + ... + value(i - 1)) for every i < count; returns the sum of all. Uses the block's dynamic shared
// memory, an int for each warp.
template <class Value, class Store>
__device__ int prefix_sum(int count, Value value, Store store) {
    extern __shared__ int warp_sums[];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    int carry = 0;
    for (int first = 0; first < count; first += blockDim.x) {
        const int i = first + threadIdx.x;
        const int own = i < count ? value(i) : 0;
        int sum = own;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (lane == 31) {
            warp_sums[warp] = sum;
        }
        __syncthreads();
        int before = carry;
        for (int w = 0; w < blockDim.x / 32; ++w) {
            const int of_warp = warp_sums[w];
            before += w < warp ? of_warp : 0;
            carry += of_warp;
        }
        if (i < count) {
            store(i, before + sum - own);
        }
        __syncthreads();
    }
    return carry;
}

// Sorts `count` keys, a power of two, upwards (bitonic).
__device__ __forceinline__ void sort(unsigned long long* keys, int count) {
    for (int size = 2; size <= count; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            for_each(count / 2, [&](int pair) {
                const int low = 2 * pair - (pair & (stride - 1));
                const int high = low + stride;
                const unsigned long long a = keys[low], b = keys[high];
                if ((a > b) == ((low & size) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            });
        }
    }
}

}  // namespace ffa
