// How a thread adds up the gradients of a tensor that a look-up reads, as it goes along the keys of its two rows.
//
// Numbers for the place of a head or a row are added in a register until the end of a tile; those for the place of a
// key by the rows of a warp, and then to memory. Of a pair, numbers for one place mostly come one after the other too,
// as those of two documents: they are added in a register, and to memory where the place changes. Where places follow
// the distance between a query and a key, those of `row` and a column are those of `row + 8` eight columns further,
// which the lower row takes over: so one in two goes to memory.
#pragma once

#include "common/ptx.cuh"

namespace ffa::scores {

constexpr int kNowhere = -1;

// Of one look-up. A thread has two columns of every 8, whose sums are kept apart.
class RunningSums {
public:
    // Of a column in both rows: the places in the tensor, or kNowhere, and what to add there, 0 in rows that do not
    // count. A row has one place.
    __device__ __forceinline__ void add_to_rows(const bool (&counts)[2], const int (&places)[2],
                                                const float (&values)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            places_[half][0] = counts[half] ? places[half] : places_[half][0];
            sums_[half][0] += values[half];
        }
    }

    // By all lanes of a warp, whose rows have the same place.
    __device__ __forceinline__ static void add_to_key(float* sums, int place, float value) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            value += __shfl_xor_sync(0xffffffff, value, distance);
        }
        add_relaxed_if(threadIdx.x % 32 < 4 && place >= 0 && value != 0.f, sums + place, value);
    }

    // Of column `j` of two.
    __device__ __forceinline__ void add_to_pairs(float* sums, int j, const bool (&counts)[2], const int (&places)[2],
                                                 const float (&values)[2]) {
        const bool lower_moves = counts[1] && places[1] != places_[1][j];
        const bool takes_over = lower_moves && places[1] == places_[0][j];
        flush_if(lower_moves, sums, 1, j);
        sums_[1][j] = (takes_over ? sums_[0][j] : lower_moves ? 0.f : sums_[1][j]) + values[1];
        places_[1][j] = lower_moves ? places[1] : places_[1][j];
        places_[0][j] = takes_over ? kNowhere : places_[0][j];

        const bool upper_moves = counts[0] && places[0] != places_[0][j];
        flush_if(upper_moves, sums, 0, j);
        sums_[0][j] = (upper_moves ? 0.f : sums_[0][j]) + values[0];
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

}   // namespace ffa::scores
