// A plan as it lies in memory; `magi_compile/plan/tiles.py` says what it means.
#pragma once

namespace ffa {

struct Tile {
    int row_begin, row_end, run_begin, run_end;
};

// A diag_hi that cuts nothing, and the negative of such a diag_lo.
constexpr int kNoDiagonal = 1 << 30;

// Row r in [row_begin, row_end) sees the columns max(col_begin, r + diag_lo) <= c < min(col_end, r + diag_hi).
struct alignas(16) Run {
    int row_begin, row_end, col_begin, col_end;
    int diag_lo, diag_hi, first, num_blocks;
    int num_lead, num_trail, unused[2];

    __device__ __forceinline__ int visible_begin(int row) const { return max(col_begin, row + diag_lo); }
    __device__ __forceinline__ int visible_end(int row) const { return min(col_end, row + diag_hi); }
};

}  // namespace ffa
