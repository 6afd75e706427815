// What `csrc/sm90/block.cuh` offers, and what CUDA does, for one thread of a CPU.
#pragma once

#include <algorithm>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

using std::max;
using std::min;

static struct {
    int x;
} blockIdx;

inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void atomicOr(unsigned* x, unsigned y) { *x |= y; }
inline int atomicAdd(int* x, int y) { return (*x += y) - y; }

namespace ffa {

template <class Body>
void for_each(int count, Body body) {
    for (int i = count - 1; i >= 0; --i) {   // an order that nobody should rely on
        body(i);
    }
}

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

inline void sort(unsigned long long* keys, int count) { std::sort(keys, keys + count); }

}  // namespace ffa
