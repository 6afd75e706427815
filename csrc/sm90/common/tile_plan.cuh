// A plan as it lies in memory; `magi_compile/plan/tiles.py` says what it means.
#pragma once

namespace ffa {

struct Tile {
    int row_begin, row_end, run_begin, run_end;
};

// Tiles may be cut into splits, each with some of the tile's blocks, whose results lie in rows of their own until they
// are merged. A shift leads from a split's row to there; this one says that a tile is whole.
constexpr int kNotASplit = -2147483647 - 1;

// A tile in splits: those of split i begin at `split_row` + i * rows of a tile.
struct alignas(16) Cut {
    int row_begin, row_end, split_row, num_splits;
};

// What a tile with remote keys is beside that: its remote runs begin at `run_mid`, its local ones are the split
// `split`, or kNoSplit.
struct RemoteTile {
    int run_mid, split;
};

constexpr int kNoSplit = -1;

// A diag_hi that cuts nothing, and the negative of such a diag_lo.
constexpr int kNoDiagonal = 1 << 30;

// A slice of this type has the first bit block, one of the next type the second; a block is so many queries and keys.
constexpr int kFirstBits = 4;
constexpr int kBitBlock = 128;

// The columns that a row sees.
struct alignas(8) Edges {
    int begin, end;
};

// How many stairs a tile may have: a row has edges for each of them.
constexpr int kLanes = 4;

// Row r in [row_begin, row_end) sees the columns max(col_begin, r + diag_lo) <= c < min(col_end, r + diag_hi); if there
// is a lane, what its edges there say; if there are bits, what they show of the columns (bits.cuh). A run of a block
// map has at `bits` its first word, and `num_blocks` of its blocks are seen (block_map.cuh).
struct alignas(16) Run {
    int row_begin, row_end, col_begin, col_end;
    int diag_lo, diag_hi, first, num_blocks;
    int num_lead, num_trail, lane, bits;

    // What a row of this run sees, if there is no lane.
    __device__ __forceinline__ Edges band(int row) const {
        return {max(col_begin, row + diag_lo), min(col_end, row + diag_hi)};
    }

    // And if there is one.
    __device__ __forceinline__ Edges looked_up(int row, const Edges* edges) const {
        return edges[row * kLanes + lane - 1];
    }
};

__device__ __forceinline__ int count_blocks(const Run* runs, const Tile& tile) {
    int sum = 0;
#pragma unroll 8
    for (int i = tile.run_begin; i < tile.run_end; ++i) {
        sum += runs[i].num_blocks;
    }
    return sum;
}

}   // namespace ffa
