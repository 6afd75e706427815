// The parameters of the backward kernels, as the host packs them.
#pragma once

#include "backward/schedule/agenda.cuh"
#include "common/ptx.cuh"
#include "common/tile_plan.cuh"
#include "scores/params.cuh"

namespace ffa::backward {

// Where dq is summed up in fp32, in the order in which the warps hold it, so that 16 rows are one contiguous piece:
// [nheads_q][row / 16][col / 8][lane][4], a lane's four as in the accumulator of a wgmma: two neighbouring columns of
// row lane / 4, and of row lane / 4 + 8. When all have added to 16 rows of a head what they have, these are rounded.
constexpr int kDqGroupRows = 16;
constexpr int kDqGroupCols = 8;

struct DqSums {
    float* data;
    int row_groups;   // of a head
};

static_assert(sizeof(DqSums) == 16, "packed by magi_compile/kernels/sm90/params.py");

// How many have added to 16 rows of a head, of all that will. One visit is a run of a tile that holds some of them, by
// one thread block: where a cluster shares a tile, each of its blocks counts as `done`.
struct DqVisits {
    int* done;   // [nheads_q][row_groups]; zero at launch
    const int*
        wanted;   // [row_groups]: how many there will be, for each head; null where rows are rounded behind the kernel
    const int* turns;   // [num_tiles][row_groups], where additions have an order, which is that of the plan's tiles:
                        // how many come from the tiles before
};

// The lines of the walk by queries of a block map, which say whose turn it is where additions have an order.
struct QueryLines {
    const uint32_t* words;   // [heads, batch, lines of an entry, num_words]
    int seqlen;              // queries of a batch entry
    int rows;                // queries of a line
    int lines_of_entry;
    int lines_of_head;    // 0 where all heads have the same
    int num_words;        // of a line
    int blocks_of_tile;   // bits of a line for each tile of keys, 1 or 2
    int tiles_of_entry;   // of keys
};

static_assert(sizeof(QueryLines) == 40, "packed by magi_compile/kernels/sm90/params.py");

// The group of rows that `row` is the first of.
template <int kHeadDim>
__device__ __forceinline__ float* dq_rows(const DqSums& sums, int head, int row) {
    return sums.data + (static_cast<long long>(head) * sums.row_groups * kDqGroupRows + row) * kHeadDim;
}

// 16 rows of a head.
struct DqItem {
    int head, group;
};

// All of them, to be numbered.
struct DqItems {
    DqSums sums;
    void* dq;   // [total_q, num_heads, head_dim], contiguous
    int total_q;
    int num_heads;
    int qhead_per_kvhead;
    float softmax_scale;

    __device__ __forceinline__ int count() const { return sums.row_groups * num_heads; }

    __device__ __forceinline__ DqItem item(int number, const DqOrder& order) const {
        const int heads = order.heads_of_turn / order.passes;   // that are complete at about the same time
        const int of_group = qhead_per_kvhead / order.passes;   // of these
        const int in_pass = number % (sums.row_groups * heads);
        const int pass = number / (sums.row_groups * heads);
        const int head_in_pass = in_pass % heads;
        const int first =
            pass / order.passes * order.heads_of_turn + (order.passes - 1 - pass % order.passes) * of_group;
        return {first + head_in_pass / of_group * qhead_per_kvhead + head_in_pass % of_group, in_pass / heads};
    }
};

static_assert(sizeof(DqItems) == 40, "packed by magi_compile/kernels/sm90/params.py");

// How far the main kernel has come. To the one behind it leaves items that nobody has drawn, and those that some warps
// did not wait for.
struct DqProgress {
    int next;                 // item to draw
    int end;                  // from here on none are
    int more_head_by_head;    // tiles that walk so, beyond those that do not; the kernel in front counts them
    int num_gone;             // warps that did not wait any longer
    DqOrder order_of_tiles;   // whatever their walks are; who writes the agenda knows it
    int num_left;

    // All but the order.
    __device__ __forceinline__ void reset() {
        next = more_head_by_head = num_gone = num_left = 0;
        end = 0x7fffffff;
    }

    __device__ __forceinline__ DqOrder order(const DqItems& items) const {
        return {order_of_tiles.heads_of_turn, more_head_by_head > 0 ? items.qhead_per_kvhead : order_of_tiles.passes};
    }

    __device__ __forceinline__ int first_not_drawn(int count) const { return min(min(next, end), count); }

    // [num_left]; they lie behind.
    __device__ __forceinline__ int* left() { return &num_left + 1; }
};

struct BackwardParams {
    TensorMap q;       // [nheads_q, total_q, head_dim], boxes of block_cols rows x 64 columns
    TensorMap dout;    // [nheads_q, total_q, head_dim_v], likewise
    TensorMap k;       // [nheads_kv, total_k, head_dim], boxes of 128 rows x 64 columns
    TensorMap v;       // [nheads_kv, total_k, head_dim_v], likewise
    TensorMap stats;   // [nheads_q, total_q / 8] of Stats in 8-byte words, boxes of block_cols queries
    TensorMap dk;      // [nheads_kv, total_k, head_dim], boxes of 16 rows x 64 columns
    TensorMap dv;      // [nheads_kv, total_k, head_dim_v], likewise
    void* dk_rows;     // [total_k, nheads_kv, head_dim], contiguous
    void* dv_rows;     // [total_k, nheads_kv, head_dim_v], contiguous
    DqItems dq;
    DqVisits visits;
    DqProgress* dq_progress;
    const Run* runs;   // [num_runs], rows are keys
    union {
        const Edges* edges;          // [total_k, kLanes]
        const uint32_t* map_words;   // of a block map
    };
    int qhead_per_kvhead;
    float scale_log2;    // softmax_scale * log2(e), or softcap * log2(e) where scores are capped
    float cap_scale;     // softmax_scale / softcap where scores are capped
    int tiles_of_head;   // from the tiles of a query head to those of the next one: 0 where all have the same
    const Tile* tiles;   // [num_tiles], of keys, of each query head behind one another where they have their own
    Agenda agenda;
    QueryLines query_lines;
};

// Where runs may have bits, or blocks of a map may ask.
struct BitsBackwardParams : BackwardParams {
    union {
        const uint32_t* bits;     // [num_blocks, kBitBlock, kWordsOfQuery]
        const Edges* intervals;   // [total_q, kMapIntervals], of columns, where blocks of a map ask
    };
    const uint32_t* table;   // of a block table, where blocks of a map ask: of each key the way to its bits
};

// Where a score program changes the scores: `scale_log2` is log2(e) then, and `cap_scale` the softmax_scale.
template <int kNumWords>
struct ScoredBackwardParams : BackwardParams {
    union {
        const uint32_t* bits;   // as above, or null
        const Edges* intervals;
    };
    const uint32_t* table;   // as above
    ScoreParams<kNumWords> score;
};

static_assert(sizeof(BitsBackwardParams) == 1216, "packed by magi_compile/kernels/sm90/params.py");
static_assert(sizeof(BackwardParams) == 1152, "packed by magi_compile/kernels/sm90/params.py");

}   // namespace ffa::backward
