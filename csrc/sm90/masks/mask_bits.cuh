// A mask_mod to slices and bit blocks: what `slices_with_bits` computes. A thread block for each block of 128 queries
// and 128 keys: everything is visible, then it is a slice; nothing is, then an empty slice; else a slice with bits,
// whose number is that of the block.
//
// `Mask` is made by magi_compile/kernels/sm90/masks/bits_source.py. The last thread block to end reports what is wrong.
#pragma once
#include "common/block.cuh"
#include "masks/lanes.cuh"
#include "functions/tables.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

constexpr int kBlock = kBitBlock;
constexpr int kWords = kBlock / 32;
constexpr int kRowsOfWarp = 16;
constexpr int kBitsThreads = kBlock / kRowsOfWarp * 32;

// kNumWords values of 8 bytes follow: what the mask captures; then where each check reports, of one more check than
// the mask has where there are block lists.
struct MaskBitsParams {
    int* q_ranges;                  // [num_blocks, 2]
    int* k_ranges;                  // [num_blocks, 2]
    int* mask_types;                // [num_blocks]
    unsigned* bits;                 // [num_blocks, kBlock, kWords]
    Bits* found;                    // [kNumChecks + 2], zeros: becomes the complement of the first pair that is wrong
    unsigned* num_done;             // zero
    const unsigned char* partial;   // [list_batch, list_heads, q blocks, kv blocks] of the block lists
    const unsigned char* full;      // the same
    int heads_q, heads_kv, seqlen_q, seqlen_k;
    int list_batch, list_heads, list_rows, list_keys;
};

static_assert(sizeof(MaskBitsParams) == 96, "packed by magi_compile/kernels/sm90/params.py");

struct BitsOfBlock {
    unsigned words[kBlock * kWords];
    int num_shown;
    bool is_last;
};

// Reports where a check of the mask fails, at one pair.
struct Point {
    const Int* words;
    Bits* found;
    Int place;

    __device__ __forceinline__ Int word(int i) const { return words[i]; }
    __device__ __forceinline__ void require(int check, bool holds, Int) const {
        if (!holds) {
            atomicMax(&found[check], ~static_cast<Bits>(place));
        }
    }
};

// Finds what a failed check is about.
struct Finder {
    const Int* words;
    int check;
    Int* value;

    __device__ __forceinline__ Int word(int i) const { return words[i]; }
    __device__ __forceinline__ void require(int other, bool holds, Int sought) const {
        if (other == check && !holds) {
            *value = sought;
        }
    }
};

template <class Mask, bool kHasLists>
class MaskBits {
public:
    static constexpr int kNumChecks = Mask::kNumChecks + (kHasLists ? 1 : 0);

    __device__ MaskBits(const MaskBitsParams& params, const Int* words, BitsOfBlock& shared)
        : params_(params),
          words_(words),
          shared_(shared),
          blocks_q_((params.seqlen_q + kBlock - 1) / kBlock),
          blocks_k_((params.seqlen_k + kBlock - 1) / kBlock) {}

    __device__ void run(int block, int num_blocks) {
        const Place place = place_of(block);
        for_each(1, [&](int) { shared_.num_shown = 0; });
        for_each_warp(kBlock / kRowsOfWarp, [&](int warp) { evaluate(block, place, warp * kRowsOfWarp); });
        write(block, place);
        if (kNumChecks > 0) {
            for_each(1, [&](int) {
                __threadfence();
                shared_.is_last = atomicAdd(params_.num_done, 1u) + 1 == static_cast<unsigned>(num_blocks);
            });
            if (shared_.is_last) {
                report();
            }
        }
    }

private:
    struct Place {
        int b, h, first_row, first_key;
    };

    __device__ Place place_of(int block) const {
        const int line = block / blocks_k_, entry = line / blocks_q_;
        return {entry / params_.heads_q, entry % params_.heads_q, line % blocks_q_ * kBlock,
                block % blocks_k_ * kBlock};
    }

    __device__ int num_rows(const Place& place) const { return min(kBlock, params_.seqlen_q - place.first_row); }
    __device__ int num_keys(const Place& place) const { return min(kBlock, params_.seqlen_k - place.first_key); }

