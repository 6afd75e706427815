// A mask program to slices without the host: what `row_intervals` and `padded_slices_from_intervals` compute.
//
//   keys -> runs of equal keys -> key intervals of rows -> borders of slices -> slices
//
// `Mask` is made from the program by magi_compile/kernels/sm90/masks/source.py. All thread blocks are there at once,
// and wait for one another between the steps.
#pragma once
#include "common/block.cuh"
#include "common/search.cuh"
#include "functions/tables.cuh"

namespace ffa {

constexpr int kNever = 0x7fffffff;

// kNumWords values of 8 bytes follow: what the program captures, then where each check reports.
struct MaskSlicesParams {
    int* q_ranges;           // [capacity, 2]
    int* k_ranges;           // [capacity, 2]
    int* mask_types;         // [capacity]
    int* intervals;          // [2, kNumLanes, batch * heads, seqlen_q]: first keys, then ends
    int* scratch;            // 8-byte aligned
    unsigned* broken;        // [kNumChecks], zeros: becomes the complement of the first place where a check fails
    unsigned* num_arrived;   // zero; for `wait_for_grid`
    int batch, seqlen_q, seqlen_k, capacity;
    int heads;             // with masks of their own, each an entry: b * heads + h; 1 where all have the same mask
    int heads_per_group;   // which read the same keys
};

static_assert(sizeof(MaskSlicesParams) == 80, "packed by magi_compile/kernels/sm90/params.py");

// Arithmetic of 64-bit integers that ends at the least and the highest one, which are further than any key, as in
// masks/expr/integers.py; division rounds down.
__device__ __forceinline__ Int end(bool is_negative) {
    return static_cast<Int>(~Bits{0} >> 1) ^ (is_negative ? ~Int{0} : 0);
}

__device__ __forceinline__ Int add(Int x, Int y) {
    const Int sum = static_cast<Int>(static_cast<Bits>(x) + static_cast<Bits>(y));
    return ((x ^ sum) & (y ^ sum)) < 0 ? end(x < 0) : sum;
}

__device__ __forceinline__ Int sub(Int x, Int y) {
    const Int difference = static_cast<Int>(static_cast<Bits>(x) - static_cast<Bits>(y));
    return ((x ^ y) & (x ^ difference)) < 0 ? end(x < 0) : difference;
}

__device__ __forceinline__ Int mul(Int x, Int y) {
    const double size = static_cast<double>(x) * static_cast<double>(y);
    const bool is_beyond = size >= 0x1p63 || size < -0x1p63;
    return is_beyond ? end(size < 0) : static_cast<Int>(static_cast<Bits>(x) * static_cast<Bits>(y));
}

__device__ __forceinline__ Int neg(Int x) { return sub(0, x); }
__device__ __forceinline__ Int abs(Int x) { return x < 0 ? neg(x) : x; }
__device__ __forceinline__ Int min(Int x, Int y) { return x < y ? x : y; }
__device__ __forceinline__ Int max(Int x, Int y) { return x < y ? y : x; }

__device__ __forceinline__ Int mod(Int x, Int y) {
    const Int rest = y == -1 ? 0 : x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

__device__ __forceinline__ Int floordiv(Int x, Int y) {
    if (y == -1) {
        return neg(x);
    }
    return x / y - (x % y != 0 && (x < 0) != (y < 0));
}

// The runs of equal values of an expression along the keys of one entry.
struct Runs {
    Int* value;          // [num_runs]
    int* begin;          // [num_runs]
    int* order;          // the runs by value, then by place; a power of two, where the values are searched for
    int* num_drops;      // [num_runs]: how many runs up to this one have a smaller value than the one before
    unsigned* borders;   // a bit for each key: a run begins
    int* num_runs;
    int seqlen_k;

    __device__ __forceinline__ int count() const { return *num_runs; }
    __device__ __forceinline__ bool drops(int run) const { return run > 0 && value[run] < value[run - 1]; }
    __device__ __forceinline__ int begin_of(int run) const { return run < count() ? begin[run] : seqlen_k; }
    __device__ __forceinline__ int run_of(int key) const {
        return partition_point(count(), [&](int run) { return begin[run] <= key; }) - 1;
    }
};

// The keys of one value.
struct Group {
    int begin, end;
    int place, count;   // of its runs, in order

    __device__ __forceinline__ bool is_whole() const { return count <= 1; }   // whether all keys in between have it
};

template <class Mask>
class MaskSlices {
public:
    __device__ MaskSlices(const MaskSlicesParams& params, const Int* words)
        : params_(params),
          words_(words),
          num_rows_(params.batch * params.heads * params.seqlen_q),
          num_key_words_((params.seqlen_k + 31) / 32),
          num_sorted_(1),
          num_row_words_((static_cast<Int>(Mask::kNumLanes) * num_rows_ + 31) / 32) {
        while (num_sorted_ < params.seqlen_k) {
            num_sorted_ *= 2;
        }
        first_ = reinterpret_cast<Int*>(params.scratch);
        last_ = first_ + params.capacity;
        starts_ = reinterpret_cast<unsigned*>(last_ + params.capacity);
        ends_ = starts_ + num_row_words_;
        runs_ = reinterpret_cast<int*>(starts_ + 2 * num_row_words_);
    }

    __device__ void run() {
        unsigned round = 0;
        const auto wait = [&] { wait_for_grid(params_.num_arrived, ++round); };
        if (Mask::kNumIndexes > 0) {
            mark_keys();
            wait();
            index_keys();
            wait();
        }
        intersect_rows();
        wait();
        mark_rows();
        wait();
        if (blockIdx.x == 0) {
            write_slices();
        }
    }

    // What a program asks for.

    __device__ __forceinline__ Int word(int i) const { return words_[i]; }
    __device__ __forceinline__ int heads() const { return params_.heads; }
    __device__ __forceinline__ int seqlen_q() const { return params_.seqlen_q; }
    __device__ __forceinline__ int seqlen_k() const { return params_.seqlen_k; }

    __device__ __forceinline__ int edge(Int key) const {
        return static_cast<int>(max(0, min(key, static_cast<Int>(params_.seqlen_k))));
    }

    // Whether the values never decrease in [lo, hi).
    __device__ bool is_ordered(int index, int entry, int lo, int hi) const {
        if (lo >= hi) {
            return true;
        }
        const Runs runs = this->runs(index, entry);
        return runs.num_drops[runs.run_of(lo)] == runs.num_drops[runs.run_of(hi - 1)];
    }

    // The first key of [lo, hi), where values never decrease, whose value is above `limit`, or hi.
    __device__ Int bound_within(int index, int entry, Int limit, int lo, int hi) const {
        if (lo >= hi) {
            return hi;
        }
        const Runs runs = this->runs(index, entry);
        const int first = runs.run_of(lo), count = runs.run_of(hi - 1) + 1 - first;
        const int below = partition_point(count, [&](int i) { return runs.value[first + i] <= limit; });
        return below == 0 ? lo : min(hi, runs.begin_of(first + below));
    }

    __device__ Group group(int index, int entry, Int wanted) const {
        const Runs runs = this->runs(index, entry);
        const int count = runs.count();
        const auto value = [&](int place) { return runs.value[runs.order[place]]; };
        const int place = partition_point(count, [&](int i) { return value(i) < wanted; });
        if (place == count || value(place) != wanted) {
            return {0, 0, 0, 0};
        }
        int last = place;
        if (place + 1 < count && value(place + 1) == wanted) {
            last = partition_point(count, [&](int i) { return value(i) <= wanted; }) - 1;
        }
        return {runs.begin[runs.order[place]], runs.begin_of(runs.order[last] + 1), place, last + 1 - place};
    }

    // Cuts [lo, hi) down to the keys of a group in it; whether these are next to each other. It has no keys outside the
    // group but those in between.
    __device__ bool narrow_to(const Group& group, int index, int entry, int& lo, int& hi) const {
        if (group.is_whole() || lo >= hi) {
            return true;
        }
        const Runs runs = this->runs(index, entry);
        const auto run = [&](int i) { return runs.order[group.place + i]; };
        const int first = partition_point(group.count, [&](int i) { return runs.begin_of(run(i) + 1) <= lo; });
        const int end = partition_point(group.count, [&](int i) { return runs.begin[run(i)] < hi; });
        const int begin = lo;
        lo = first < end ? static_cast<int>(max(begin, runs.begin[run(first)])) : 0;
        hi = first < end ? static_cast<int>(min(hi, runs.begin_of(run(end - 1) + 1))) : 0;
        return end - first <= 1;
    }

    // Cuts [lo, hi) down to where a condition on the keys holds; whether these keys are next to each other.
    __device__ bool narrow(int index, int entry, int& lo, int& hi) const {
        bool is_whole = true;
        int begin = 0, end = 0;
        if (lo < hi) {
            const Runs runs = this->runs(index, entry);
            int first = runs.run_of(lo), last = runs.run_of(hi - 1);
            begin = lo;
            end = hi;
            if (runs.value[first] == 0) {
                begin = runs.begin_of(++first);
            }
            if (runs.value[last] == 0) {
                end = runs.begin[last--];
            }
            is_whole = begin >= end || first == last;
        }
        lo = begin < end ? begin : 0;
        hi = begin < end ? end : 0;
        return is_whole;
    }

    __device__ __forceinline__ void require_in_row(int check, int entry, int q, bool holds) const {
        report(check, entry * params_.seqlen_q + q, holds);
    }

    __device__ __forceinline__ void require_at_key(int check, int entry, int kv, bool holds) const {
        report(check, entry * params_.seqlen_k + kv, holds);
    }

private:
    __device__ __forceinline__ void report(int check, int place, bool holds) const {
        if (!holds) {
            atomicMax(&params_.broken[check], ~static_cast<unsigned>(place));
        }
    }

    // An index is made for each batch entry, head, or both, as far as its values differ between these.
    __device__ __forceinline__ static bool is_of_batch(int index) { return Mask::kIndexesOfBatch >> index & 1; }
    __device__ __forceinline__ static bool is_of_heads(int index) { return Mask::kIndexesOfHeads >> index & 1; }

    __device__ __forceinline__ int num_indexes(int index) const {
        return (is_of_batch(index) ? params_.batch : 1) * (is_of_heads(index) ? params_.heads : 1);
    }

    // The first entry that an index is for, by its number.
    __device__ __forceinline__ int entry_of(int index, int number) const {
        return is_of_heads(index) ? number : number * params_.heads;
    }

    __device__ __forceinline__ int number_of(int index, int entry) const {
        const int b = is_of_batch(index) ? entry / params_.heads : 0;
        return is_of_heads(index) ? b * params_.heads + entry % params_.heads : b;
    }

    __device__ __forceinline__ Runs runs(int index, int entry) const {
        int slot = number_of(index, entry);
        for (int other = 0; other < index; ++other) {
            slot += num_indexes(other);
        }
        const int num_words = 4 * params_.seqlen_k + num_sorted_ + num_key_words_ + 1;
        int* const memory = runs_ + static_cast<Int>(slot) * ((num_words + 1) / 2 * 2);
        Runs runs;
        runs.value = reinterpret_cast<Int*>(memory);
        runs.begin = memory + 2 * params_.seqlen_k;
        runs.order = runs.begin + params_.seqlen_k;
        runs.num_drops = runs.order + num_sorted_;
        runs.borders = reinterpret_cast<unsigned*>(runs.num_drops + params_.seqlen_k);
        runs.num_runs = runs.num_drops + params_.seqlen_k + num_key_words_;
        runs.seqlen_k = params_.seqlen_k;
        return runs;
    }

    __device__ void mark_keys() {
        for (int index = 0; index < Mask::kNumIndexes; ++index) {
            for (int i = 0; i < num_indexes(index); ++i) {
                const int entry = entry_of(index, i);
                bits_of_grid(params_.seqlen_k, runs(index, entry).borders, [&](Int kv) {
                    const int key = static_cast<int>(kv);
                    const Int value = Mask::key(*this, index, entry, key);
                    return key == 0 || Mask::key(*this, index, entry, key - 1) != value;
                });
            }
        }
    }

    // A thread block for each index.
    __device__ void index_keys() {
        int number = 0;
        for (int index = 0; index < Mask::kNumIndexes; ++index) {
            for (int i = 0; i < num_indexes(index); ++i, ++number) {
                if (number % gridDim.x == blockIdx.x) {
                    index_keys(index, entry_of(index, i));
                }
            }
        }
    }

    __device__ void index_keys(int index, int entry) {
        const Runs runs = this->runs(index, entry);
        const int count = prefix_sum(
            num_key_words_, [&](int word) { return __popc(runs.borders[word]); },
            [&](int word, int run) {
                for (unsigned bits = runs.borders[word]; bits != 0; bits &= bits - 1) {
                    runs.begin[run++] = 32 * word + __ffs(bits) - 1;
                }
            });
        for_each(count, [&](int run) { runs.value[run] = Mask::key(*this, index, entry, runs.begin[run]); });
        for_each(1, [&](int) { *runs.num_runs = count; });
        const int num_drops = prefix_sum(
            count, [&](int run) { return int(runs.drops(run)); },
            [&](int run, int before) { runs.num_drops[run] = before + runs.drops(run); });
        if (!(Mask::kSearchedIndexes >> index & 1)) {
            return;
        }
        int num_sorted = 1;
        while (num_sorted < count) {
            num_sorted *= 2;
        }
        for_each(num_sorted, [&](int run) { runs.order[run] = run; });
        if (num_drops > 0) {
            sort(runs.order, num_sorted, [&](int x, int y) {
                const bool is_tie = x >= count || y >= count || runs.value[x] == runs.value[y];
                return is_tie ? x < y : runs.value[x] < runs.value[y];
            });
        }
    }

    __device__ void intersect_rows() {
        for_each_of_grid(num_rows_, [&](int row) {
            int lo[Mask::kNumLanes], hi[Mask::kNumLanes];
            Mask::lanes(*this, row / params_.seqlen_q, row % params_.seqlen_q, lo, hi);
            make_disjoint(lo, hi);
#pragma unroll
            for (int lane = 0; lane < Mask::kNumLanes; ++lane) {
                params_.intervals[static_cast<Int>(lane) * num_rows_ + row] = lo[lane];
                params_.intervals[static_cast<Int>(Mask::kNumLanes + lane) * num_rows_ + row] = hi[lane];
            }
        });
    }

    // Sorts the intervals of a row and joins those that overlap or touch; the others become [0, 0).
    __device__ static __forceinline__ void make_disjoint(int (&lo)[Mask::kNumLanes], int (&hi)[Mask::kNumLanes]) {
        constexpr int kNumLanes = Mask::kNumLanes;
#pragma unroll
        for (int j = 0; j < kNumLanes; ++j) {
            const bool is_live = lo[j] < hi[j];
            lo[j] = is_live ? lo[j] : kNever;
            hi[j] = is_live ? hi[j] : kNever;
        }
#pragma unroll
        for (int step = 0; step < kNumLanes; ++step) {
#pragma unroll
            for (int j = step % 2; j < kNumLanes - 1; j += 2) {
                const bool swaps = lo[j] > lo[j + 1];
                const int a = lo[j], b = hi[j], x = lo[j + 1], y = hi[j + 1];
                lo[j] = swaps ? x : a;
                hi[j] = swaps ? y : b;
                lo[j + 1] = swaps ? a : x;
                hi[j + 1] = swaps ? b : y;
            }
        }
#pragma unroll
        for (int j = 0; j < kNumLanes - 1; ++j) {
            if (lo[j + 1] <= hi[j] && lo[j + 1] < kNever) {
                lo[j + 1] = lo[j];
                hi[j + 1] = hi[j] < hi[j + 1] ? hi[j + 1] : hi[j];
                lo[j] = hi[j] = kNever;
            }
        }
#pragma unroll
        for (int j = 0; j < kNumLanes; ++j) {
            hi[j] = lo[j] < kNever ? hi[j] : 0;
            lo[j] = lo[j] < kNever ? lo[j] : 0;
        }
    }

    // A place is a lane and a row: `lane * num_rows_ + row`.

    __device__ __forceinline__ int lo(Int place) const { return params_.intervals[place]; }
    __device__ __forceinline__ int hi(Int place) const {
        return params_.intervals[place + static_cast<Int>(Mask::kNumLanes) * num_rows_];
    }
    __device__ __forceinline__ bool is_live(Int place) const { return lo(place) < hi(place); }

    // How the interval goes on from the row before `place`: a mask type, or -1 where it does not.
    __device__ __forceinline__ int change_before(Int place) const {
        if (place % params_.seqlen_q == 0 || !is_live(place - 1) || !is_live(place)) {
            return -1;
        }
        const int left = lo(place) - lo(place - 1), right = hi(place) - hi(place - 1);
        return ((left | right) & ~1) == 0 ? right + 2 * left : -1;
    }

    __device__ __forceinline__ int change_behind(Int place) const {
        return (place + 1) % params_.seqlen_q == 0 ? -1 : change_before(place + 1);
    }

    // Whether a run of at least two rows cannot go on behind `place`.
    __device__ __forceinline__ bool is_cut(Int place) const {
        const int before = change_before(place), behind = change_behind(place);
        return before >= 0 && behind >= 0 && before != behind;
    }

    __device__ __forceinline__ bool starts(Int place) const {
        return is_live(place) && (change_before(place) < 0 || is_cut(place - 1));
    }

    __device__ __forceinline__ bool ends(Int place) const {
        return is_live(place) && (change_behind(place) < 0 || is_cut(place));
    }

    __device__ void mark_rows() {
        const Int num_places = static_cast<Int>(Mask::kNumLanes) * num_rows_;
        bits_of_grid(num_places, starts_, [&](Int place) { return starts(place); });
        bits_of_grid(num_places, ends_, [&](Int place) { return ends(place); });
    }

    // The places of the set bits, as many as fit; how many there are.
    __device__ int list_places(const unsigned* words, Int* places) const {
        return prefix_sum(
            static_cast<int>(num_row_words_), [&](int word) { return __popc(words[word]); },
            [&](int word, int count) {
                for (unsigned bits = words[word]; bits != 0 && count < params_.capacity; bits &= bits - 1) {
                    places[count++] = 32 * static_cast<Int>(word) + __ffs(bits) - 1;
                }
            });
    }

    __device__ void write_slices() {
        const int num_slices = list_places(starts_, first_);
        list_places(ends_, last_);
        bool holds = num_slices <= params_.capacity;
        for (int check = 0; check < Mask::kNumChecks; ++check) {
            holds = holds && params_.broken[check] == 0;
        }
        // Of a mask whose checks fail nothing remains: no kernel may meet the nonsense that it leads to.
        for_each(params_.capacity, [&](int i) {
            int q_begin = 0, q_end = 0, k_begin = 0, k_end = 0, mask_type = 0;
            if (holds && i < num_slices) {
                const Int first = first_[i], last = last_[i];
                q_begin = static_cast<int>(first % num_rows_);
                q_end = static_cast<int>(last % num_rows_) + 1;
                const int entry = q_begin / params_.seqlen_q;
                const int shift = entry / params_.heads_per_group * params_.seqlen_k;
                k_begin = lo(first) + shift;
                k_end = hi(last) + shift;
                mask_type = ends(first) ? 0 : change_behind(first);
            }
            params_.q_ranges[2 * i] = q_begin;
            params_.q_ranges[2 * i + 1] = q_end;
            params_.k_ranges[2 * i] = k_begin;
            params_.k_ranges[2 * i + 1] = k_end;
            params_.mask_types[i] = mask_type;
        });
        // A flag that the host reads is 1, then what was found.
        for_each(Mask::kNumChecks + 1, [&](int check) {
            Int* const flag = reinterpret_cast<Int*>(words_[Mask::kNumWords + check]);
            if (check == Mask::kNumChecks ? num_slices > params_.capacity : params_.broken[check] != 0) {
                flag[1] = num_slices;
                if (check < Mask::kNumChecks) {
                    Mask::find(*this, check, static_cast<int>(~params_.broken[check]), flag + 1);
                }
                __threadfence_system();
                flag[0] = 1;
            }
        });
    }

    const MaskSlicesParams& params_;
    const Int* const words_;
    const int num_rows_;
    const int num_key_words_;
    int num_sorted_;
    const Int num_row_words_;
    Int *first_, *last_;         // places where slices begin, and of their last rows
    unsigned *starts_, *ends_;   // a bit for each place
    int* runs_;
};

}   // namespace ffa
