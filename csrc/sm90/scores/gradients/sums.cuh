// How a thread adds up the gradients of a tensor that a look-up reads, as it goes along the keys of its two rows.
//
// Numbers for one place of the tensor mostly come one after the other: those of a head, of a query, of a pair of
// documents. They are added in a register, and to memory where the place changes. Where places follow the distance
// between a query and a key, those of `row` and a column are those of `row + 8` eight columns further, which the lower
// row takes over: so one in two goes to memory.
#pragma once

#include "common/ptx.cuh"

namespace ffa {

constexpr int kNowhere = -1;

// Of one look-up. A thread has two columns of every 8, whose sums are kept apart.
class RunningSums {
public:
    // Of column `j` of two, in both rows: the places in `sums`, or kNowhere, and what to add there; only in the rows
    // that `counts`.
    __device__ __forceinline__ void add(float* sums, int j, const bool (&counts)[2], const int (&places)[2],
                                        const float (&values)[2]) {
        const bool lower_moves = counts[1] && places[1] != places_[1][j];
        const bool takes_over = lower_moves && places[1] == places_[0][j];
        flush_if(lower_moves, sums, 1, j);
        sums_[1][j] = takes_over ? sums_[0][j] : lower_moves ? 0.f : sums_[1][j];
        places_[1][j] = lower_moves ? places[1] : places_[1][j];
        sums_[1][j] += counts[1] ? values[1] : 0.f;
        places_[0][j] = takes_over ? kNowhere : places_[0][j];

        const bool upper_moves = counts[0] && places[0] != places_[0][j];
        flush_if(upper_moves, sums, 0, j);
        sums_[0][j] = (upper_moves ? 0.f : sums_[0][j]) + (counts[0] ? values[0] : 0.f);
        places_[0][j] = upper_moves ? places[0] : places_[0][j];
    }

    // At the end of a tile, by all lanes of a warp: those that are at the same place add together first.
    __device__ __forceinline__ void finish(float* sums) {
        merge(places_[0][0], sums_[0][0], places_[0][1], sums_[0][1]);
        merge(places_[1][0], sums_[1][0], places_[1][1], sums_[1][1]);
        merge(places_[0][0], sums_[0][0], places_[1][0], sums_[1][0]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                merge_lanes(places_[half][j], sums_[half][j]);
                flush_if(true, sums, half, j);
            }
        }
    }

private:
    __device__ __forceinline__ void flush_if(bool condition, float* sums, int half, int j) const {
        const int place = places_[half][j];
        add_relaxed_if(condition && place >= 0, sums + place, sums_[half][j]);
    }

    // What is at the same place goes to the first one.
    __device__ __forceinline__ static void merge(int place, float& sum, int& other_place, float other_sum) {
        const bool is_same = place == other_place;
        sum += is_same ? other_sum : 0.f;
        other_place = is_same ? kNowhere : other_place;
    }

    __device__ __forceinline__ static void merge_lanes(int& place, float& sum) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other_place =
                static_cast<int>(__shfl_xor_sync(0xffffffff, static_cast<uint32_t>(place), distance));
            const float other_sum = __shfl_xor_sync(0xffffffff, sum, distance);
            const bool is_same = place == other_place;
            const bool is_first = (threadIdx.x & distance) == 0;
            sum += is_same && is_first ? other_sum : 0.f;
            place = is_same && !is_first ? kNowhere : place;
        }
    }

    int places_[2][2] = {{kNowhere, kNowhere}, {kNowhere, kNowhere}};   // of halves, of columns
    float sums_[2][2] = {};
};

}   // namespace ffa
