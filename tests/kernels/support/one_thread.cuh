// What `csrc/sm90/common/block.cuh` offers, and what CUDA does, for one thread of a CPU.
#pragma once

#include <math.h>

#include <algorithm>
#include <utility>

#define __device__
#define __shared__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

using std::max;
using std::min;

static struct {
    int x;
} blockIdx, gridDim = {1};

inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void atomicOr(unsigned* x, unsigned y) { *x |= y; }
template <class Number>
Number atomicAdd(Number* x, Number y) {
    return (*x += y) - y;
}
inline void atomicMin(int* x, int y) { *x = min(*x, y); }
template <class Number>
Number atomicMax(Number* x, Number y) {
    return std::exchange(*x, max(*x, y));
}
inline void __threadfence() {}
inline void __threadfence_system() {}

namespace ffa {

template <class Body>
void for_each(int count, Body body) {
    for (int i = count - 1; i >= 0; --i) {   // an order that nobody should rely on
        body(i);
    }
}

template <class Body>
void for_each_warp(int count, Body body) {
    for_each(count, body);
}
template <class Body>
void for_each_of_warp(int count, Body body) {
    for_each(count, body);
}

template <class Flag>
unsigned word_of_warp(Flag flag) {
    unsigned word = 0;
    for (int i = 31; i >= 0; --i) {
        word |= static_cast<unsigned>(flag(i)) << i;
    }
    return word;
}

template <int kPerLane>
class Workers {
public:
    explicit Workers(int count) : count_(count) {}

    int first_free() const { return *std::min_element(free_, free_ + count_); }
    int work(int begin, int duration, int jobs) {
        for (int i = 0; i < count_ && jobs > 0; ++i) {
            if (free_[i] == begin) {
                free_[i] += duration;
                --jobs;
            }
        }
        return jobs;
    }
    int last_free() const { return *std::max_element(free_, free_ + count_); }

private:
    const int count_;
    int free_[32 * kPerLane] = {};
};

template <class Value, class Store>
int prefix_sum(int count, Value value, Store store) {
    int sum = 0;
    for (int i = 0; i < count; ++i) {
        const int own = value(i);
        store(i, sum);
        sum += own;
    }
    return sum;
}

template <class Value, class Store>
int compact_prefix_sum(int count, Value value, Store store) {
    return prefix_sum(count, value, store);
}

template <class Flag>
int end_of(int count, Flag flag) {
    while (count > 0 && !flag(count - 1)) {
        --count;
    }
    return count;
}

template <class Key, class IsLess>
void sort(Key* keys, int count, IsLess is_less) {
    std::sort(keys, keys + count, is_less);
}

inline void wait_for_grid(unsigned*, unsigned) {}

template <class Body>
void for_each_of_grid(int count, Body body) {
    for_each(count, body);
}

template <class Flag>
void bits_of_grid(long long count, unsigned* words, Flag flag) {
    std::fill(words, words + (count + 31) / 32, 0u);
    for (long long i = count - 1; i >= 0; --i) {
        words[i / 32] |= static_cast<unsigned>(flag(i)) << i % 32;
    }
}

}   // namespace ffa
