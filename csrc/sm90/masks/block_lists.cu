// Whether the block lists of a BlockMask agree with its mask_mod: a thread block for each q block of each entry.
//
//   key intervals of rows -> how many rows of the q block see each kv block, and see all of it
//   block lists           -> the kv blocks that every head lists, and those that some head calls full
//
// An entry is a batch entry, whose mask all heads have, or one of its heads, which reads its own lists.
//
// The last thread block to end reports what is wrong, and then empties the slices of the mask.
#include "common/block.cuh"
#include "visibility/block_list.cuh"

namespace ffa {

using Bits = unsigned long long;

constexpr int kChunk = 1024;   // kv blocks looked at together
constexpr int kWords = kChunk / 32;

struct BlockListsParams {
    const int*
        intervals;   // [2, num_lanes, batch * heads, seqlen_q]: first keys, then ends; those of a row never touch
    const unsigned* broken;   // [num_checks]: not 0 where the intervals mean nothing
    Bits* found;              // [2], zeros: becomes the complement of the first block that is wrong
    unsigned* num_done;       // zero
    int* q_ranges;            // [capacity, 2]
    int* k_ranges;            // [capacity, 2]
    int* mask_types;          // [capacity]
    Int* flags[2];            // of a block that is seen and not listed; of one that is listed as full and is not
    BlockList partial, full;
    int num_lanes, batch, seqlen_q, seqlen_k, block_rows, block_keys, num_checks, capacity;
    int heads, heads_per_group;   // as in MaskSlicesParams
};

struct Shared {
    int seen[kChunk];   // differences, from block to block, of how many rows see keys of it
    int full[kChunk];   // of how many rows see all of it
    unsigned of_head[kWords], of_all_heads[kWords], called_full[kWords];   // a bit for each kv block
    bool is_last;
};

class BlockLists {
public:
    __device__ BlockLists(const BlockListsParams& params, Shared& shared)
        : params_(params),
          shared_(shared),
          num_q_((params.seqlen_q + params.block_rows - 1) / params.block_rows),
          num_k_((params.seqlen_k + params.block_keys - 1) / params.block_keys),
          entry_(blockIdx.x / num_q_),
          b_(entry_ / params.heads),
          q_(blockIdx.x % num_q_) {}

    __device__ void run(int num_blocks) {
        for (int check = 0; check < params_.num_checks; ++check) {
            if (params_.broken[check] != 0) {
                return;   // for every thread block the same
            }
        }
        for (int begin = 0; begin < num_k_; begin += kChunk) {
            const int count = min(kChunk, num_k_ - begin);
            count_rows(begin, count);
            read_lists(begin, count);
            compare(begin, count);
        }
        for_each(1, [&](int) {
            __threadfence();
            shared_.is_last = atomicAdd(params_.num_done, 1u) + 1 == static_cast<unsigned>(num_blocks);
        });
        if (shared_.is_last) {
            report();
        }
    }

private:
    __device__ void count_rows(int begin, int count) {
        for_each(count, [&](int block) { shared_.seen[block] = shared_.full[block] = 0; });
        const int height = this->height();
        const Int num_rows = static_cast<Int>(params_.batch) * params_.heads * params_.seqlen_q;
        const Int first_row = static_cast<Int>(entry_) * params_.seqlen_q + static_cast<Int>(q_) * params_.block_rows;
        for_each(params_.num_lanes * height, [&](int i) {
            const Int place = i / height * num_rows + first_row + i % height;
            const int lo = params_.intervals[place];
            const int hi = params_.intervals[place + params_.num_lanes * num_rows];
            if (lo < hi) {
                const int keys = params_.block_keys;
                add(shared_.seen, lo / keys - begin, (hi - 1) / keys + 1 - begin, count);
                add(shared_.full, lo / keys + (lo % keys != 0) - begin,
                    (hi == params_.seqlen_k ? num_k_ : hi / keys) - begin, count);
            }
        });
    }

    // One row more for the blocks [first, last) of a chunk.
    __device__ static void add(int* differences, int first, int last, int count) {
        first = max(first, 0);
        if (first < min(last, count)) {
            atomicAdd(&differences[first], 1);
            if (last < count) {
                atomicAdd(&differences[last], -1);
            }
        }
    }

