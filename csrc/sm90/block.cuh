// What the threads of one block do together on arrays of any length, each with a barrier at its end; and those of a grid,
// which wait for nobody.
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

// Sorts `count` keys, a power of two, so that none is_less than the one before it (bitonic).
template <class Key, class IsLess>
__device__ __forceinline__ void sort(Key* keys, int count, IsLess is_less) {
    for (int size = 2; size <= count; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            for_each(count / 2, [&](int pair) {
                const int low = 2 * pair - (pair & (stride - 1));
                const int high = low + stride;
                const Key a = keys[low], b = keys[high];
                if (is_less(b, a) == ((low & size) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            });
        }
    }
}

// body(0), ..., body(count - 1), in no order.
template <class Body>
__device__ __forceinline__ void for_each_of_grid(int count, Body body) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        body(i);
    }
}

// flag(0), ..., flag(count - 1) as the bits of `words`; the bits behind them become zeros.
template <class Flag>
__device__ __forceinline__ void bits_of_grid(long long count, unsigned* words, Flag flag) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long end = (count + 31) / 32 * 32;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < end; i += stride) {
        const unsigned bits = __ballot_sync(~0u, i < count && flag(i));
        if (threadIdx.x % 32 == 0) {
            words[i / 32] = bits;
        }
    }
}

}  // namespace ffa
