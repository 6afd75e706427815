// What a run shows of a bit block: `magi_compile/masks/bits.py` says what those are, `magi_compile/plan/bit_runs.py`
// which rows of them a run has.
#pragma once

#include "visibility/mask.cuh"
#include "common/ptx.cuh"
#include "common/store.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

constexpr int kKeysOfWord = 32;
constexpr int kWordsOfQuery = kBitBlock / kKeysOfWord;
constexpr int kRowsOfWarpgroup = 64;

// All lanes of a warp ask of the same run.
__device__ __forceinline__ bool has_bits(const Run& run) { return __any_sync(0xffffffff, run.bits > 0); }

// Some neighbouring words of a query, which lie together.
template <int kCount>
struct alignas(4 * kCount) BitWords {
    uint32_t words[kCount];
};

// Those of a query from key `col` on, for so many keys. `row` is one of the run's, a query.
template <int kCols>
__device__ __forceinline__ BitWords<kCols / kKeysOfWord> bits_of_query(const Run& run, const uint32_t* bits, int row,
                                                                       int col) {
    static_assert(kBitBlock % kCols == 0 && kCols % kKeysOfWord == 0, "a block of keys lies in one bit block");
    const long long query = run.bits - 1 + row - run.row_begin;
    const uint32_t* const words = bits + query * kWordsOfQuery + (col - run.col_begin) / kKeysOfWord;
    return *reinterpret_cast<const BitWords<kCols / kKeysOfWord>*>(words);
}

// What of the keys from `first` on, of which `visibility` says something, the bits of the run show to the rows of a
// warpgroup. All lanes of a warp ask, and share the rows.
template <int kCols>
__device__ __forceinline__ Visibility visibility_of_bits(Visibility sees, const Run& run, const uint32_t* bits,
                                                         int row_begin, int row_end, int first) {
    const int first_row = max(row_begin, run.row_begin) + threadIdx.x % 32;
    const int last_row = min(row_end, run.row_end) - 1;
    uint32_t some = 0, all = ~0u;
#pragma unroll
    for (int i = 0; i < kRowsOfWarpgroup / 32; ++i) {
        const auto of_query = bits_of_query<kCols>(run, bits, min(first_row + 32 * i, last_row), first);
#pragma unroll
        for (const uint32_t word : of_query.words) {
            some |= word;
            all &= word;
        }
    }
    if (!__any_sync(0xffffffff, some != 0)) {
        return kNothing;
    }
    return __all_sync(0xffffffff, all == ~0u) ? sees : kPartial;
}

// Sets the scores that bits hide to -inf, of queries by keys, behind apply_mask, which hides rows outside of the run.
template <int kCount>
__device__ __forceinline__ void apply_bits(float (&scores)[kCount], const Run& run, const uint32_t* bits, int row,
                                           int col) {
    constexpr int kCols = 2 * kCount;
    const int in_word = (col - run.col_begin) % kKeysOfWord;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = min(max(row + 8 * half, run.row_begin), run.row_end - 1);
        const auto of_query = bits_of_query<kCols>(run, bits, query, col - in_word);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const uint32_t word = of_query.words[8 * i / kKeysOfWord] >> in_word;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& score = scores[4 * i + 2 * half + j];
                score = word >> (8 * i % kKeysOfWord + j) & 1 ? score : -kInfinity;
            }
        }
    }
}

// The same of keys by queries, as runs of a walk by keys have them: `key` is the first of a warp's rows, `query` the
// first column. A lane looks up which of these keys every 32nd query sees, and all lanes ask each other.
template <int kCount>
__device__ __forceinline__ void apply_bits_to_keys(float (&scores)[kCount], const Run& run, const uint32_t* bits,
                                                   int key, int query) {
    constexpr int kQueries = 2 * kCount;
    const int lane = threadIdx.x % 32;
    const int number = (run.bits - 1) / kBitBlock;
    const int in_block = (run.bits - 1) % kBitBlock + key - run.row_begin;   // or outside, where rows are hidden
    const int first = min(max(in_block, 0), kBitBlock - kWarpRows);
    uint32_t seen_by[kQueries / 32];
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
        const int row = min(max(query - run.col_begin + 32 * i + lane, 0), kBitBlock - 1);
        const uint32_t* const words = bits + (static_cast<long long>(number) * kBitBlock + row) * kWordsOfQuery;
        const uint64_t high = words[min(first / kKeysOfWord + 1, kWordsOfQuery - 1)];
        seen_by[i] = (high << 32 | words[first / kKeysOfWord]) >> first % kKeysOfWord;
    }
    uint32_t own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int place = in_block - first + lane / 4 + 8 * half;
        own[half] = place >= 0 && place < kWarpRows ? 1u << place : 0;
    }
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int from = 8 * i % 32 + 2 * (lane % 4) + j;
            const uint32_t keys = __shfl_sync(0xffffffff, seen_by[8 * i / 32], from);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& score = scores[4 * i + 2 * half + j];
                score = keys & own[half] ? score : -kInfinity;
            }
        }
    }
}

}   // namespace ffa
