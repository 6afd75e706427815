// What the threads of one block do together on arrays of any length, each with a barrier at its end; and those of a
// grid, which wait for nobody but in `wait_for_grid`.
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

// The same in as little code as can be, which takes longer to read than to run where it runs but a few times.
template <class Body>
__device__ __forceinline__ void compact_for_each(int count, Body body) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        body(i);
    }
    __syncthreads();
}

// body(0), ..., body(count - 1), in no order, each by all threads of a warp.
template <class Body>
__device__ __forceinline__ void for_each_warp(int count, Body body) {
    for (int i = threadIdx.x / 32; i < count; i += blockDim.x / 32) {
        body(i);
    }
    __syncthreads();
}

// Within for_each_warp: body(0), ..., body(count - 1), in no order, shared by the lanes.
template <class Body>
__device__ __forceinline__ void for_each_of_warp(int count, Body body) {
    for (int i = threadIdx.x % 32; i < count; i += 32) {
        body(i);
    }
}

// Within for_each_warp: flag(0), ..., flag(31) as the bits of a word, in all lanes.
template <class Flag>
__device__ __forceinline__ unsigned word_of_warp(Flag flag) {
    return __ballot_sync(~0u, flag(threadIdx.x % 32));
}

// The first i < count of which flag(i) holds, or count. `scratch` is a word of global memory.
template <class Flag>
__device__ __forceinline__ int first_of(int count, Flag flag, int& scratch) {
    compact_for_each(1, [&](int) { scratch = count; });
    compact_for_each(count, [&](int i) {
        if (flag(i)) {
            atomicMin(&scratch, i);
        }
    });
    const int first = __ldcg(&scratch);
    __syncthreads();
    return first;
}

// A warp's record of when each of `count` workers is free, 32 * kPerLane at most; at first all are at 0.
template <int kPerLane>
class Workers {
public:
    __device__ __forceinline__ explicit Workers(int count) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            free_[i] = 32 * i + threadIdx.x % 32 < count ? 0 : kNobody;
        }
    }

    __device__ __forceinline__ int first_free() const {
        int first = free_[0];
#pragma unroll
        for (int i = 1; i < kPerLane; ++i) {
            first = min(first, free_[i]);
        }
        return __reduce_min_sync(~0u, first);
    }

    // Each of those who are free at `begin`, which is when the first one is, takes one of so many jobs, as long as
    // there are any. Returns how many are left.
    __device__ __forceinline__ int work(int begin, int duration, int jobs) {
        const unsigned lanes_before = (1u << threadIdx.x % 32) - 1;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const bool is_free = free_[i] == begin;
            const unsigned all = __ballot_sync(~0u, is_free);
            free_[i] += is_free && __popc(all & lanes_before) < jobs ? duration : 0;
            jobs -= min(jobs, __popc(all));
        }
        return jobs;
    }

    __device__ __forceinline__ int last_free() const {
        int last = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            last = max(last, free_[i] == kNobody ? 0 : free_[i]);
        }
        return __reduce_max_sync(~0u, last);
    }

private:
    static constexpr int kNobody = 2147483647;

    int free_[kPerLane];
};

// Of what all threads of a block bring: that of the threads before this one, and that of all.
struct BlockSum {
    int before, all;
};

// Uses the block's dynamic shared memory, an int for each warp.
__device__ __forceinline__ BlockSum sum_of_block(int own) {
    extern __shared__ int warp_sums[];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    int sum = own;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31) {
        warp_sums[warp] = sum;
    }
    __syncthreads();
    BlockSum found{sum - own, 0};
    for (int w = 0; w < blockDim.x / 32; ++w) {
        const int of_warp = warp_sums[w];
        found.before += w < warp ? of_warp : 0;
        found.all += of_warp;
    }
    __syncthreads();
    return found;
}

// The same by one copy of the code.
inline __device__ __noinline__ BlockSum sum_of_block_by_call(int own) { return sum_of_block(own); }

// store(i, value(0) + ... + value(i - 1)) for every i < count; returns the sum of all. Uses what sum_of_block does.
template <BlockSum (&sum_of_all)(int) = sum_of_block, class Value, class Store>
__device__ int prefix_sum(int count, Value value, Store store) {
    int carry = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += blockDim.x) {
        const int i = first + threadIdx.x;
        const BlockSum sum = sum_of_all(i < count ? value(i) : 0);
        if (i < count) {
            store(i, carry + sum.before);
        }
        carry += sum.all;
    }
    __syncthreads();
    return carry;
}

// The same in as little code as can be: see compact_for_each.
template <class Value, class Store>
__device__ int compact_prefix_sum(int count, Value value, Store store) {
    return prefix_sum<sum_of_block_by_call>(count, value, store);
}

// The least of what the warps bring, each the same in all its threads. Uses the shared memory of prefix_sum.
inline __device__ int least_of_warps(int own) {
    extern __shared__ int warp_sums[];
    if (threadIdx.x % 32 == 0) {
        warp_sums[threadIdx.x / 32] = own;
    }
    __syncthreads();
    int least = warp_sums[0];
    for (int w = 1; w < blockDim.x / 32; ++w) {
        least = min(least, warp_sums[w]);
    }
    __syncthreads();
    return least;
}

// One more than the last i < count of which flag(i) holds, or 0. Uses the shared memory of prefix_sum.
template <class Flag>
__device__ __forceinline__ int end_of(int count, Flag flag) {
    int end = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        end = flag(i) ? i + 1 : end;
    }
    return -least_of_warps(__reduce_min_sync(~0u, -end));
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

// All thread blocks of a cooperative launch wait until all have called it; what they wrote before is there then.
// `round` is 1 in the first call, 2 in the second. `num_arrived` is a word of global memory that is zero when the
// kernel begins.
inline __device__ void wait_for_grid(unsigned* num_arrived, unsigned round) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(num_arrived, 1u);
        const volatile unsigned* const arrived = num_arrived;
        while (*arrived < round * gridDim.x) {
        }
        __threadfence();
    }
    __syncthreads();
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

}   // namespace ffa
