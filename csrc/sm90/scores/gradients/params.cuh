// The parameters of the kernel of gradients of captured tensors, as the host packs them.
#pragma once

#include "common/ptx.cuh"
#include "common/scheduler.cuh"
#include "common/statistics.cuh"
#include "common/tile_plan.cuh"
#include "scores/params.cuh"

namespace ffa::scores {

// `kNumSums` are the look-ups whose tensors need gradients; those of one tensor add to the same numbers.
template <int kNumWords, int kNumSums>
struct TableGradientsParams {
    TensorMap q;             // [nheads_q, total_q, head_dim], boxes of tile rows x 64 columns
    TensorMap dout;          // [nheads_q, total_q, head_dim_v], likewise
    TensorMap k;             // [nheads_kv, total_k, head_dim], boxes of block_cols rows x 64 columns
    TensorMap v;             // [nheads_kv, total_k, head_dim_v], likewise
    const float* lse;        // [nheads_q, total_q], natural log
    const Stats* stats;      // [nheads_q, padded_q / 8], of which -delta is read
    const Run* runs;         // [num_runs], rows are queries
    const Edges* edges;      // [total_q, kLanes], or nothing
    const uint32_t* bits;    // [num_blocks, kBitBlock, kWordsOfQuery], or null
    float* sums[kNumSums];   // as each captured tensor, contiguous
    Schedule schedule;       // `ticket` is null: each item has a thread block
    int total_q;
    int padded_q;   // a multiple of 16
    int qhead_per_kvhead;
    float scale_log2;   // log2(e)
    float cap_scale;    // softmax_scale
    ScoreParams<kNumWords> score;
};

}   // namespace ffa::scores
