// The parameters of the forward kernel, as the host packs them.
#pragma once

#include "common/ptx.cuh"
#include "common/scheduler.cuh"
#include "common/tile_plan.cuh"
#include "scores/params.cuh"

namespace ffa::forward {

struct ForwardParams {
    TensorMap q;       // [nheads_q, total_q, head_dim], boxes of tile rows x 64 columns
    TensorMap k[2];    // [nheads_kv, total_k, head_dim], boxes of block_cols rows x 64 columns: local and remote keys
    TensorMap v[2];    // [nheads_kv, total_k, head_dim_v], likewise
    TensorMap out;     // [nheads_q, total_q, head_dim_v], boxes of 16 rows x 64 columns
    void* out_rows;    // [total_q, nheads_q, head_dim_v], with the strides below
    float* lse;        // [nheads_q, total_q]
    float* wide_out;   // fp32 [rows, nheads_q, head_dim_v], contiguous: instead of `out_rows`, for splits; or null
    float* wide_lse;   // [nheads_q, wide_rows]
    const float* prior_out;   // attention over other keys, to be merged with splits: as `wide_out`; or null
    const float* prior_lse;   // as `wide_lse`
    long long wide_rows;      // a head has in `wide_lse` or `prior_lse`
    const Run* runs;          // [num_runs]
    union {
        const Edges* edges;          // [total_q, kLanes], or nothing
        const uint32_t* map_words;   // of a block map
    };
    const int* split_shifts;   // [num_tiles]: rows from a split's own row to its row in `wide_out` or `prior_out`,
                               // kNotASplit for the other tiles; null where all are splits that lie at their own rows
    Schedule schedule;
    int total_q;
    int qhead_per_kvhead;
    int remote_begin;   // columns from here on are remote keys
    float scale_log2;   // softmax_scale * log2(e), or softcap * log2(e) where scores are capped
    float cap_scale;    // softmax_scale / softcap where scores are capped
    long long out_row_stride, out_head_stride;   // of `out_rows`, in elements
    float* max_scores;   // [nheads_q, total_q]: each becomes the largest of itself and of these scores; or null
};

static_assert(sizeof(ForwardParams) == 960, "packed by magi_compile/kernels/sm90/params.py");

// Where runs may have bits, or blocks of a map may ask.
struct BitsForwardParams : ForwardParams {
    union {
        const uint32_t* bits;     // [num_blocks, kBitBlock, kWordsOfQuery]
        const Edges* intervals;   // [total_q, kMapIntervals], of columns, where blocks of a map ask
    };
    const uint32_t* table;   // of a block table, where blocks of a map ask: of each query the way to its bits
};

static_assert(sizeof(BitsForwardParams) == 1024, "packed by magi_compile/kernels/sm90/params.py");

// Where a score program changes the scores: `scale_log2` is log2(e) then, and `cap_scale` the softmax_scale.
template <int kNumWords>
struct ScoredForwardParams : ForwardParams {
    union {
        const uint32_t* bits;   // as above, or null
        const Edges* intervals;
    };
    const uint32_t* table;   // as above
    ScoreParams<kNumWords> score;
};

// Of two launches, one in front of the arrival of remote keys and one behind it, that share all counters; zero in front
// of both.
struct EarlyForwardParams : ForwardParams {
    Schedule lists[3];                // see TileList
    const RemoteTile* remote_tiles;   // [num_tiles of kRemote]
    int* num_begun_splits;            // [1]: 0 while open; then 1 + number of splits begun
    int* num_stored;                  // [items of kSplits]: warps that have left their rows of it
    int split_rows;                   // that a split has in `wide_out`: those of split i begin at i times as many
    int first_behind;                 // thread block that begins behind the arrival; all from there on do
};

enum TileList {
    kRemote,   // tiles with remote keys
    kLocal,    // tiles without
    kSplits,   // the local runs of tiles with both
};

static_assert(sizeof(EarlyForwardParams) == 1088, "packed by magi_compile/kernels/sm90/params.py");

}   // namespace ffa::forward
