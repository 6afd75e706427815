// Sorted arrays of any length: where a number belongs, and how the threads of a block sort by keys.
#pragma once

#include "common/block.cuh"

namespace ffa {

struct Range {
    int begin, end;
};

constexpr int kSortChunk = 32;   // of keys that are sorted by looking at each other

// The number of i < count, from 0 on, for which is_before(i) holds.
template <class IsBefore>
__device__ __forceinline__ int partition_point(int count, IsBefore is_before) {
    int low = 0;
    for (int high = count; low < high;) {
        const int middle = low + (high - low) / 2;
        if (is_before(middle)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// The number of elements of the sorted `values` that are at most `x`.
__device__ __forceinline__ int count_up_to(const int* values, int count, int x) {
    return partition_point(count, [&](int i) { return values[i] <= x; });
}

// The places of `count` keys in order of the keys, no two of which are equal, each in its section: of `section(place)`,
// that has `longest` places at most. In `order` or `other`. In a chunk of a section each looks up its place among the
// others; then neighbouring chunks merge until the chunk is the section.
template <class Section>
__device__ __forceinline__ int* sort_by_key(const unsigned long long* keys, int count, int longest, int* order,
                                            int* other, Section section) {
    for_each(count, [&](int place) {
        const Range all = section(place);
        const int first = place - (place - all.begin) % kSortChunk;
        const unsigned long long key = keys[place];
        int rank = first;
        for (int i = first; i < min(first + kSortChunk, all.end); ++i) {
            rank += keys[i] < key;
        }
        order[rank] = place;
    });
    for (int size = kSortChunk; size < longest; size *= 2) {
        for_each(count, [&](int i) {
            const Range all = section(i);
            const int own = i - (i - all.begin) % size;
            const bool is_left = (i - all.begin) / size % 2 == 0;
            const int begin = is_left ? min(own + size, all.end) : own - size;
            const unsigned long long key = keys[order[i]];
            const int num_smaller = partition_point(min(begin + size, all.end) - begin,
                                                    [&](int j) { return keys[order[begin + j]] < key; });
            other[min(own, begin) + (i - own) + num_smaller] = order[i];
        });
        int* const last = order;
        order = other;
        other = last;
    }
    return order;
}

}   // namespace ffa
