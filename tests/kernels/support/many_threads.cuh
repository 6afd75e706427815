// What CUDA offers to the threads of a block, for a CPU: threads that take turns at random, or that really run side by
// side.
#pragma once

#include "fibers.cuh"

#include <pthread.h>

#include <algorithm>
#include <cassert>
#include <memory>
#include <numeric>
#include <random>
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
static pthread_barrier_t barriers_of_blocks[32];   // of threads side by side

// Where threads that take turns meet.
struct Meeting {
    int num_there = 0;
    int turn = 0;

    void meet(int count);
};

static Meeting block, warps[32];
static long num_meetings;
static int exchanged[32][32];

inline void Meeting::meet(int count) {
    const int mine = turn;
    if (++num_there == count) {
        num_there = 0;
        ++turn;
        ++num_meetings;
    }
    while (turn == mine) {
        fibers::yield();
    }
}

namespace ffa {
int warp_sums[32];   // the dynamic shared memory of common/block.cuh
}

inline void __syncthreads() {
    if (fibers::current) {
        block.meet(blockDim.x);
    } else {
        pthread_barrier_wait(&barriers_of_blocks[blockIdx.x % 32]);
    }
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// use(values of all lanes), where every lane has brought its own.
template <class Use>
auto in_warp(int own, Use use) {
    const int warp = threadIdx.x / 32;
    exchanged[warp][threadIdx.x % 32] = own;
    warps[warp].meet(32);
    const auto result = use(exchanged[warp]);
    warps[warp].meet(32);
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

// Runs kernel() in every thread of a grid, one block after the other. The threads of a block take turns at random, in
// the same way in each run, and now and then a warp pauses while others get ahead.
template <class Kernel>
void launch(int num_blocks, int num_threads, Kernel kernel) {
    static Kernel* running;
    running = &kernel;
    void (*const body)() = [] {
        (*running)();
        fibers::end();
    };
    const std::unique_ptr<char[]> stacks(new char[num_threads * fibers::kStackBytes]);
    std::vector<int> order(num_threads);
    std::iota(order.begin(), order.end(), 0);
    std::minstd_rand random;
    gridDim = {num_blocks};
    blockDim = {num_threads};
    for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x) {
        std::vector<fibers::Fiber> threads(num_threads);
        for (int i = 0; i < num_threads; ++i) {
            fibers::prepare(threads[i], &stacks[i * fibers::kStackBytes], body);
        }
        std::vector<int> pauses((num_threads + 31) / 32);   // in rounds
        for (int num_left = num_threads, before = num_left; num_left > 0; before = num_left) {
            const long meetings_before = num_meetings;
            bool is_paused = false;
            for (int& pause : pauses) {
                pause = pause > 0 ? pause - 1 : random() % 16 == 0 ? random() % 64 : 0;
                is_paused |= pause > 0;
            }
            std::shuffle(order.begin(), order.end(), random);
            for (const int i : order) {
                if (!threads[i].is_done && pauses[i / 32] == 0) {
                    threadIdx.x = i;
                    fibers::resume(threads[i]);
                    num_left -= threads[i].is_done;
                }
            }
            assert(is_paused || num_left < before || num_meetings > meetings_before);   // else they wait without end
        }
    }
}

// The same with all blocks, 32 at most, and all threads side by side; for kernels that ask nothing of warps.
template <class Kernel>
void launch_together(int num_blocks, int num_threads, Kernel kernel) {
    std::vector<std::thread> threads;
    for (int block = 0; block < num_blocks; ++block) {
        pthread_barrier_init(&barriers_of_blocks[block], nullptr, num_threads);
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
    for (std::thread& thread : threads) {
        thread.join();
    }
}