    __device__ void read_lists(int begin, int count) {
        for_each(kWords, [&](int word) {
            shared_.of_all_heads[word] = ~0u;
            shared_.called_full[word] = 0;
        });
        const bool has_own_lists = params_.heads > 1;
        const int first = has_own_lists ? entry_ % params_.heads : 0;
        const int end = has_own_lists ? first + 1 : max(params_.partial.num_heads, params_.full.num_heads);
        for (int head = first; head < end; ++head) {
            for_each(kWords, [&](int word) { shared_.of_head[word] = 0; });
            for_each_listed(params_.partial, head, begin, count,
                            [&](int word, unsigned bit) { atomicOr(&shared_.of_head[word], bit); });
            for_each_listed(params_.full, head, begin, count, [&](int word, unsigned bit) {
                atomicOr(&shared_.of_head[word], bit);
                atomicOr(&shared_.called_full[word], bit);
            });
            for_each(kWords, [&](int word) { shared_.of_all_heads[word] &= shared_.of_head[word]; });
        }
    }

    // What is listed beyond the kv blocks is left out.
    template <class Body>
    __device__ void for_each_listed(const BlockList& list, int head, int begin, int count, Body body) const {
        if (list.num_blocks == nullptr) {
            return;
        }
        const int h = list.num_heads == 1 ? 0 : head;
        const Int *of = list.num_blocks_strides, *at = list.indices_strides;
        const int listed = min(list.num_blocks[b_ * of[0] + h * of[1] + q_ * of[2]], list.num_columns);
        const int* const row = list.indices + (b_ * at[0] + h * at[1] + q_ * at[2]);
        for_each(listed, [&](int i) {
            const int block = row[i * at[3]] - begin;
            if (block >= 0 && block < count) {
                body(block / 32, 1u << block % 32);
            }
        });
    }

    __device__ void compare(int begin, int count) {
        const int height = this->height();
        const auto has = [](const unsigned* bits, int block) { return bits[block / 32] >> block % 32 & 1; };
        prefix_sum(
            count, [&](int block) { return shared_.seen[block]; },
            [&](int block, int before) {
                if (before + shared_.seen[block] > 0 && !has(shared_.of_all_heads, block)) {
                    note(0, begin + block);
                }
            });
        prefix_sum(
            count, [&](int block) { return shared_.full[block]; },
            [&](int block, int before) {
                if (before + shared_.full[block] < height && has(shared_.called_full, block)) {
                    note(1, begin + block);
                }
            });
    }

    __device__ void note(int check, int block) {
        atomicMax(&params_.found[check], ~(static_cast<Bits>(blockIdx.x) * num_k_ + block));
    }

    __device__ void report() {
        const Bits found[2] = {atomicMax(&params_.found[0], Bits{0}), atomicMax(&params_.found[1], Bits{0})};
        if ((found[0] | found[1]) == 0) {
            return;
        }
        // No kernel may meet the nonsense that such lists lead to.
        for_each(params_.capacity, [&](int i) {
            params_.q_ranges[2 * i] = params_.q_ranges[2 * i + 1] = 0;
            params_.k_ranges[2 * i] = params_.k_ranges[2 * i + 1] = 0;
            params_.mask_types[i] = 0;
        });
        // A flag that the host reads is 1, then the kv block, the q block and the batch entry.
        for_each(2, [&](int check) {
            if (found[check] != 0) {
                const Bits place = ~found[check];
                Int* const flag = params_.flags[check];
                flag[1] = place % num_k_;
                flag[2] = place / num_k_ % num_q_;
                flag[3] = place / num_k_ / num_q_ / params_.heads;
                __threadfence_system();
                flag[0] = 1;
            }
        });
    }

    // How many rows the q block has.
    __device__ int height() const { return min(params_.block_rows, params_.seqlen_q - q_ * params_.block_rows); }

    const BlockListsParams& params_;
    Shared& shared_;
    const int num_q_, num_k_;
    const int entry_, b_, q_;
};

}   // namespace ffa

extern "C" __global__ void __launch_bounds__(256)
    ffa_block_lists(const __grid_constant__ ffa::BlockListsParams params) {
    __shared__ ffa::Shared shared;
    ffa::BlockLists(params, shared).run(gridDim.x);
}
