// What CUDA offers to the threads of a block, for threads of a CPU that really run side by side.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__

struct Index {
    int x;
};

static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
static pthread_barrier_t barriers_of_blocks[32], barriers_of_warps[32];
static int exchanged[32][32];

namespace ffa {
int warp_sums[32];   // the dynamic shared memory of common/block.cuh
}

inline void __syncthreads() { pthread_barrier_wait(&barriers_of_blocks[blockIdx.x % 32]); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// use(values of all lanes), where every lane has brought its own.
template <class Use>
auto in_warp(int own, Use use) {
    const int warp = threadIdx.x / 32;
    exchanged[warp][threadIdx.x % 32] = own;
    pthread_barrier_wait(&barriers_of_warps[warp]);
    const auto result = use(exchanged[warp]);
    pthread_barrier_wait(&barriers_of_warps[warp]);
    return result;
}

inline int __shfl_up_sync(unsigned, int value, int distance) {
    const int lane = threadIdx.x % 32;
    return in_warp(value, [&](const int* lanes) { return lane >= distance ? lanes[lane - distance] : value; });
}

inline unsigned __ballot_sync(unsigned, bool flag) {
    return in_warp(flag, [](const int* lanes) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; ++lane) {
            bits |= static_cast<unsigned>(lanes[lane]) << lane;
        }
        return bits;
    });
}

inline int __reduce_min_sync(unsigned, int value) {
    return in_warp(value, [](const int* lanes) { return *std::min_element(lanes, lanes + 32); });
}

inline int __reduce_max_sync(unsigned, int value) {
    return in_warp(value, [](const int* lanes) { return *std::max_element(lanes, lanes + 32); });
}

inline int __reduce_add_sync(unsigned, int value) {
    return in_warp(value, [](const int* lanes) { return std::accumulate(lanes, lanes + 32, 0); });
}

inline int __shfl_sync(unsigned, int value, int lane) {
    return in_warp(value, [&](const int* lanes) { return lanes[lane]; });
}

inline int atomicMin(int* x, int y) {
    int before = __atomic_load_n(x, __ATOMIC_RELAXED);
    while (before > y && !__atomic_compare_exchange_n(x, &before, y, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}

inline unsigned atomicAdd(unsigned* x, unsigned y) { return __atomic_fetch_add(x, y, __ATOMIC_RELAXED); }

template <class Value>
Value __ldcg(const Value* pointer) {
    return *pointer;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
using std::max;
using std::min;

// Starts kernel() in every thread of a block.
template <class Kernel>
void start(std::vector<std::thread>& threads, int block, int num_blocks, int num_threads, Kernel kernel) {
    pthread_barrier_init(&barriers_of_blocks[block % 32], nullptr, num_threads);
    for (int thread = 0; thread < num_threads; ++thread) {
        threads.emplace_back([=] {
            threadIdx = {thread};
            blockIdx = {block};
            blockDim = {num_threads};
            gridDim = {num_blocks};
            kernel();
        });
    }
}

inline void join(std::vector<std::thread>& threads) {
    for (std::thread& thread : threads) {
        thread.join();
    }
}

// Runs kernel() in every thread of a grid, one block after the other.
template <class Kernel>
void launch(int num_blocks, int num_threads, Kernel kernel) {
    for (int block = 0; block < num_blocks; ++block) {
        for (int warp = 0; warp < num_threads / 32; ++warp) {
            pthread_barrier_init(&barriers_of_warps[warp], nullptr, 32);
        }
        std::vector<std::thread> threads;
        start(threads, block, num_blocks, num_threads, kernel);
        join(threads);
    }
}

// The same with all blocks, 32 at most, side by side; for kernels that ask nothing of warps.
template <class Kernel>
void launch_together(int num_blocks, int num_threads, Kernel kernel) {
    std::vector<std::thread> threads;
    for (int block = 0; block < num_blocks; ++block) {
        start(threads, block, num_blocks, num_threads, kernel);
    }
    join(threads);
}
