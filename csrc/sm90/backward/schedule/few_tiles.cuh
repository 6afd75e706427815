// How long a part of a tile may be where tiles are few: thread blocks that run out of work wait for the longest part, and each part
// costs something too.
//
// Of several lengths, in a thread block's shares of all work, the one is taken by which all is over first. For that, this is the
// estimate: of parts that are no shorter than one of them, some thread block has as many as there are for each, rounded up. It is the
// least that they can take, and about what they do take where the longest come first.
#pragma once

#include "common/block.cuh"

namespace ffa {

constexpr float kMostShare = 1.5f, kNextShare = 0.8f;
constexpr int kNumShares = 8;   // one for each warp of a block
// What an item costs beside its visits, what one does that is a part, and by how much all must be over earlier to pay for shorter
// parts.
constexpr int kVisitsOfItem = 4, kVisitsOfPart = 6, kLeastGain = 10;

// The least divisor of the group by which no part of so many blocks of queries is longer than a thread block's share of what is left.
__device__ __forceinline__ int parts_within(int blocks, int group, int num_blocks, float left) {
    const float shares = static_cast<float>(blocks) * num_blocks;
    int parts = 1;
#pragma unroll 1
    while (parts < group && (parts * left < shares || group % parts != 0)) {
        ++parts;
    }
    return parts;
}

struct FewTiles {
    const int* blocks_before;   // [num_tiles + 1]: of queries, of one head
    int num_tiles;
    int num_heads;   // of keys
    int qhead_per_kvhead;
    int num_blocks;   // of threads, that work
    float blocks_of_all;   // of queries, for all heads of keys
    int most_parts;   // of tiles that have several, for one head of keys

    __device__ __forceinline__ static float share_of(int n) {
        float share = kMostShare;
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
            share *= kNextShare;
        }
        return share;
    }

    // Parts of a tile for one head of keys, and how long each is.
    struct Parts {
        int num, visits;
    };

    __device__ __forceinline__ Parts parts_of(int tile, float share) const {
        if (tile >= num_tiles) {
            return {0, 0};
        }
        const int blocks = blocks_before[tile + 1] - blocks_before[tile];
        const int num = parts_within(blocks, qhead_per_kvhead, num_blocks, share * blocks_of_all);
        return {num, blocks * qhead_per_kvhead / num + kVisitsOfItem + (num > 1 ? kVisitsOfPart : 0)};
    }

    // When all is over, at least, by all threads of a warp; kNever where there is no room for so many parts.
    __device__ __forceinline__ int end(float share) const {
        const int lane = threadIdx.x % 32;
        int longest = 0, all = 0, parts = 0;
#pragma unroll 1
        for (int first = 0; first < num_tiles; first += 32) {
            const Parts own = parts_of(first + lane, share);
            all += own.num * own.visits;
            parts += own.num > 1 ? own.num : 0;
            int num_no_shorter = 0;
#pragma unroll 1
            for (int from = 0; from < num_tiles; from += 32) {
                const Parts others = from == first ? own : parts_of(from + lane, share);
#pragma unroll 4
                for (int i = 0; i < 32; ++i) {
                    const int num = __shfl_sync(~0u, others.num, i);
                    num_no_shorter += __shfl_sync(~0u, others.visits, i) < own.visits ? 0 : num;
                }
            }
            longest = max(longest, (num_no_shorter * num_heads + num_blocks - 1) / num_blocks * own.visits);
        }
        longest = __reduce_max_sync(~0u, longest);
        all = __reduce_add_sync(~0u, all);
        parts = __reduce_add_sync(~0u, parts);
        const int mean = static_cast<int>(1ll * all * num_heads / num_blocks);
        return parts > most_parts && share < kMostShare ? kNever : max(longest, mean);
    }

    static constexpr int kNever = 1 << 27;
};

// That length, for all threads of a block, of which each warp looks at one.
inline __device__ __noinline__ float best_share(FewTiles tiles) {
    const int n = threadIdx.x / 32;
    const int end = tiles.end(FewTiles::share_of(n)) + (n > 0 ? kLeastGain : 0);
    return FewTiles::share_of(least_of_warps(end * kNumShares + n) % kNumShares);
}

}  // namespace ffa
