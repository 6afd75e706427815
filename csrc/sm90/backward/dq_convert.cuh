// Rows of dq from sums that are complete: scaled, rounded, in the order of their columns.
#pragma once

#include "backward/dq_accumulator.cuh"
#include "backward/dq_order.cuh"
#include "common/ptx.cuh"

namespace ffa {

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
        const int first = pass / order.passes * order.heads_of_turn + (order.passes - 1 - pass % order.passes) * of_group;
        return {first + head_in_pass / of_group * qhead_per_kvhead + head_in_pass % of_group, in_pass / heads};
    }
};

static_assert(sizeof(DqItems) == 40, "packed by magi_compile/kernels/cuda/params.py");

// How far the main kernel has come. To the one behind it leaves items that nobody has drawn, and those that some warps did not wait
// for.
struct DqProgress {
    int next;                // item to draw
    int end;                 // from here on none are
    int more_head_by_head;   // tiles that walk so, beyond those that do not; the kernel in front counts them
    int num_gone;            // warps that did not wait any longer
    DqOrder order_of_tiles;  // whatever their walks are; who writes the agenda knows it
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

// By a warp, so many groups of columns at a time.
template <class Element, int kHeadDim, int kColGroupsAtOnce>
class DqRounding {
public:
    __device__ __forceinline__ explicit DqRounding(const DqItems& items) : items_(items) {}

    // The four lanes of a quad have 8 columns of two rows together. Of two such groups of columns, each gets one row.
    __device__ __forceinline__ void round(int head, int group) const {
        const int first_row = group * kDqGroupRows;
        const int row = first_row + lane() / 4 + lane() % 2 * (kDqGroupRows / 2);
        const float4* from = reinterpret_cast<const float4*>(dq_rows<kHeadDim>(items_.sums, head, first_row)) + lane();
        Element* to = static_cast<Element*>(items_.dq) +
                      (static_cast<long long>(row) * items_.num_heads + head) * kHeadDim + lane() % 4 / 2 * kDqGroupCols;
        const bool is_there = row < items_.total_q;
#pragma unroll 1
        for (int i = 0; i < kHeadDim / kDqGroupCols / kColGroupsAtOnce; ++i) {
            float4 sums[kColGroupsAtOnce];
#pragma unroll
            for (int j = 0; j < kColGroupsAtOnce; ++j) {
                sums[j] = __ldcg(from + 32 * j);
            }
#pragma unroll
            for (int j = 0; j < kColGroupsAtOnce; j += 2) {
                const uint4 cols = transposed({scaled(sums[j].x, sums[j].y), scaled(sums[j].z, sums[j].w),
                                               scaled(sums[j + 1].x, sums[j + 1].y),
                                               scaled(sums[j + 1].z, sums[j + 1].w)});
                if (is_there) {
                    *reinterpret_cast<uint4*>(to + j * kDqGroupCols) = cols;
                }
            }
            from += 32 * kColGroupsAtOnce;
            to += kColGroupsAtOnce * kDqGroupCols;
        }
    }

private:
    static_assert(kHeadDim / kDqGroupCols % kColGroupsAtOnce == 0 && kColGroupsAtOnce % 2 == 0, "whole steps, whole pairs");

    // No register keeps it: in the main kernel there are few.
    __device__ __forceinline__ static int lane() { return opaque(threadIdx.x) % 32; }

    __device__ __forceinline__ uint32_t scaled(float first, float second) const {
        return pack<Element>(first * items_.softmax_scale, second * items_.softmax_scale);
    }

    // The words of this lane's number that the lanes of the quad have.
    __device__ __forceinline__ uint4 transposed(const uint4& words) const {
        const bool is_upper = lane() % 4 / 2 != 0, is_odd = lane() % 2 != 0;
        const uint2 received{shuffled(is_upper ? words.x : words.z, 2), shuffled(is_upper ? words.y : words.w, 2)};
        // Those that this pair of lanes wants, of lanes 0 and 1, and of lanes 2 and 3.
        const uint2 first = is_upper ? received : uint2{words.x, words.y};
        const uint2 second = is_upper ? uint2{words.z, words.w} : received;
        const uint32_t from_first = shuffled(is_odd ? first.x : first.y, 1);
        const uint32_t from_second = shuffled(is_odd ? second.x : second.y, 1);
        return is_odd ? uint4{from_first, first.y, from_second, second.y}
                      : uint4{first.x, from_first, second.x, from_second};
    }

    __device__ __forceinline__ static uint32_t shuffled(uint32_t word, int distance) {
        return __shfl_xor_sync(0xffffffff, word, distance);
    }

    const DqItems& items_;
};

}  // namespace ffa