    // What a warp sees of the rows from `begin` on. Pairs beyond the ends are those at the ends, and not visible.
    __device__ void evaluate(int block, const Place& place, int begin) {
        const int rows = num_rows(place), keys = num_keys(place);
        const auto at = [&](int row, int key) {
            return Point{words_, params_.found, (static_cast<Int>(block) * kBlock + row) * kBlock + key};
        };
        PerLane<typename Mask::Key> of_keys[kWords];
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            for_each_lane([&](int lane) {
                const int key = min(32 * word + lane, keys - 1);
                of_keys[word][lane] = Mask::key(at(0, key), place.b, place.h, place.first_key + key);
            });
        }
        int num_shown = 0;
#pragma unroll 1
        for (int i = begin; i < begin + kRowsOfWarp; ++i) {
            const int row = min(i, rows - 1), q = place.first_row + row;
            const typename Mask::Row of_row = Mask::row(at(row, 0), place.b, place.h, q);
#pragma unroll
            for (int word = 0; word < kWords; ++word) {
                const unsigned bits = ballot([&](int lane) {
                    const int key = min(32 * word + lane, keys - 1), kv = place.first_key + key;
                    const bool is_there = i < rows && 32 * word + lane < keys;
                    const Point point = at(row, key);
                    const bool is_seen = Mask::pair(point, of_row, of_keys[word][lane], place.b, place.h, q, kv);
                    return is_there && by_lists(is_seen, point, place, q, kv);
                });
                num_shown += __popc(bits);
                once([&] { shared_.words[i * kWords + word] = bits; });
            }
        }
        once([&] { atomicAdd(&shared_.num_shown, num_shown); });
    }

    // What is visible with the block lists, of a pair that is there.
    __device__ __forceinline__ bool by_lists(bool is_seen, const Point& point, const Place& place, int q,
                                             int kv) const {
        if constexpr (!kHasLists) {
            return is_seen;
        } else {
            const int b = min(place.b, params_.list_batch - 1), h = min(place.h, params_.list_heads - 1);
            const int num_q = (params_.seqlen_q + params_.list_rows - 1) / params_.list_rows;
            const int num_k = (params_.seqlen_k + params_.list_keys - 1) / params_.list_keys;
            const Int line = (static_cast<Int>(b) * params_.list_heads + h) * num_q + q / params_.list_rows;
            const Int at = line * num_k + kv / params_.list_keys;
            const bool is_full = params_.full[at] != 0, is_listed = is_full || params_.partial[at] != 0;
            point.require(Mask::kNumChecks, is_seen || !is_full, 0);
            return is_seen && is_listed;
        }
    }

    __device__ void write(int block, const Place& place) {
        const int rows = num_rows(place), keys = num_keys(place), num_shown = shared_.num_shown;
        const bool is_empty = num_shown == 0, has_bits = !is_empty && num_shown < rows * keys;
        for_each(1, [&](int) {
            const int entry = place.b * params_.heads_q + place.h;
            const int kv_head = place.h / (params_.heads_q / params_.heads_kv);
            const int q = entry * params_.seqlen_q + place.first_row;
            const int k = (place.b * params_.heads_kv + kv_head) * params_.seqlen_k + place.first_key;
            params_.q_ranges[2 * block] = is_empty ? 0 : q;
            params_.q_ranges[2 * block + 1] = is_empty ? 0 : q + rows;
            params_.k_ranges[2 * block] = is_empty ? 0 : k;
            params_.k_ranges[2 * block + 1] = is_empty ? 0 : k + keys;
            params_.mask_types[block] = has_bits ? kFirstBits + block : 0;
        });
        if (has_bits) {
            unsigned* const bits = params_.bits + static_cast<Int>(block) * kBlock * kWords;
            for_each(kBlock * kWords, [&](int i) { bits[i] = shared_.words[i]; });
        }
    }

    // Checks in the same words share a flag: the first of them says what it found.
    __device__ void report() {
        for_each(1, [&](int) {
            for (int check = kNumChecks - 1; check >= 0; --check) {
                const Bits found = atomicMax(&params_.found[check], Bits{0});
                if (found != 0) {
                    report(check, ~found, reinterpret_cast<Int*>(words_[Mask::kNumWords + check]));
                }
            }
        });
    }

    // A flag that the host reads is 1, then what was found.
    __device__ void report(int check, Int pair, Int* flag) {
        const Place place = place_of(static_cast<int>(pair / (kBlock * kBlock)));
        const int q = place.first_row + static_cast<int>(pair / kBlock % kBlock);
        const int kv = place.first_key + static_cast<int>(pair % kBlock);
        if (check < Mask::kNumChecks) {
            const Finder finder{words_, check, flag + 1};
            const auto of_row = Mask::row(finder, place.b, place.h, q);
            const auto of_key = Mask::key(finder, place.b, place.h, kv);
            Mask::pair(finder, of_row, of_key, place.b, place.h, q, kv);
            flag[2] = q;
            flag[3] = kv;
        } else {
            flag[1] = kv / params_.list_keys;
            flag[2] = q / params_.list_rows;
            flag[3] = place.b;
        }
        __threadfence_system();
        flag[0] = 1;
    }

    const MaskBitsParams& params_;
    const Int* const words_;
    BitsOfBlock& shared_;
    const int blocks_q_, blocks_k_;
};

}   // namespace ffa
