// Where packed rows lie: batch entry, head, and place in the sequence, as a score program knows them. A row is
// `entry * seqlen + place`, and entries are those of the batch, or, where heads are entries of their own, those of all
// heads of the batch.
//
// A division finds the entry of a row. Columns of a block mostly have one entry, which is that of the block before:
// then nothing is divided, and what depends on the entry alone is computed once.
#pragma once

#include "common/ptx.cuh"

namespace ffa {

// Of queries or of keys.
struct Sequences {
    int length;
    int heads;   // that are entries of their own for each entry of the batch, else 1
};

static_assert(sizeof(Sequences) == 8, "packed by magi_compile/kernels/sm90/params.py");

struct Place {
    int b, h, at;
    float as_float;   // `at`, exact up to 2^24
};

struct Entry {
    int b, h, first_row;

    __device__ __forceinline__ Place place(int row) const {
        return {b, h, row - first_row, static_cast<float>(row - first_row)};
    }
};

// `head` is that of the packed tensors.
__device__ __forceinline__ Entry entry_of(const Sequences& sequences, int row, int head) {
    const int number = row / sequences.length;
    const int b = sequences.heads == 1 ? number : number / sequences.heads;
    return {b, head + number - b * sequences.heads, number * sequences.length};
}

// Columns that a thread has of a block of scores, in pairs of neighbours.
template <int kCols>
class Columns {
public:
    __device__ __forceinline__ explicit Columns(const Sequences& sequences) : sequences_(sequences) {}

    // `first` is the first column of the block. All lanes of a warp are here.
    __device__ __forceinline__ void move_to(int first, int head) {
        first_ = first;
        if (__any_sync(0xffffffff, !have_one_entry())) {
            entry_ = entry_of(sequences_, first, 0);
        }
        head_ = head;
    }

    __device__ __forceinline__ bool have_one_entry() const {
        return first_ >= entry_.first_row && first_ - entry_.first_row <= sequences_.length - kCols;
    }

    __device__ __forceinline__ Entry entry() const { return {entry_.b, entry_.h + head_, entry_.first_row}; }

    // visit(i, left, right) for each 8 columns, with the places of two. The columns have one entry.
    template <class Visit>
    __device__ __forceinline__ void for_each_pair(Visit visit) const {
        const Entry entry = this->entry();
        const Place first = entry.place(first_ + 2 * (threadIdx.x % 4));
#pragma unroll
        for (int i = 0; i < kCols / 8; ++i) {
            visit(i, behind(first, 8 * i), behind(first, 8 * i + 1));
        }
    }

    // The same of any columns: those without an entry are of some entry.
    template <class Visit>
    __device__ __forceinline__ void for_each_pair_of_entries(Visit visit) const {
        Entry entry = this->entry();
#pragma unroll
        for (int i = 0; i < kCols / 8; ++i) {
            const int col = first_ + 2 * (threadIdx.x % 4) + 8 * i;
            const Place left = place_behind(entry, col);
            visit(i, left, place_behind(entry, col + 1));
        }
    }

private:
    __device__ __forceinline__ static Place behind(const Place& place, int step) {
        return {place.b, place.h, place.at + step, place.as_float + static_cast<float>(step)};
    }

    // Moves the entry on to that of `row`, which is not in front of it.
    __device__ __forceinline__ Place place_behind(Entry& entry, int row) const {
        while (row - entry.first_row >= sequences_.length) {
            entry.first_row += sequences_.length;
            const bool is_last = entry.h - head_ + 1 == sequences_.heads;
            entry.b += is_last;
            entry.h = is_last ? head_ : entry.h + 1;
        }
        return entry.place(row);
    }

    const Sequences& sequences_;
    Entry entry_{0, 0, 0};   // of head 0 of the packed tensors
    int first_ = 0, head_ = 0;
};

}   // namespace ffa
