// What the sums of the backward start from: -lse / scale of a query where a score begins, -delta where the gradient of
// a probability does. A matmul adds them, so that no thread has to load what all keys have in common.
//
// Of its 16 terms, 3 make up one statistic and the next 3 the other. Its B operand holds queries: the terms of 8 of
// them are 6 rows of 16 bytes, and the first two rows of the next queries stand for terms 6 and 7. Its A operand holds
// keys, all alike: halves where a term counts, zeros where it does not. Terms 8 to 15 are terms 0 to 7 once more, in
// both.
#pragma once

#include "common/ptx.cuh"
#include "common/wgmma.cuh"

namespace ffa {

enum class Statistic { kOfScores = 0, kOfDprobs = 1 };
constexpr int kStatistics = 2;
constexpr int kTerms = 3;          // of a statistic
constexpr int kStatsQueries = 8;   // whose statistics lie together
constexpr int kStatsRows = kStatistics * kTerms;

// The statistics of some queries that lie together.
struct alignas(16) Stats {
    uint16_t terms[kStatsRows][kStatsQueries];
};

constexpr int kStatsWords = sizeof(Stats) / 8;

// The A operand, of 8 keys.
struct alignas(16) Selector {
    uint16_t rows[8][8];
};

constexpr uint32_t kStatsDescriptorHigh = plain_descriptor_high(sizeof(Stats));   // to the next queries
constexpr uint32_t kSelectorDescriptorHigh = plain_descriptor_high(0);            // to the same keys

__device__ __forceinline__ void fill(Selector& selector, int element, Statistic statistic) {
    constexpr uint16_t kHalf = 0x3f00;
    const bool counts = element % 8 / kTerms == static_cast<int>(statistic);
    selector.rows[element / 8][element % 8] = counts ? kHalf : 0;
}

__device__ __forceinline__ float widen(uint32_t bf16_bits) { return __uint_as_float(bf16_bits << 16); }

// The terms of `x` are its first 8 bits, the next and the last ones. Where x is not finite they are the largest numbers
// there are: their sum is not finite either, but a zero times one of them is.
__device__ __forceinline__ uint16_t term_of(float x, int term) {
    constexpr uint16_t kLargest = 0x7f7f;
    if (!(fabsf(x) <= widen(kLargest))) {
        return kLargest;
    }
    for (int i = 0; i < term; ++i) {
        x -= widen(pack<bfloat16>(x, 0.f));
    }
    return static_cast<uint16_t>(pack<bfloat16>(x, 0.f));
}

// A statistic of queries 2 * pair and 2 * pair + 1.
__device__ __forceinline__ float2 statistic_of_pair(const Stats& stats, Statistic statistic, int pair) {
    float2 sum{0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
        const uint32_t terms =
            reinterpret_cast<const uint32_t*>(stats.terms[static_cast<int>(statistic) * kTerms + i])[pair];
        sum.x += widen(terms);
        sum.y += __uint_as_float(terms & 0xffff0000);
    }
    return sum;
}

}   // namespace ffa
