// How the longest tiles of keys are divided among thread blocks. Where a tile of one key-value head would take longer than
// all SMs together need for its section of heads, the query heads of the group are dealt out in equal parts, an entry of
// the schedule each. A part adds its dk and dv to those of the part before, in fp32 and one after the other, so that sums
// repeat bit for bit; the last one stores them.
#pragma once

#include "bwd_walk.cuh"
#include "plan.cuh"

namespace ffa {

constexpr int kSplitTiles = 64;       // of a head, the first and so the longest: no others are divided
constexpr int kSplitArrivals = 8;     // of a tile, one for each warp

struct SplitEntry {
    int tile;
    int part;
    int num_parts;
};

// What the kernel in front works out, and what the parts hand over.
struct Split {
    int* table;        // the schedule's entries: how many more than tiles, how many listed, then those, of the first tiles
    int* arrivals;     // [min(num_tiles, kSplitTiles)][num_heads][kSplitArrivals]: parts that have handed over
    float* partials;   // [min(num_tiles, kSplitTiles)][num_heads][2, for dk and dv][tile_rows * head_dim]
};

static_assert(sizeof(Split) == 24, "packed by magi_compile/kernels/cuda/backward.py");

constexpr int kSplitHeader = 2;
constexpr int kPartBits = 12;   // query heads of a group: fewer than this many bits hold

// The entries beyond one for each tile.
struct SplitExtra {
    const Split& split;

    __device__ __forceinline__ int operator()() const { return split.table[0]; }
};

__device__ __forceinline__ SplitEntry split_entry(const Split& split, int entry) {
    if (entry >= split.table[1]) {
        return {entry - split.table[0], 0, 1};
    }
    const int packed = split.table[kSplitHeader + entry];
    const int parts = packed >> 6;
    return {packed % kSplitTiles, parts & ((1 << kPartBits) - 1), parts >> kPartBits};
}

// By one thread block of kThreads, for what the main kernel is about to walk.
template <int kThreads, int kBlockCols>
class SplitDealer {
public:
    struct Params {
        const Tile* tiles;   // [num_tiles], longest first
        const Run* runs;
        Split split;
        int num_tiles;
        int num_heads;            // of keys
        int qhead_per_kvhead;
        float shares;             // a tile that holds more than one of so many shares of the work is divided
    };

    static_assert(sizeof(Params) == 56, "packed by magi_compile/kernels/cuda/backward.py");
    static_assert(kThreads >= kSplitTiles, "one thread for each tile that may be divided");

    __device__ __forceinline__ static void deal(const Params& params) {
        __shared__ unsigned long long total;
        __shared__ int num_parts[kSplitTiles];
        const int num_listed = min(params.num_tiles, kSplitTiles);
        if (threadIdx.x == 0) {
            total = 0;
        }
        __syncthreads();
        unsigned long long blocks = 0;
        const int mine = threadIdx.x < num_listed ? num_blocks(params, threadIdx.x) : 0;
        for (int tile = threadIdx.x; tile < params.num_tiles; tile += kThreads) {
            blocks += num_blocks(params, tile);
        }
        atomicAdd(&total, blocks);
        __syncthreads();
        if (threadIdx.x < num_listed) {
            num_parts[threadIdx.x] = parts(mine * params.shares / total, params.qhead_per_kvhead);
        }
        __syncthreads();
        if (threadIdx.x < num_listed) {
            list(params, num_parts, num_listed);
        }
        for (int i = threadIdx.x; i < num_listed * params.num_heads * kSplitArrivals; i += kThreads) {
            params.split.arrivals[i] = 0;
        }
    }

private:
    __device__ __forceinline__ static int num_blocks(const Params& params, int tile) {
        return blocks_of_tile<kBlockCols>(params.tiles[tile], params.runs);
    }

    // The least divisor of the group that is not less than what the tile has of an equal share of the work.
    __device__ __forceinline__ static int parts(float shares, int group) {
        int parts = 1;
        while (parts < group && (parts < shares || group % parts != 0)) {
            ++parts;
        }
        return parts;
    }

    __device__ __forceinline__ static void list(const Params& params, const int* num_parts, int num_listed) {
        int first = 0;
        for (int tile = 0; tile < threadIdx.x; ++tile) {
            first += num_parts[tile];
        }
        const int count = num_parts[threadIdx.x];
        for (int part = 0; part < count; ++part) {
            params.split.table[kSplitHeader + first + part] = (count << kPartBits | part) << 6 | threadIdx.x;
        }
        if (threadIdx.x == num_listed - 1) {
            params.split.table[0] = first + count - num_listed;
            params.split.table[1] = first + count;
        }
    }
};

}  // namespace ffa
